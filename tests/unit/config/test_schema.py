"""Configuration: the origin of each value, and errors with what is wrong, where, and what to try."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from lockstep.cli.run_options import open_run
from lockstep.config import rules
from lockstep.config.resolve import FORMER_KEYS, parse_flags, read_toml, refuse_unknown_variables, resolve
from lockstep.config.rules import parse_overrides, refuse_missing_packages, shared_values
from lockstep.config.saved_run import format_run, from_json, to_json, write_run
from lockstep.config.schema import ResolvedRun, RunConfig, ScheduleOverride, config_fields
from lockstep.errors import CheckpointError, ConfigError, UsageError
from lockstep.files import add_checksum, write_json
from lockstep.runtime.environment import RESERVED_VARIABLES
from lockstep.runtime.subprocesses import check_worker_count
from lockstep.training.optim import learning_rate
from lockstep.training.setup import refuse_other_overrides
from lockstep.units import format_bytes, format_count, format_duration, parse_bytes, parse_seconds


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('steps = 7\n[optim]\nlearning_rate = 1e-3\nwarmup_steps = 3\n[parallel]\nbucket_bytes = "2 MiB"\ntimeout_s = "2 min"\n')
    found = resolve(file, {"optim.warmup_steps": "5"}, {"LOCKSTEP_OPTIM_WARMUP_STEPS": "4", "LOCKSTEP_SEED": "9", "HOME": "/"})
    run = found.run
    assert (run.steps, run.optim.learning_rate, run.optim.warmup_steps, run.seed, run.batch.micro_batches) == (7, 1e-3, 5, 9, 8)
    assert (run.parallel.bucket_bytes, run.parallel.timeout_s) == (2 * 2**20, 120.0)
    assert found.origin["optim.warmup_steps"] == "command line" and found.origin["seed"].startswith("LOCKSTEP_")
    assert found.origin["steps"] == str(file) and found.origin["batch.tokens"] == "default"
    assert from_json(json.loads(json.dumps(to_json(found)))) == found
    shown = format_run(found).splitlines()
    assert len(shown) == len(config_fields()) and any(
        line.startswith("optim.warmup_steps") and line.endswith("command line") for line in shown
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"optim.lr": "1"}, ["unknown key 'optim.lr'", "command line", "perhaps optim.learning_rate"]),
        ({"model.n_haeds": "1"}, ["unknown key 'model.n_haeds'", "perhaps model.n_heads"]),
        ({"batch.tokens": "many"}, ["batch.tokens = 'many'", "valid integer"]),
        ({"parallel.bucket_bytes": "3 parsecs"}, ["unknown unit 'parsecs'", "25 MB"]),
        ({"model.dropout": "1.5"}, ["model.dropout = '1.5'", "below 1"]),
        ({"model.n_heads": "5"}, ["model.dim=128", "model.n_heads=5", "try model.n_heads=4"]),
        ({"optim.schedule": "square"}, ["optim.schedule = 'square'", "'linear'"]),
        ({"data.kind": "files"}, ["data.train is empty", 'try data.train=["train.en.gz"']),
        ({"optim.lr": "1", "model.dropout": "x"}, ["2 invalid values", "unknown key 'optim.lr'", "model.dropout = 'x'"]),
    ],
)
def test_an_invalid_value_is_an_error_of_three_parts(flags: dict[str, str], says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(None, flags)
    assert caught.value.exit_code == 2 and caught.value.where
    for part in says:
        assert part in str(caught.value)


def test_an_invalid_or_missing_toml_file_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("")
    with pytest.raises(ConfigError, match=r"other\.toml"):
        resolve(tmp_path / "run.toml")
    (tmp_path / "run.toml").write_text("[optim\nx=")
    with pytest.raises(ConfigError, match="is not TOML"):
        resolve(tmp_path / "run.toml")


def test_flags_are_parsed_in_both_spellings_and_other_words_are_refused() -> None:
    assert parse_flags(["--a.b", "1", "--c=2"]) == {"a.b": "1", "c": "2"}
    for words in (["stray"], ["--a"], ["--a", "--b", "1"]):
        with pytest.raises(ConfigError):
            parse_flags(words)


def test_a_resumed_run_keeps_its_values_and_refuses_other_bits(tmp_path: Path) -> None:
    begun = open_run(tmp_path, None, {"seed": "3", "steps": "10"}, {})
    write_run(tmp_path, begun)
    again = open_run(tmp_path, None, {"steps": "20", "checkpoint.keep": "9"}, {})
    assert (again.run.seed, again.run.steps, again.run.checkpoint.keep) == (3, 20, 9)
    assert open_run(tmp_path, None, {"seed": "4"}, {}).run.seed == 4, "the run has no output yet"
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="holds another run: seed was 3, now 4"):
        open_run(tmp_path, None, {"seed": "4"}, {})
    (tmp_path / "run.json").write_text('{"values": ')
    with pytest.raises(CheckpointError, match="is damaged"):
        open_run(tmp_path, None, {}, {})


@pytest.mark.parametrize("number", [None, 1, 3])
def test_a_run_folder_of_another_format_is_refused(tmp_path: Path, number: int | None) -> None:
    value = to_json(resolve()) | {"format": number}
    write_json(tmp_path / "run.json", add_checksum({key: item for key, item in value.items() if item is not None}))
    with pytest.raises(CheckpointError, match=f"reads runs of format 2, not of format {number or 1}") as caught:
        open_run(tmp_path, None, {}, {})
    assert str(tmp_path / "run.json") in caught.value.where and "another folder" in caught.value.hint


def test_every_former_key_leads_to_its_new_name() -> None:
    assert set(FORMER_KEYS.values()) <= set(config_fields()) and not set(FORMER_KEYS) & set(config_fields())
    for old, new in [*FORMER_KEYS.items(), ("save.keep", "checkpoint.keep"), ("batch.length", "batch.seq_len")]:
        with pytest.raises(ConfigError, match=f"perhaps {new}"):
            resolve(None, {old: "1"})


def begin(folder: Path, **flags: str) -> None:
    """Create a run in `folder` with output."""
    write_run(folder, open_run(folder, None, flags, {}))
    (folder / "metrics.jsonl").touch()


def test_the_learning_rate_decays_until_the_last_step_unless_configured(tmp_path: Path) -> None:
    assert resolve().run.optim.decay_steps == 300 == resolve().run.steps and resolve().origin["optim.decay_steps"] == "as steps"
    longer = open_run(tmp_path, None, {"steps": "3000"}, {}).run
    assert longer.optim.decay_steps == 3000 and learning_rate(3000, longer.optim) > 0 == learning_rate(3001, longer.optim)
    assert open_run(tmp_path, None, {"steps": "3000", "optim.decay_steps": "2000"}, {}).run.optim.decay_steps == 2000, "on purpose"
    file = tmp_path / "run.toml"
    file.write_text("steps = 100\n[optim]\nwarmup_steps = 10\ndecay_steps = 50\n")
    with pytest.raises(
        ConfigError, match=r"the learning rate is 0 from step 51 on, and the run has 100 steps\n.*steps=100 from .*run.toml"
    ):
        open_run(tmp_path, file, {}, {})
    assert open_run(tmp_path, file, {"optim.schedule": "constant"}, {}) and open_run(tmp_path, file, {"steps": "50"}, {})


def test_more_steps_than_saved_need_a_new_schedule(tmp_path: Path) -> None:
    begin(tmp_path, steps="100")
    assert open_run(tmp_path, None, {"steps": "90"}, {}).run.optim.decay_steps == 100, "the saved schedule does not change"
    with pytest.raises(ConfigError, match=r"the learning rate is 0 from step 101 on, and the run has 200 steps"):
        open_run(tmp_path, None, {"steps": "200"}, {})
    longer = open_run(tmp_path, None, {"steps": "200"}, {}, ScheduleOverride(100, parse_overrides(["optim.decay_steps=200"])))
    assert longer.run.optim.decay_steps == 100 and longer.optim_after(99).decay_steps == 100 < longer.optim_after(100).decay_steps == 200


def test_a_run_with_only_prepared_data_uses_the_schedule_of_the_new_steps(tmp_path: Path) -> None:
    begin(tmp_path, steps="0")
    assert open_run(tmp_path, None, {"steps": "500"}, {}).run.optim.decay_steps == 500


def test_an_override_takes_effect_from_its_step_on_and_is_not_added_twice(tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(ConfigError, match=r"--override optim.learning_rate=0.001"):
        open_run(tmp_path, None, {"optim.learning_rate": "1e-3"}, {})

    def override(step: int, *words: str, rewind: bool = False) -> ResolvedRun:
        found = open_run(tmp_path, None, {}, {}, ScheduleOverride(step, parse_overrides(words)), rewind=rewind)
        write_run(tmp_path, found)
        return found

    found = override(120, "optim.learning_rate=1e-3", "optim.schedule=constant")
    assert found.overrides == (ScheduleOverride(120, {"optim.learning_rate": 1e-3, "optim.schedule": "constant"}),)
    assert [learning_rate(n + 1, found.optim_after(n)) == 1e-3 for n in (119, 120, 250)] == [False, True, True]
    assert found.run == resolve().run, "the saved values do not change"
    assert from_json(json.loads(json.dumps(to_json(found)))) == found and "from step 121 on" in format_run(found)
    assert override(200, "optim.learning_rate=1e-3") == found == override(100, "optim.learning_rate=0.001"), "the same command again"
    assert open_run(tmp_path, None, {}, {}) == found
    assert override(50, "optim.learning_rate=1e-3", rewind=True).overrides == (
        ScheduleOverride(50, {"optim.learning_rate": 1e-3}),
        ScheduleOverride(120, {"optim.schedule": "constant"}),
    )


def test_a_checkpoint_that_was_trained_with_other_overrides_is_refused() -> None:
    run = replace(
        resolve(), overrides=(ScheduleOverride(50, {"optim.schedule": "constant"}), ScheduleOverride(80, {"optim.learning_rate": 1e-3}))
    )
    facts = {"run": json.loads(json.dumps(to_json(replace(run, overrides=run.overrides[:1]))))}
    for step in (60, 80):
        refuse_other_overrides(facts, run, step)
    refuse_other_overrides({}, run, 0)
    with pytest.raises(CheckpointError, match="the checkpoint of step 90 was trained with the overrides"):
        refuse_other_overrides(facts, run, 90)
    with pytest.raises(CheckpointError, match="the run has \\[\\]"):
        refuse_other_overrides(facts, resolve(), 60)


@pytest.mark.parametrize("word", ["seed=2", "optim.beta1=0.8", "optim.learning_rate", "optim.learning_rate=-1", "optim.schedule=square"])
def test_only_the_schedule_can_be_overridden(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides([word])
    assert caught.value.where == "--override" and caught.value.hint


def test_a_new_run_has_nothing_to_override(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run to override"):
        open_run(tmp_path, None, {}, {}, ScheduleOverride(0, parse_overrides(["optim.schedule=constant"])))


def test_every_key_has_documentation() -> None:
    assert all(len(one.doc) > 8 for one in config_fields().values()) and len(config_fields()) > 40
    assert {"seed", "model.dim", "batch.micro_batches", "compute.num_threads"} <= {k for k, one in config_fields().items() if one.bits}
    assert not {"steps", "checkpoint.keep", "track.wandb"} & {k for k, one in config_fields().items() if one.bits}
    assert RunConfig() == resolve().run


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("LOCKSTEP_OPTIM_LR", "LOCKSTEP_OPTIM_LEARNING_RATE"),
        ("LOCKSTEP_MODEL_N_HEDS", "LOCKSTEP_MODEL_N_HEADS"),
        ("LOCKSTEP_DEVCE", "LOCKSTEP_DEVICE"),
        ("LOCKSTEP_XYZ", "unset it"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest_name(name: str, near: str) -> None:
    refuse_unknown_variables({"LOCKSTEP_TMP": "", "LOCKSTEP_SEED": "1", "LOCKSTEP_SEAT": "", "HOME": "/"}, RESERVED_VARIABLES)
    with pytest.raises(ConfigError, match=f"unknown variable {name}") as caught:
        refuse_unknown_variables({name: "1"}, RESERVED_VARIABLES)
    assert near in caught.value.hint


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
        assert "command line" in caught.value.where and f'"lockstep-train[{extra}]"' in caught.value.hint


def test_a_list_is_parsed_with_commas_and_as_an_array() -> None:
    for text, read in (("a,b", ("a", "b")), ('["a", "b,c"]', ("a", "b,c")), ("[ab]*.txt", ("[ab]*.txt",)), ("", ())):
        assert resolve(None, {"data.train": text}).run.data.train == read
    for text in ("a,,b", '["a"'):
        with pytest.raises(ConfigError, match=r"data\.train"):
            resolve(None, {"data.train": text})


def test_one_machine_has_a_maximum_number_of_workers() -> None:
    check_worker_count(64, "here", cores=2)
    check_worker_count(1024, "here", cores=64)
    for workers, cores in ((65, 2), (1025, 64)):
        with pytest.raises(UsageError, match="workers on one machine"):
            check_worker_count(workers, "here", cores=cores)


def test_all_values_are_shared_except_logging_and_timeouts() -> None:
    shared = shared_values(resolve(None, {"steps": "80", "data.train": "a,b"}).run)
    assert (shared["steps"], shared["data.train"], shared["data.kind"]) == ("80", '["a", "b"]', "cldr")
    each_host = {key for key in config_fields() if key not in shared}
    assert {key.partition(".")[0] for key in each_host} == {"track", "elastic", "parallel"} and not any(
        config_fields()[key].bits for key in each_host
    )
    assert {"elastic.verify_every", "parallel.bucket_bytes", "layout.shard", "checkpoint.every_steps"} <= set(shared)


def test_a_recipe_is_found_by_its_name_where_there_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any folder, so also when installed from a wheel; an existing file takes precedence."""
    repository = Path(__file__).parents[3]
    monkeypatch.chdir(tmp_path)
    for path in sorted((repository / "recipes").glob("*.toml")):
        right = read_toml(path)
        assert right and all(read_toml(Path(name)) == right for name in (path.stem, path.name, f"recipes/{path.name}"))
    (tmp_path / "translate.toml").write_text("seed = 5")
    assert read_toml(Path("translate.toml")) == {"seed": 5}
    for absent in ("other/translate.toml", "absent", "translate.txt"):
        with pytest.raises(ConfigError, match=r"there is no run file") as caught:
            read_toml(Path(absent))
        assert "recipes/llama-sft.toml" in caught.value.hint or "translate.toml" in caught.value.hint
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"] == {"recipes": "lockstep/recipes"}


