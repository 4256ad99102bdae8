"""The run as a value: where each value comes from, and errors that name what is wrong, where, and what to try."""

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
from lockstep.config import schema as config
from lockstep.config.schema import (
    Override,
    Resolved,
    Run,
    from_json,
    leaves,
    read_flags,
    read_overrides,
    read_toml,
    refuse_missing_packages,
    refuse_unknown_variables,
    resolve,
    shared_values,
    show,
    to_json,
    write_run,
)
from lockstep.errors import CheckpointError, ConfigError, UsageError
from lockstep.runtime.environment import VARIABLES
from lockstep.runtime.subprocesses import refuse_a_crowd
from lockstep.train import refuse_other_overrides
from lockstep.training.optim import learning_rate
from lockstep.units import parse_bytes, parse_seconds, show_bytes, show_count, show_seconds


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
    shown = show(found).splitlines()
    assert len(shown) == len(leaves()) and any(line.startswith("optim.warmup_steps") and line.endswith("command line") for line in shown)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"optim.lr": "1"}, ["unknown key 'optim.lr'", "command line", "perhaps optim.learning_rate"]),
        ({"model.widht": "1"}, ["unknown key 'model.widht'", "perhaps model.width"]),
        ({"batch.tokens": "many"}, ["batch.tokens = 'many'", "valid integer"]),
        ({"parallel.bucket_bytes": "3 parsecs"}, ["unknown unit 'parsecs'", "25 MB"]),
        ({"model.dropout": "1.5"}, ["model.dropout = '1.5'", "below 1"]),
        ({"model.heads": "5"}, ["model.width=128", "model.heads=5", "try model.heads=4"]),
        ({"optim.decay": "square"}, ["optim.decay = 'square'", "'linear'"]),
        ({"data.kind": "files"}, ["data.train is empty", 'try data.train=["train.en.gz"']),
        ({"optim.lr": "1", "model.dropout": "x"}, ["2 values do not fit", "unknown key 'optim.lr'", "model.dropout = 'x'"]),
    ],
)
def test_a_wrong_value_says_what_where_and_what_to_try(flags: dict[str, str], says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(None, flags)
    assert caught.value.exit_code == 2 and caught.value.where
    for part in says:
        assert part in str(caught.value)


def test_a_file_that_is_no_toml_or_missing_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("")
    with pytest.raises(ConfigError, match=r"other\.toml"):
        resolve(tmp_path / "run.toml")
    (tmp_path / "run.toml").write_text("[optim\nx=")
    with pytest.raises(ConfigError, match="is not TOML"):
        resolve(tmp_path / "run.toml")


def test_flags_are_read_in_both_spellings_and_strays_are_refused() -> None:
    assert read_flags(["--a.b", "1", "--c=2"]) == {"a.b": "1", "c": "2"}
    for words in (["stray"], ["--a"], ["--a", "--b", "1"]):
        with pytest.raises(ConfigError):
            read_flags(words)


def test_a_run_that_goes_on_keeps_its_values_and_refuses_other_bits(tmp_path: Path) -> None:
    begun = open_run(tmp_path, None, {"seed": "3", "steps": "10"}, {})
    write_run(tmp_path, begun)
    again = open_run(tmp_path, None, {"steps": "20", "save.keep": "9"}, {})
    assert (again.run.seed, again.run.steps, again.run.save.keep) == (3, 20, 9)
    assert open_run(tmp_path, None, {"seed": "4"}, {}).run.seed == 4, "nothing was made under 3 yet"
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="holds another run: seed was 3, now 4"):
        open_run(tmp_path, None, {"seed": "4"}, {})
    (tmp_path / "run.json").write_text('{"values": ')
    with pytest.raises(CheckpointError, match="is damaged"):
        open_run(tmp_path, None, {}, {})


def begin(folder: Path, **flags: str) -> None:
    """A run in `folder` that has begun."""
    write_run(folder, open_run(folder, None, flags, {}))
    (folder / "metrics.jsonl").touch()


def test_the_learning_rate_decays_until_the_last_step_unless_the_recipe_says_otherwise(tmp_path: Path) -> None:
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
    assert open_run(tmp_path, file, {"optim.decay": "constant"}, {}) and open_run(tmp_path, file, {"steps": "50"}, {})


