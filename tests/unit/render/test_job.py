"""The values of a cluster job: names, secrets, the run file as TOML."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from lockstep.config.resolve import read_toml
from lockstep.errors import ConfigError, LockstepError, UsageError
from lockstep.render.job import Job, make_job

IMAGE = "lockstep:1"


def job_of(file: Path, text: str = "", *, run_folder: str = "runs/x", image: str = IMAGE) -> Job:
    file.write_text(text)
    return make_job(file, (2, 4), gpus=2, workers=2, run_folder=run_folder, image=image)[0]


def test_the_name_of_the_run_file_becomes_a_label_of_kubernetes(tmp_path: Path) -> None:
    assert job_of(tmp_path / "My_Run.v2.toml").name == "my-run-v2"
    assert (
        job_of(tmp_path / f"{'long-' * 20}.toml").name == "long-long-long-long-long-long-long-long"
    )
    assert [
        job_of(tmp_path / f"{stem}.toml").name for stem in ("No", "1e3", "2026-11", "on-x")
    ] == [
        "run-no",
        "run-1e3",
        "run-2026-11",
        "on-x",
    ]
    with pytest.raises(UsageError, match="gives the job no name"):
        job_of(tmp_path / "数据.toml")


def test_the_values_of_a_run_file_survive_and_its_comments_do_not(tmp_path: Path) -> None:
    text = 'steps = 3  # wandb key 0123456789\n[data]\nkind = "files"\n'
    text += 'train = ["a\\u0085b", "c\\u2028$HOME: - \'{{x}}"]\n[optim]\nlearning_rate = 1e-3\n'
    job = job_of(tmp_path / "run.toml", text)
    assert tomllib.loads(job.toml) == tomllib.loads(text)
    assert "0123456789" not in job.toml
    assert all(line.isprintable() for line in job.toml.split("\n"))


@pytest.mark.parametrize(
    "text",
    [
        'data.source = "https://ada:hunter2@example.org/x"',
        'track.project = "hf_abcdefghijklmnopqrstuvwx"',
        'track.project = "0123456789abcdef0123456789abcdef01234567"',
        'data.train = ["x.en", "sk-abcdefghijklmnop1234"]\ndata.kind = "files"',
    ],
)
def test_a_value_that_looks_like_a_secret_is_refused_and_not_shown(
    tmp_path: Path, text: str
) -> None:
    with pytest.raises(ConfigError, match="looks like a secret") as error:
        job_of(tmp_path / "run.toml", text)
    assert text.partition(" = ")[0] in str(error.value) and "LOCKSTEP_" in str(error.value)
    assert not any(
        word in str(error.value) for word in ("hunter2", "hf_a", "0123456789abcdef", "sk-a")
    )


def test_secrets_are_the_variables_that_the_run_reads(tmp_path: Path) -> None:
    assert job_of(tmp_path / "run.toml").secrets == ()
    assert job_of(tmp_path / "run.toml", 'track.wandb = "offline"').secrets == ()
    hub = 'track.wandb = "online"\n[data]\nkind = "huggingface"\ndataset = "opus"\n'
    assert job_of(tmp_path / "run.toml", hub).secrets == ("WANDB_API_KEY", "HF_TOKEN")


@pytest.mark.parametrize(
    "folder",
    [
        "",
        "a b",
        "$HOME/x",
        "x\n#SBATCH --uid=0",
        "a'b",
        'a"b',
        "a;b",
        "`id`",
        "a{b}",
        "a#b",
        "${x}",
        ":x",
        "-x",
        "~/x",
        "@x",
    ],
)
def test_a_folder_with_a_meaning_to_a_shell_or_to_yaml_is_refused(
    tmp_path: Path, folder: str
) -> None:
    with pytest.raises(UsageError, match="cannot be written into a job file"):
        job_of(tmp_path / "run.toml", run_folder=folder)


@pytest.mark.parametrize(
    "image", ["", "Lockstep:1", "ada:secret@registry/x", "x y", "x:1:2", "x\nkind: Secret"]
)
def test_an_image_that_is_no_reference_is_refused(tmp_path: Path, image: str) -> None:
    with pytest.raises(UsageError, match="cannot be written into a job file"):
        job_of(tmp_path / "run.toml", image=image)


@pytest.mark.parametrize(
    "image", ["lockstep", "registry:5000/team/lockstep:1.0", f"x/y@sha256:{'0' * 64}"]
)
def test_images_are_accepted_with_registry_tag_and_digest(tmp_path: Path, image: str) -> None:
    assert job_of(tmp_path / "run.toml", image=image).image == image


def test_a_run_file_with_a_space_in_its_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written into a job file"):
        job_of(tmp_path / "a b.toml")


@pytest.mark.parametrize("text", ["steps = ", "stepz = 3", "steps = -1"])
def test_an_invalid_run_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(LockstepError):
        job_of(tmp_path / "run.toml", text)


def test_a_recipe_is_known_by_its_name() -> None:
    job, _ = make_job(
        Path("recipes/translate.toml"), (1, 2), gpus=0, workers=2, run_folder="runs/x", image=IMAGE
    )
    assert tomllib.loads(job.toml)["steps"] == read_toml(Path("recipes/translate.toml"))["steps"]