def test_torch_has_a_tested_version() -> None:
    """Lockstep uses private names of torch, so each new version must be tested before it is allowed."""
    needed = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["dependencies"]
    (bound,) = [line.partition("<")[2] for line in needed if line.startswith("torch")]
    assert bound and tuple(map(int, version("torch").split(".")[:2])) < tuple(map(int, bound.split(".")))


def test_quantities_are_parsed_and_formatted() -> None:
    assert (parse_bytes("25 MB"), parse_bytes("1GiB"), parse_bytes(7)) == (25_000_000, 2**30, 7)
    assert (parse_seconds("90 s"), parse_seconds("1.5 min"), parse_seconds(0.5)) == (90.0, 90.0, 0.5)
    assert (format_bytes(61 * 2**30), format_count(41_200), format_duration(0.02)) == ("61.0 GiB", "41.2 k", "0.02 s")


def test_light_modules_do_not_import_torch() -> None:
    modules = ["cli.main", "config.schema", "runtime.subprocesses", "runtime.environment", "data.order", "agent.agent"]
    code = f"import sys, {', '.join('lockstep.' + name for name in modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("task", "key", "text"), [("translate", "lora.rank", "8"), ("translate", "llama.size", "1M"), ("pretrain", "model.dim", "64")]
)
def test_a_value_that_the_task_does_not_read_is_refused(task: str, key: str, text: str) -> None:
    kind = "cldr" if task == "translate" else "stdlib"
    with pytest.raises(ConfigError, match=f"task {task} does not read {key}") as caught:
        resolve(None, {"task": task, "data.kind": kind, key: text})
    assert f"{key} from command line" in caught.value.where
