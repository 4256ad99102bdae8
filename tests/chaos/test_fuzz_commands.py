"""Real commands with unusual bytes in their files, unusual words and unusual variables.

A sample of the files by default, all of them with LOCKSTEP_CHAOS=1 (`pytest -rP` prints the
counts). tests/unit/test_fuzz.py covers each value of a run and each reader.
"""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fuzz import ODD_BYTES, Commands, Tally
from support.launching import lockstep_command, run_command

LONG = os.environ.get("LOCKSTEP_CHAOS") == "1"
SMALL = (
    "--model.dim 8 --model.n_heads 1 --model.ffn_dim 8 --model.encoder_layers 1"
    " --model.decoder_layers 1 --tokenizer.vocab_size 300 --batch.tokens 128"
    " --batch.micro_batches 1 --steps 1 --evaluate.at_end 1"
)
PAIRS = f"train {SMALL} --data.kind files --data.held_out 2 --data.train"
LLAMA = (
    "--steps 1 --llama.size 1M --tokenizer.vocab_size 400 --batch.seq_len 32 --batch.tokens 32"
    " --batch.micro_batches 1 --evaluate.at_end 1 --data.held_out_share 0.2"
)
TEXT = f"--task pretrain --data.kind text {LLAMA}"
CHAT = f"--task sft --data.kind chat {LLAMA}"


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    folder = tmp_path_factory.mktemp("fuzz")
    with Commands(folder) as running:
        pairs = f"train --out pairs {SMALL} --data.pairs 300 --data.held_out 10"
        text = f"train --out llama {TEXT} --data.train text.jsonl"
        (folder / "text.jsonl").write_bytes(
            b"".join(
                b'{"text": "line %d of a text, which is long enough"}\n' % n for n in range(60)
            )
        )
        trained = [running.run(words.split()) for words in (pairs, text)]
        assert [outcome.code for outcome in trained] == [0, 0], trained
        yield running


def good(name: str) -> bytes:
    """Return valid content, enough for a training run."""
    line = {
        "pairs.txt": b"a word and number %d\n",
        "pairs.tsv": b"a word and number %d\tun numero %d\n",
        "pairs.jsonl": b'{"en": "a word and number %d", "it": "numero %d"}\n',
        "text.txt": b"a word and number %d, which is a line of a text\n" * 50,
        "text.jsonl": b'{"text": "a word and number %d, which is a line of a text"}\n',
        "chats.jsonl": b'{"messages": [{"role": "user", "content": "say %d"}, {"role": "assistant", "content": "%d"}]}\n',
    }[name.removesuffix(".gz")]
    return b"".join(line % ((n,) * line.count(b"%d")) for n in range(60))


FILES = {
    "pairs.txt": f"{PAIRS} pairs.txt,pairs.txt",
    "pairs.txt.gz": f"{PAIRS} pairs.txt.gz,pairs.txt.gz",
    "pairs.tsv": f"{PAIRS} pairs.tsv",
    "pairs.jsonl": f"{PAIRS} pairs.jsonl",
    "text.txt": f"train {TEXT} --data.train text.txt,more.txt",
    "text.jsonl": f"train {TEXT} --data.train text.jsonl",
    "chats.jsonl": f"train {CHAT} --data.train chats.jsonl",
    "lines.txt": "generate llama --tokens 2 --file lines.txt",
    "stdin.txt": "translate pairs",
    "run.toml": "train run.toml --show",
    "hosts.toml": "launch --hosts hosts.toml --host absent",
}


@pytest.mark.timeout(3000)
def test_training_on_unusual_bytes_works_or_is_refused(commands: Commands) -> None:
    """Unusual bytes alone and after valid lines. The short version takes another sample for each file."""
    tally, folder = Tally(), commands.folder
    (folder / "more.txt").write_bytes(b"".join(b"line %d\n" % n * 200 for n in range(30)))
    for index, (name, command) in enumerate(FILES.items()):
        argv = command.split()
        chosen = range(len(ODD_BYTES)) if LONG else range(3 * index % 20, len(ODD_BYTES), 20)
        for number in chosen:
            prefixes = [b""] + ([good(name)] if argv[0] == "train" and "--show" not in argv else [])
            for content in [prefix + ODD_BYTES[number] for prefix in prefixes][
                -2 if LONG else -1 :
            ]:
                (folder / name).write_bytes(
                    gzip.compress(content) if name.endswith(".gz") else content
                )
                out = (
                    ["--out", f"out-{name}-{number}-{len(content)}"]
                    if "--data.train" in argv
                    else []
                )
                outcome = commands.run([*argv, *out], stdin=folder / name)
                tally.judge(f"{name}, odd bytes {number} {ODD_BYTES[number][:30]!r}", outcome)
    tally.check()


