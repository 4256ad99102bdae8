"""Rendered files: valid by the schemas of Kubernetes, Kubeflow and Compose; commands that start."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compose_spec
import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

import lockstep
from lockstep.cli.main import main
from lockstep.cli.options import TARGETS, build_parser

KUBERNETES = [f"1.{minor}" for minor in range(29, 38)]
OLDEST_NEWEST = [KUBERNETES[0], KUBERNETES[-1]]
RUN = """
steps = 40
[track]
wandb = "online"
project = "a ${SHELL} $(id) of 'us': {x}"
[data]
kind = "huggingface"
dataset = "opus"
"""
MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}
STORE = "s3://runs/team/tiny"
CASES = {
    "elastic with GPUs": (("--nodes", "2:4", "--gpus", "2"), RUN),
    "fixed on CPUs": (("--nodes", "3"), "steps = 40"),
    "one node": (("--nodes", "1", "--workers", "1"), RUN),
    "in a store": (("--nodes", "2:4", "--gpus", "2", "--run", STORE), RUN),
    "in a store, without other secrets": (("--nodes", "2", "--run", STORE), "steps = 40"),
}


@pytest.fixture(params=list(CASES.values()), ids=list(CASES))
def rendered(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> dict[str, str]:
    """Every file of a run, by target."""
    options, text = request.param
    (tmp_path / "tiny.toml").write_text(text)
    files = {}
    for target in TARGETS:
        assert main(["render", target, str(tmp_path / "tiny.toml"), *options]) == 0
        files[target] = capsys.readouterr().out
    return files


def differences(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    """Yield what a model dropped or changed."""
    if isinstance(given, dict):
        for key, value in given.items():
            yield from (
                differences(value, kept[key], f"{path}.{key}")
                if key in (kept or {})
                else [f"{path}.{key} is unknown"]
            )
    elif isinstance(given, list):
        assert len(given) == len(kept), path
        for index, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif given != kept:
        yield f"{path}: {given!r} became {kept!r}"


def test_files_for_kubernetes_are_valid(rendered: dict[str, str]) -> None:
    for target in ("kubernetes", "jobset", "trainjob"):
        for document in yaml.safe_load_all(rendered[target]):
            if model := MODELS.get(document["kind"]):
                assert not list(differences(document, model.from_dict(document).to_dict())), target
            else:
                assert [
                    kubernetes_validate.validate(document, version, strict=True)
                    for version in KUBERNETES
                ] == KUBERNETES


def test_the_models_notice_an_unknown_field() -> None:
    job_set = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "x"},
        "spec": {"replicatedJobz": []},
    }
    assert list(differences(job_set, MODELS["JobSet"].from_dict(job_set).to_dict())) == [
        ".spec.replicatedJobz is unknown"
    ]


def test_the_pods_of_a_jobset_and_a_job_are_validated_as_pods(rendered: dict[str, str]) -> None:
    """The models of Kubeflow check names; the schemas of Kubernetes check the templates too."""
    _, job_set = yaml.safe_load_all(rendered["jobset"])
    _, runtime, _ = yaml.safe_load_all(rendered["trainjob"])
    templates = [
        job_set["spec"]["replicatedJobs"][0],
        runtime["spec"]["template"]["spec"]["replicatedJobs"][0],
    ]
    for template in templates:
        spec = template["template"]["spec"]
        spec["template"]["spec"]["containers"][0].setdefault("command", ["true"])
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
        assert [
            kubernetes_validate.validate(job, version, strict=True) for version in OLDEST_NEWEST
        ] == OLDEST_NEWEST


def test_the_pods_of_a_ray_job_are_valid(rendered: dict[str, str]) -> None:
    if "ray" not in rendered:
        pytest.skip("refused in an object store")
    _, ray_job = yaml.safe_load_all(rendered["ray"])
    cluster = ray_job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    for group in (cluster["headGroupSpec"], workers):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **group["template"]}
        assert [
            kubernetes_validate.validate(pod, version, strict=True) for version in OLDEST_NEWEST
        ] == OLDEST_NEWEST
    per_node = int(re.findall(r"--workers (\d+)", ray_job["spec"]["entrypoint"])[0])
    assert f"--min {workers['minReplicas'] * per_node} " in ray_job["spec"]["entrypoint"]


def test_files_for_compose_are_valid(rendered: dict[str, str]) -> None:
    compose = yaml.safe_load(rendered["compose"])  # with YAML's merge keys, as Compose reads it
    hosts = list(compose["services"])
    for service in compose["services"].values():
        assert (
            service.pop("restart") == "on-failure:5"
        )  # the package does not know the limit of attempts
    assert list(compose_spec.PyCompose.from_json(json.dumps(compose)).service_names()) == hosts
    started = [name for name, service in compose["services"].items() if "profiles" not in service]
    first = compose["services"]["host-0"]
    fewest, most = re.findall(r"--nodes (\d+):(\d+)", first["entrypoint"])[0]
    assert (len(started), len(hosts)) == (int(fewest), int(most))
    assert all(service["hostname"] == name for name, service in compose["services"].items())
    assert (
        "command" not in first
    )  # the entry point of the image would precede it: `lockstep lockstep launch`
    assert ("deploy" in first) == (first.get("shm_size") == "8g")


def test_a_file_for_skypilot_starts_one_node(rendered: dict[str, str]) -> None:
    """SkyPilot's own schema needs the whole package with its clouds."""
    task = yaml.safe_load(rendered["skypilot"])
    assert task["num_nodes"] == 1 and "/tmp/lockstep/run.toml" in task["file_mounts"]
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75, 76, 137]
    wheel = f"lockstep_train-{lockstep.__version__}-py3-none-any.whl"
    assert task["file_mounts"][f"/tmp/lockstep/{wheel}"] == f"dist/{wheel}"
    assert task["setup"].startswith(
        f'pip install "/tmp/lockstep/{wheel}'
    )  # no index has the package
    assert not task.get("secrets") or set(task["secrets"].values()) == {None}


