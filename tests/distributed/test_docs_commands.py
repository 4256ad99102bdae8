"""Every console command on the Learn and Use pages runs, with the exit code and the output that the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.docs_commands import commands_of, make_folder, matches, pages, run_page
from support.launching import run_lockstep

QUICK = {
    "collectives.md",
    "learn/data-parallel.md",
    "learn/ranks.md",
    "learn/script.md",
}  # accumulation.md: test_house_price.py runs its command
OF_OTHER_SECTIONS = ["planning.md"]
WITH_HOSTS = {"guides/several-hosts.md", "guides/two-machines.md"}  # tests/chaos/test_ssh.py
PAGES = [
    pytest.param(page, marks=[] if page in QUICK else pytest.mark.long)
    for page in ["../README.md", *pages(), *OF_OTHER_SECTIONS]
    if page not in WITH_HOSTS and commands_of(page)
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run_as_it_shows(page: str, tmp_path: Path) -> None:
    make_folder(tmp_path)
    if any("hf-model" in command.text for command in commands_of(page)):
        make_model_folder(tmp_path)
    run_page(page, tmp_path)


def make_model_folder(folder: Path) -> None:
    """Create `hf-model`, a small Llama in a Hugging Face folder."""
    words = ["--data.pairs", 500, "--steps", 2, "--evaluate.at_end", 0, "--out", folder / "first"]
    run_lockstep("train", "recipes/llama-sft.toml", *words, cwd=folder, check=True)
    run_lockstep("checkpoint", "export", folder / "first", "--out", folder / "hf-model", check=True)


def test_the_pages_have_commands() -> None:
    assert len(pages()) >= 14
    assert sum(len(commands_of(page)) for page in pages()) >= 30


def test_output_is_compared_with_the_page() -> None:
    assert matches(["step 4 sha256 ..."], "step 4 sha256 abc\n")
    assert matches(["...", "b", "..."], "a\nb\n\nc\n")
    assert not matches(["step 4 sha256 ..."], "step 5 sha256 abc\n")
    assert not matches(["a"], "a\nb\n")
