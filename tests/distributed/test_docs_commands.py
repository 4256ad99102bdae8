"""Every console command on the pages runs, with the exit code and the output that the page shows."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from unittest import mock

import pytest
from support.docs_commands import commands_of, make_folder, matches, pages, run_page, text_of
from support.launching import ROOT, run_lockstep
from support.object_store import environment, s3_server

# Beside test_house_price.py for accumulation.md, and test_lab.py for collectives.md.
QUICK = {"learn/data-parallel.md"}
WITH_HOSTS = {"guides/several-hosts.md", "guides/two-machines.md"}  # tests/chaos/test_ssh.py
PAGES = [
    pytest.param(page, marks=[] if page in QUICK else pytest.mark.long)
    for page in ["../README.md", *pages()]
    if page not in WITH_HOSTS and any(command.runs_here for command in commands_of(page))
]
# Start of a command that needs other machines -> the test that runs instead.
RENDER, PRODUCTION = "unit/render/test_rendered_files.py", "unit/models/test_production.py"
SLURM, STORE = "chaos/test_slurm.py", "chaos/test_stored_hosts.py"
ELSEWHERE = {
    "NOTICE=": "unit/test_spot_script.py::test_a_notice_sends_the_drain_signal",
    "docker ": "chaos/test_containers.py::test_a_killed_container_heals_like_a_host_and_joins_again",
    "kubectl ": f"{RENDER}::test_files_for_kubernetes_are_valid",
    "lockstep launch --ray ": "chaos/test_ray.py::test_killed_nodes_heal_like_hosts_and_replacements_join",
    "lockstep launch --stop ": f"{SLURM}::test_a_stop_by_the_user_is_not_queued_again",
    "lockstep launch RUN.toml --hosts": f"{STORE}::test_the_host_of_rank_0_is_lost_and_replaced",
    "lockstep launch recipes/translate.toml --nodes": f"{SLURM}::test_a_run_survives_lost_nodes",
    "lockstep report s3:": f"{STORE}::test_a_host_without_the_run_watches_and_reports_it",
    "lockstep watch ada:": "chaos/test_watch_live.py::test_a_run_on_another_host_is_watched_by_ssh",
    "lockstep watch s3:": f"{STORE}::test_a_host_without_the_run_watches_and_reports_it",
    "pip ": "unit/test_distribution.py::test_the_wheel_works_in_an_empty_folder",
    "sbatch ": f"{SLURM}::test_a_node_joins_late_and_leaves_at_its_own_preemption",
    "srun ": "unit/runtime/test_environment.py::test_srun_task_has_rank_master_and_a_port_of_its_job",
    "torchrun --nnodes 2": "chaos/test_train_command.py::test_torchrun_starts_the_same_training",
    # No test starts these servers: an export has the format that they read.
    **dict.fromkeys(
        ("vllm ", "python -m sglang", "python convert_", "llama-server "),
        f"{PRODUCTION}::test_the_folder_has_what_the_loaders_of_vllm_and_sglang_read",
    ),
}
# Page with a script in a block -> the test of the script.
SCRIPTS = {
    "cluster-trials.md": f"{RENDER}::test_the_page_about_clusters_shows_the_file_for_slurm",
    "guides/two-machines.md": (
        "chaos/test_ssh.py::test_the_commands_of_two_machines_run_from_keys_to_the_first_step"
    ),
    "object-store.md": (  # the variables of the store
        "distributed/test_docs_commands.py::test_the_commands_of_a_page_run_as_it_shows"
    ),
}


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run_as_it_shows(page: str, tmp_path: Path) -> None:
    make_folder(tmp_path)
    text = text_of(page)
    if "hf-model" in text and "--out hf-model" not in text:
        make_model_folder(tmp_path)
    with ExitStack() as stack:
        if "s3://runs/" in text:
            store = environment(stack.enter_context(s3_server()), tmp_path / "copies")
            stack.enter_context(mock.patch.dict(os.environ, store))
        run_page(page, tmp_path)


def make_model_folder(folder: Path) -> None:
    """Create `hf-model`, a small Llama in a Hugging Face folder."""
    words = ["--data.pairs", 500, "--steps", 2, "--evaluate.at_end", 0, "--out", folder / "first"]
    run_lockstep("train", "recipes/llama-sft.toml", *words, cwd=folder, check=True)
    run_lockstep("checkpoint", "export", folder / "first", "--out", folder / "hf-model", check=True)


def test_a_test_stands_for_each_command_that_does_not_run_here() -> None:
    elsewhere = [each.text for page in pages() for each in commands_of(page) if each.is_elsewhere]
    standing = {
        start: [text for text in elsewhere if text.startswith(start)] for start in ELSEWHERE
    }
    assert all(standing.values()) and not {*elsewhere} - {*chain(*standing.values())}
    for test in {*ELSEWHERE.values(), *SCRIPTS.values()}:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), test


def test_no_block_of_another_language_has_commands() -> None:
    """Blocks of scripts are in SCRIPTS."""
    for page in {*pages()} - {"reference/cli.md"}:
        blocks = re.findall(r"^``` *(\w*).*\n((?:(?!```).*\n)*)```$", text_of(page), re.MULTILINE)
        scripts = [lines for language, lines in blocks if language in ("bash", "sh", "shell")]
        outputs = "".join(lines for language, lines in blocks if language in ("", "text"))
        commands = re.findall(r"^(?:\$|lockstep|python|pip|torchrun) .*", outputs, re.MULTILINE)
        assert not commands and (not scripts or page in SCRIPTS), page


def test_the_pages_have_commands() -> None:
    assert len(pages()) >= 60
    assert sum(len(commands_of(page)) for page in pages()) >= 150


def test_output_is_compared_with_the_page() -> None:
    assert matches(["step 4 sha256 ..."], "step 4 sha256 abc\n")
    assert matches(["...", "b", "..."], "a\nb\n\nc\n")
    assert not matches(["step 4 sha256 ..."], "step 5 sha256 abc\n")
    assert not matches(["a"], "a\nb\n")