def test_more_steps_than_a_run_began_with_need_a_new_schedule(tmp_path: Path) -> None:
    begin(tmp_path, steps="100")
    assert open_run(tmp_path, None, {"steps": "90"}, {}).run.optim.decay_steps == 100, "the schedule stays as the run began"
    with pytest.raises(ConfigError, match=r"the learning rate is 0 from step 101 on, and the run has 200 steps"):
        open_run(tmp_path, None, {"steps": "200"}, {})
    longer = open_run(tmp_path, None, {"steps": "200"}, {}, Override(100, read_overrides(["optim.decay_steps=200"])))
    assert longer.run.optim.decay_steps == 100 and longer.optim_after(99).decay_steps == 100 < longer.optim_after(100).decay_steps == 200


def test_a_run_that_has_only_prepared_its_data_takes_the_schedule_of_the_steps_asked_for_then(tmp_path: Path) -> None:
    begin(tmp_path, steps="0")
    assert open_run(tmp_path, None, {"steps": "500"}, {}).run.optim.decay_steps == 500


def test_an_override_holds_from_its_step_on_and_is_not_added_twice(tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(ConfigError, match=r"--override optim.learning_rate=0.001"):
        open_run(tmp_path, None, {"optim.learning_rate": "1e-3"}, {})

    def override(step: int, *words: str, back: bool = False) -> Resolved:
        found = open_run(tmp_path, None, {}, {}, Override(step, read_overrides(words)), back=back)
        write_run(tmp_path, found)
        return found

    found = override(120, "optim.learning_rate=1e-3", "optim.decay=constant")
    assert found.overrides == (Override(120, {"optim.learning_rate": 1e-3, "optim.decay": "constant"}),)
    assert [learning_rate(n + 1, found.optim_after(n)) == 1e-3 for n in (119, 120, 250)] == [False, True, True]
    assert found.run == resolve().run, "the values of the run stay as it began"
    assert from_json(json.loads(json.dumps(to_json(found)))) == found and "from step 121 on" in show(found)
    assert override(200, "optim.learning_rate=1e-3") == found == override(100, "optim.learning_rate=0.001"), "the same command again"
    assert open_run(tmp_path, None, {}, {}) == found
    assert override(50, "optim.learning_rate=1e-3", back=True).overrides == (
        Override(50, {"optim.learning_rate": 1e-3}),
        Override(120, {"optim.decay": "constant"}),
    )


def test_a_checkpoint_that_was_trained_with_other_overrides_is_refused() -> None:
    run = replace(resolve(), overrides=(Override(50, {"optim.decay": "constant"}), Override(80, {"optim.learning_rate": 1e-3})))
    facts = {"run": json.loads(json.dumps(to_json(replace(run, overrides=run.overrides[:1]))))}
    for step in (60, 80):
        refuse_other_overrides(facts, run, step)
    refuse_other_overrides({}, run, 0)
    with pytest.raises(CheckpointError, match="the checkpoint of step 90 was trained with the overrides"):
        refuse_other_overrides(facts, run, 90)
    with pytest.raises(CheckpointError, match="the run has \\[\\]"):
        refuse_other_overrides(facts, resolve(), 60)


@pytest.mark.parametrize("word", ["seed=2", "optim.beta1=0.8", "optim.learning_rate", "optim.learning_rate=-1", "optim.decay=square"])
def test_only_the_schedule_can_be_overridden(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_overrides([word])
    assert caught.value.where == "--override" and caught.value.hint


def test_a_new_run_has_nothing_to_override(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run to override"):
        open_run(tmp_path, None, {}, {}, Override(0, read_overrides(["optim.decay=constant"])))


def test_every_value_of_a_run_has_a_sentence() -> None:
    assert all(len(one.doc) > 8 for one in leaves().values()) and len(leaves()) > 40
    assert {"seed", "model.width", "batch.micro_batches", "compute.threads"} <= {k for k, one in leaves().items() if one.bits}
    assert not {"steps", "save.keep", "track.wandb"} & {k for k, one in leaves().items() if one.bits}
    assert Run() == resolve().run


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("LOCKSTEP_OPTIM_LR", "LOCKSTEP_OPTIM_LEARNING_RATE"),
        ("LOCKSTEP_MODEL_WITDH", "LOCKSTEP_MODEL_WIDTH"),
        ("LOCKSTEP_DEVCE", "LOCKSTEP_DEVICE"),
        ("LOCKSTEP_XYZ", "unset it"),
    ],
)
def test_a_variable_that_means_nothing_is_refused_with_the_nearest_name(name: str, near: str) -> None:
    refuse_unknown_variables({"LOCKSTEP_TMP": "", "LOCKSTEP_SEED": "1", "LOCKSTEP_SEAT": "", "HOME": "/"}, VARIABLES)
    with pytest.raises(ConfigError, match=f"unknown variable {name}") as caught:
        refuse_unknown_variables({name: "1"}, VARIABLES)
    assert near in caught.value.hint


def test_a_missing_package_is_refused_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "find_spec", lambda name: None)
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