def test_every_file_starts_a_command_that_lockstep_accepts(rendered: dict[str, str]) -> None:
    for target, text in rendered.items():
        (line,) = re.findall(r"^[^#\n]*?(lockstep launch /\S+ .*)$", text, re.MULTILINE)
        words = shlex.split(line.rstrip("& "))
        args = build_parser().parse_args(words[1:])
        assert args.workers and str(args.out) in ("runs/tiny", "$run", "s3:/runs/team/tiny"), (
            target,
            words,
        )


def test_keys_of_the_run_are_in_the_command_of_every_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tiny.toml"
    file.write_text("steps = 40")
    for target in TARGETS:
        words = [
            "render",
            target,
            str(file),
            "--nodes",
            "1:16",
            "--batch.micro_batches",
            "32",
            "--optim.learning_rate=5e-4",
        ]
        assert main(words) == 0
        text = capsys.readouterr().out
        (line,) = re.findall(r"^[^#\n]*?(lockstep launch /\S+ .*)$", text, re.MULTILINE)
        assert " --batch.micro_batches=32 --optim.learning_rate=5e-4" in line
        command = next(line for line in text.splitlines() if line.startswith("# lockstep render"))
        assert main([*shlex.split(command)[2:]]) == 0 and capsys.readouterr().out == text


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--track.project", "$(id)"], "'$(id)' cannot be written into the command of a job file"),
        (["--track.project", "a b"], "cannot be written"),
        (["--track.project", "hf_abcdefghijklmnopqrstuvwx"], "looks like a secret"),
        (["--batch.micro_batch", "32"], "unknown key 'batch.micro_batch'"),
        (["--nodse", "2"], "unknown option '--nodse'\n  command line\n  perhaps --nodes"),
    ],
)
def test_a_key_that_cannot_be_rendered_is_refused(
    words: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.toml").write_text("steps = 40")
    assert main(["render", "slurm", str(tmp_path / "tiny.toml"), "--nodes", "2", *words]) == 2
    assert problem in capsys.readouterr().err


def test_nodes_share_a_disk_or_have_the_credentials_of_a_store(rendered: dict[str, str]) -> None:
    """Credentials by reference only, and all of them optional: machines may have a role instead."""
    job, compose = (
        list(yaml.safe_load_all(rendered["kubernetes"]))[1],
        yaml.safe_load(rendered["compose"]),
    )
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    volumes = {name for volume in spec["volumes"] for name in volume if name != "name"} - {
        "configMap"
    }
    hosts = [set(service.get("environment", ())) for service in compose["services"].values()]
    ray = list(yaml.safe_load_all(rendered["ray"]))[1]["spec"]["rayClusterSpec"]
    pods = [group["template"]["spec"] for group in (ray["headGroupSpec"], *ray["workerGroupSpecs"])]
    if STORE not in rendered["slurm"]:
        assert all("emptyDir" not in str(pod) and "envFrom" not in str(pod) for pod in pods)
        assert (
            "persistentVolumeClaim" in volumes and compose["volumes"] and "envFrom" not in container
        )
    else:
        keys = {"AWS_ENDPOINT_URL", "AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
        assert "persistentVolumeClaim" not in volumes and "volumes" not in compose
        assert container["envFrom"] == [{"secretRef": {"name": "tiny-store", "optional": True}}]
        for pod in pods:
            assert pod["containers"][0]["envFrom"] == container[
                "envFrom"
            ] and "persistentVolumeClaim" not in str(pod)
            assert {"name": "LOCKSTEP_STORE_CACHE", "value": "/work"} in pod["containers"][0]["env"]
        assert all(keys < names and "LOCKSTEP_STORE_CACHE=/work" in names for names in hosts)
        assert keys <= yaml.safe_load(rendered["skypilot"])["secrets"].keys()
        assert {"name": "LOCKSTEP_STORE_CACHE", "value": "/work"} in container["env"] and container[
            "workingDir"
        ] == "/work"
        assert "SLURMD_NODENAME" in rendered["slurm"]


def test_shell_scripts_in_the_files_parse(rendered: dict[str, str]) -> None:
    (_, job), task = (
        yaml.safe_load_all(rendered["kubernetes"]),
        yaml.safe_load(rendered["skypilot"]),
    )
    scripts = [
        rendered["slurm"],
        task["run"],
        job["spec"]["template"]["spec"]["containers"][0]["args"][0],
    ]
    for script in scripts:
        done = subprocess.run(
            ["bash", "-n"], input=script, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_files_hold_the_run_file_and_no_secret(
    rendered: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config_map, _ = yaml.safe_load_all(rendered["kubernetes"])
    compose = yaml.safe_load(rendered["compose"])["configs"]["run-file"]["content"].replace(
        "$$", "$"
    )
    assert config_map["data"]["run.toml"].strip() == compose.strip()
    if "wandb" in compose:
        assert "secretKeyRef" in rendered["kubernetes"] and "- WANDB_API_KEY" in rendered["compose"]
        assert all("WANDB_API_KEY" in text for text in rendered.values())


def test_files_have_the_size_of_a_file_that_a_person_writes(rendered: dict[str, str]) -> None:
    for target, text in rendered.items():
        lines = text.splitlines()
        assert len(lines) <= 100 and max(map(len, lines)) <= 160, (target, len(lines))
        assert not any(line != line.rstrip() for line in lines), target


def test_values_of_the_environment_do_not_enter_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "tiny.toml").write_text(RUN)
    monkeypatch.setenv("WANDB_API_KEY", "topsecretvalue")
    monkeypatch.setenv("HF_TOKEN", "topsecretvalue")
    for target in TARGETS:
        main(["render", target, str(tmp_path / "tiny.toml"), "--nodes", "2"])
        assert "topsecretvalue" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (
            ("slurm", "--run", STORE, "--workers", "3", "shards"),
            "3 workers per host for replicas of 2, each of which must share a disk",
        ),
        (("slurm", "--run", "s3://ada:hunter2@runs/x"), "no address of a bucket"),
        (("slurm", "--run", "gs://runs/x"), "gs:// is not supported"),
    ],
)
def test_what_a_store_does_not_support_is_refused(
    options: tuple[str, ...], what: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "tiny.toml").write_text(
        "steps = 40\n" + "[layout]\nshard = 2\n" * ("shards" in options)
    )
    target, *words = [word for word in options if word != "shards"]
    assert main(["render", target, str(tmp_path / "tiny.toml"), "--nodes", "2", *words]) == 2
    error = capsys.readouterr().err
    assert what in error and "hunter2" not in error


def test_the_page_about_clusters_puts_a_script_into_each_file(rendered: dict[str, str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "clusters.md").read_text()
    recipe, script = re.findall(r"^sed -E 's:(.*):(.*):'", page, re.MULTILINE)[0]
    for target, text in rendered.items():
        changed, count = re.subn(recipe, script, text)
        assert count == 1 and "lockstep launch train.py --" in changed, target


def test_the_page_about_clusters_shows_the_file_for_slurm(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "cluster-trials.md").read_text()
    command, shown = re.findall(
        r"^`lockstep (render slurm .*)` prints:\n\n```bash\n(.*?)```$",
        page,
        re.MULTILINE | re.DOTALL,
    )[0]
    assert main(command.split()) == 0
    assert capsys.readouterr().out == shown
