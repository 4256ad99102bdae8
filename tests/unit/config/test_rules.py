"""Rules for configuration values."""

from __future__ import annotations

import pytest

from lockstep.config import rules
from lockstep.config.resolve import resolve
from lockstep.config.rules import (
    parse_overrides,
    refuse_missing_packages,
    shared_values,
)
from lockstep.config.schema import config_fields
from lockstep.errors import ConfigError
from lockstep.training.skip import parse_skip


@pytest.mark.parametrize(
    ("task", "key", "text"),
    [
        ("translate", "lora.rank", "8"),
        ("translate", "llama.size", "1M"),
        ("pretrain", "model.dim", "64"),
    ],
)
def test_a_value_that_the_task_does_not_read_is_refused(task: str, key: str, text: str) -> None:
    kind = "cldr" if task == "translate" else "stdlib"
    with pytest.raises(ConfigError, match=f"task={task} does not support {key}={text}") as caught:
        resolve(None, {"task": task, "data.kind": kind, key: text})
    assert f"{key} from command line" in caught.value.where


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("layout.tensor", "2"),
        ("layout.pipeline", "2"),
        ("fsdp.reduce", "per_step"),
    ],
)
def test_values_that_exclude_a_wire_format_are_refused(key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.wire=int8 is not supported with") as caught:
        resolve(None, {"parallel.wire": "int8", key: text})
    assert f"{key} from command line" in caught.value.where and "wire=fp32" in caught.value.hint


def test_a_missing_package_is_refused_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    refuse_missing_packages(resolve(None, {}), prepared=False)
    dataset = {"data.kind": "huggingface", "data.dataset": "a/b"}
    refuse_missing_packages(resolve(None, dataset), prepared=True)
    for flags, package, extra in (
        (dataset, "datasets", "hub"),
        ({"track.tensorboard": "true"}, "tensorboard", "track"),
        ({"track.wandb": "offline"}, "wandb", "track"),
    ):
        with pytest.raises(ConfigError, match=f"the package {package} is not installed") as caught:
            refuse_missing_packages(resolve(None, flags), prepared=False)
        assert (
            "command line" in caught.value.where
            and f"'lockstep-train[{extra}]'" in caught.value.hint
        )


def test_compilation_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "which", lambda name: None)
    refuse_missing_packages(resolve(None, {}), prepared=False)
    compiled = resolve(None, {"compute.compile": "true"})
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler") as caught:
        refuse_missing_packages(compiled, prepared=False)
    assert (
        "compute.compile from command line" in caught.value.where and "APT=g++" in caught.value.hint
    )
    monkeypatch.setenv("CXX", "/opt/bin/c++")
    monkeypatch.setattr(rules, "which", lambda name: name if name == "/opt/bin/c++" else None)
    refuse_missing_packages(compiled, prepared=False)


def test_all_values_are_shared_except_logging_and_timeouts() -> None:
    flags = {"steps": "80", "data.kind": "files", "data.train": "a,b"}
    shared = shared_values(resolve(None, flags).run)
    assert (shared["steps"], shared["data.train"], shared["data.kind"]) == (
        "80",
        '["a", "b"]',
        "files",
    )
    each_host = {key for key in config_fields() if key not in shared}
    assert {key.partition(".")[0] for key in each_host} == {
        "track",
        "elastic",
        "parallel",
    } and not any(config_fields()[key].bits for key in each_host)
    assert {
        "elastic.verify_every",
        "parallel.bucket_bytes",
        "layout.shard",
        "checkpoint.every_steps",
    } <= set(shared)


@pytest.mark.parametrize(
    "word",
    [
        "seed=2",
        "optim.beta1=0.8",
        "optim.learning_rate",
        "optim.learning_rate=-1",
        "optim.schedule=square",
    ],
)
def test_only_the_schedule_can_be_overridden(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides([word])
    assert caught.value.where == "--override" and caught.value.hint


DILOCO = {"diloco.learners": "4", "diloco.every": "50"}


@pytest.mark.parametrize(
    ("values", "what", "hint"),
    [
        (
            {"diloco.learners": "3"},
            "batch.micro_batches=8 is not a multiple of diloco.learners=3",
            "try diloco.learners=2 or",
        ),
        (
            {"diloco.every": "40"},
            "steps=300 is not a multiple of diloco.every=40",
            "try diloco.every=25 or steps=320",
        ),
        (
            {"checkpoint.every_steps": "30"},
            "checkpoint.every_steps=30 is not a multiple of diloco.every=50",
            "diloco.every=30 or checkpoint.every_steps=50",
        ),
        (
            {"layout.pipeline": "2"},
            "diloco.learners=4 does not support layout.pipeline=2",
            "train whole replicas",
        ),
        (
            {"layout.shard": "4"},
            "layout.shard=4 and 2 micro-batches in a learner's step",
            "layout.shard=2 or batch.micro_batches=16",
        ),
        (
            {"layout.shard": "2", "optim.kind": "muon"},
            "layout.shard=2 needs an optimizer that updates each element",
            "optim.kind=adamw",
        ),
        (
            {"layout.shard": "2", "optim.fused": "true"},
            "layout.shard=2 needs an optimizer that updates each element",
            "optim.fused",
        ),
        (
            {"memory.weights": "bf16"},
            "diloco.learners=4 does not support memory.weights=bf16: a learner's small change",
            "remove memory.weights",
        ),
        (
            {"elastic.verify_every": "2"},
            "diloco.learners=4 does not support elastic.verify_every=2: learners compare",
            "remove elastic.verify_every",
        ),
        (
            {"diloco.learners": "0"},
            "diloco.every=20 needs diloco.learners, which is 0",
            "set diloco.learners",
        ),
    ],
)
def test_learners_that_cannot_train_are_refused(
    values: dict[str, str], what: str, hint: str
) -> None:
    given = (
        DILOCO | {"diloco.every": "20" if values.get("diloco.learners") == "0" else "50"} | values
    )
    with pytest.raises(ConfigError) as caught:
        resolve(None, given)
    assert what in str(caught.value) and hint in caught.value.hint
    resolve(None, DILOCO | {"checkpoint.every_steps": "0", "steps": "0", "layout.shard": "2"})


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"divergence.skip": "3"}, "divergence.skip: '3' is not a step and a micro-batch"),
        ({"divergence.skip": "0:1"}, "divergence.skip: '0:1' is not a step and a micro-batch"),
        (
            {"divergence.skip": "3:8"},
            "divergence.skip has 3:8, and the micro-batches of a step are 0 to 7",
        ),
        (
            {"divergence.skip": "3:0,3:1", "batch.micro_batches": "2"},
            "divergence.skip leaves no micro-batch of step 3",
        ),
        (
            {"on_divergence": "rollback", "layout.pipeline": "2"},
            "on_divergence=rollback does not support layout.pipeline=2: no micro-batch is",
        ),
        (
            DILOCO | {"on_divergence": "rollback", "divergence.skip": "3:1"},
            'on_divergence=rollback and divergence.skip=["3:1"] does not support diloco.learners=4',
        ),
    ],
)
def test_micro_batches_that_cannot_be_skipped_are_refused(
    values: dict[str, str], what: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(None, values)
    assert what in str(caught.value) and caught.value.hint
    assert parse_skip(["3:7", "3:1", "9:0", "3:1"]) == {2: [1, 7], 8: [0]}