def test_a_list_is_read_with_commas_and_as_an_array() -> None:
    for text, read in (("a,b", ("a", "b")), ('["a", "b,c"]', ("a", "b,c")), ("[ab]*.txt", ("[ab]*.txt",)), ("", ())):
        assert resolve(None, {"data.train": text}).run.data.train == read
    for text in ("a,,b", '["a"'):
        with pytest.raises(ConfigError, match=r"data\.train"):
            resolve(None, {"data.train": text})


def test_one_machine_has_a_bound_for_its_workers() -> None:
    refuse_a_crowd(64, "here", cores=2)
    refuse_a_crowd(1024, "here", cores=64)
    for workers, cores in ((65, 2), (1025, 64)):
        with pytest.raises(UsageError, match="workers on one machine"):
            refuse_a_crowd(workers, "here", cores=cores)


def test_what_all_must_have_alike_is_everything_but_what_each_host_shows_and_how_long_it_waits() -> None:
    shared = shared_values(resolve(None, {"steps": "80", "data.train": "a,b"}).run)
    assert (shared["steps"], shared["data.train"], shared["data.kind"]) == ("80", '["a", "b"]', "cldr")
    each_host = {key for key in leaves() if key not in shared}
    assert {key.partition(".")[0] for key in each_host} == {"track", "heal", "parallel"} and not any(
        leaves()[key].bits for key in each_host
    )
    assert {"heal.verify_every", "parallel.bucket_bytes", "layout.shard", "save.every_steps"} <= set(shared)


def test_a_recipe_is_found_by_its_name_where_there_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any folder, so also when it came in a wheel; a file of one's own comes first."""
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


def test_torch_is_one_that_was_tested() -> None:
    """Private names of torch are used, which each version may change: a new one is tried before it is let in."""
    needed = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["dependencies"]
    (bound,) = [line.partition("<")[2] for line in needed if line.startswith("torch")]
    assert bound and tuple(map(int, version("torch").split(".")[:2])) < tuple(map(int, bound.split(".")))


def test_quantities_are_read_and_shown() -> None:
    assert (parse_bytes("25 MB"), parse_bytes("1GiB"), parse_bytes(7)) == (25_000_000, 2**30, 7)
    assert (parse_seconds("90 s"), parse_seconds("1.5 min"), parse_seconds(0.5)) == (90.0, 90.0, 0.5)
    assert (show_bytes(61 * 2**30), show_count(41_200), show_seconds(0.02)) == ("61.0 GiB", "41.2 k", "0.02 s")


def test_the_first_rooms_do_not_import_torch() -> None:
    modules = ["cli.main", "config.schema", "runtime.subprocesses", "runtime.environment", "data.order", "agent.agent"]
    code = f"import sys, {', '.join('lockstep.' + name for name in modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("task", "key", "text"), [("translate", "lora.rank", "8"), ("translate", "llama.shape", "1M"), ("pretrain", "model.width", "64")]
)
def test_a_value_that_the_task_does_not_read_is_refused(task: str, key: str, text: str) -> None:
    kind = "cldr" if task == "translate" else "stdlib"
    with pytest.raises(ConfigError, match=f"task {task} does not read {key}") as caught:
        resolve(None, {"task": task, "data.kind": kind, key: text})
    assert f"{key} from command line" in caught.value.where
