# make setup | train | test-fast | test | test-chaos | check | gpu-check | docs | bench | wheel
# TORCH chooses another build, for example: make setup TORCH="torch==2.13.0 --index-url URL-OF-YOUR-WHEELS"

PYTHON ?= python3
VENV ?= .venv
TORCH ?= $(shell grep '^torch==' constraints.txt)
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt
# Four workers on two cores: chaos tests wait for time limits. In the order of the folders, so that the long files come first.
PYTEST := $(BIN)/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder
export OMP_NUM_THREADS ?= 1

.PHONY: setup train test-fast test test-chaos check gpu-check bench docs wheel
setup: $(VENV)/.set-up

# torch is installed first and alone: with loose ranges beside it, pip may choose another build of several gigabytes.
$(VENV)/.set-up: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(PIP) -e ".[dev]"
	touch $@

# TRAIN adds options: make train TRAIN="--steps 60"
train: setup
	$(BIN)/lockstep train --out runs/default $(TRAIN)

# The unit tests without those marked slow: a minute on two idle cores.
test-fast: setup
	$(PYTEST) -m "not slow" tests/unit

# Everything except the long part of the chaos tests.
test: setup
	$(PYTEST)

# All chaos tests, the long part included; those with several hosts need root.
test-chaos: setup
	LOCKSTEP_CHAOS=1 $(PYTEST) tests/chaos

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/packages.py
	$(BIN)/python tools/ratchet.py
	$(BIN)/python tools/prose.py -q

# On a machine with GPUs, about ten minutes on one; keeps its result in bench/gpu/.
gpu-check: setup
	$(BIN)/python -m bench.gpu.check --device cuda --keep cuda

bench: setup
	$(PIP) -e ".[bench]"
	$(BIN)/python -m bench.step.run

# The site, in site/. On the path: ruff, which breaks the lines of signatures.
docs: setup
	PATH="$(BIN):$$PATH" $(BIN)/zensical build --clean --strict
	$(BIN)/python tools/check_site.py

# Needs neither torch nor the tools.
wheel:
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .
