# make setup | train | test | check | bench | docs
# TORCH chooses another build, for example: make setup TORCH="torch==2.13.0 --index-url URL-OF-YOUR-WHEELS"

PYTHON ?= python3
VENV ?= .venv
TORCH ?= $(shell grep '^torch==' constraints.txt)
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: setup train test check bench docs
setup: $(VENV)/.set-up

# torch goes in first and alone: a resolver that sees it beside loose ranges may fetch another build, of several gigabytes.
$(VENV)/.set-up: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e ".[dev]"
	touch $@

train: setup
	$(BIN)/lockstep train --out runs/default

test: setup
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e ".[bench]"
	$(BIN)/python bench/run.py

docs: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e ".[docs]"
	$(BIN)/mkdocs build --strict