RUN = f"train --out new {SMALL}"
WORDS = (
    "train --out /dev/null",
    "train --out /dev/null/run",
    "train --out \udcff",
    "train .",
    "train nothing.toml",
    "train nothing.py:train",
    "train --out",
    f"train --resume {'9' * 5000}",
    "train --profile steps=9..1",
    "train --steps 1 --steps",
    f"launch --host {'a' * 300}",
    "launch --ssh",
    "launch --workers 5000",
    f"launch --min {'9' * 30}",
    "launch --hosts /dev/null",
    "launch --stop /dev/null",
    "status /dev/null",
    "status nothing",
    "drill --faults 1000000000000",
    "drill --workers 5000",
    "evaluate pairs --beams 0",
    "evaluate pairs --average -5",
    "evaluate pairs --workers 5000",
    "evaluate nothing",
    "evaluate /dev/null",
    "translate pairs \udcff",
    "translate pairs --beams 0",
    "translate pairs --step -1",
    "generate llama --file nothing",
    "generate llama --file .",
    f"generate llama x --seed {'9' * 30}",
    f"generate llama x --tokens {'1' + '0' * 15}",
    "generate llama x --tensor 5000",
    "generate /dev/null x",
    "generate llama x --temperature nan",
    "report pairs --out special",
    "report pairs --out /dev/full",
    "checkpoint export pairs --out special",
    "checkpoint export pairs --out /dev/null/x",
    "checkpoint export llama --out exported --shard-bytes inf",
    "checkpoint digest pairs -1",
    "checkpoint verify /dev/null",
    "checkpoint import /dev/null --out imported",
    "checkpoint digest pairs 7",
    "translate pairs a --step 7",
    f"train --out taken {SMALL}",
    f"{RUN} --model.dim 1048576",
    f"{RUN} --model.encoder_layers 1024 --model.dim 65536",
    f"{TEXT} --llama.size 7M",
    f"{TEXT} --llama.size 405B",
    f"{TEXT} --llama.init_from /dev/null",
    f"{TEXT} --data.train **/*",
    f"{RUN} --data.source ../../etc",
    f"{RUN} --data.train /proc/self/mem",
    f"{RUN} --data.kind files --data.train ,",
)
VARIABLES = (
    {"LOCKSTEP_OPTIM_LR": "1"},
    {"LOCKSTEP_DEVICE": "tpu"},
    {"LOCKSTEP_WORKER_ENV": "[[["},
    {"RANK": "x"},
    {"MASTER_PORT": "9" * 5000},
    {"RANK": "9" * 30},
    {"LOCKSTEP_STEPS": "\udcff"},
)


def test_unusual_words_and_variables_are_refused(commands: Commands) -> None:
    tally, special = Tally(), commands.folder / "special"
    (commands.folder / "taken").mkdir()
    (commands.folder / "taken/data").touch()
    os.mkfifo(special)  # a rename would replace it, as it would /dev/null
    for number, words in enumerate(WORDS):
        if words.startswith("--task"):
            words = f"train --out words-{number} --data.train text.jsonl {words}"
        outcome = commands.run(words.split())
        tally.judge(words[-100:], outcome)
        assert outcome.code, f"{words} works"
    for environ in VARIABLES:
        outcome = commands.run(RUN.split(), environ=environ)
        tally.judge(str(environ)[:60], outcome)
        assert outcome.code, f"{environ} works"
    assert special.is_fifo()
    tally.check()


USER_FUNCTIONS = Path(__file__).parents[1] / "support" / "user_functions.py"


def test_an_exception_of_a_user_function_is_printed_once(tmp_path: Path) -> None:
    """With an agent and two workers, each of which raises three times."""
    shutil.copy(USER_FUNCTIONS, tmp_path / "own.py")
    environ = os.environ | {"LOCKSTEP_TMP": str(tmp_path), "LOCKSTEP_DEVICE": "cpu"}
    command = lockstep_command("train", "own.py:fails", "--workers", "2", "--out", "run")
    done = run_command(command, cwd=tmp_path, env=environ)
    logs = [path.read_text() for path in sorted((tmp_path / "run/logs").glob("*.log"))]
    assert done.returncode == 1 and [text.count("Traceback") for text in (done.stderr, *logs)] == [
        1,
        1,
        1,
    ], (done.stderr, logs)
    assert (
        done.stderr.count("an error of the user's loop") == 3
    )  # the warning, the line of the source, the error


def test_a_user_function_gets_arguments_by_its_annotations(commands: Commands) -> None:
    shutil.copy(USER_FUNCTIONS, commands.folder / "own.py")
    tally = Tally()
    cases = {
        "trains --steps 3": 0,
        "trains --steps x": 2,
        "trains --step 3": 2,
        "needs": 2,
        "nothing": 2,
    }
    for words, code in cases.items():
        name, *flags = words.split()
        outcome = commands.run(["train", f"own.py:{name}", "--out", "own", *flags])
        tally.judge(words, outcome)
        assert outcome.code == code and (code or "trained str 3" in outcome.text), outcome
    tally.judge("os:system", refused := commands.run(["train", "os:system", "--out", "own"]))
    assert refused.code == 2 and "'system' in os is not a Python function" in refused.text
    tally.check()
