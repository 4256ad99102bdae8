"""Words of the command, the ranking, the advice, and what failures cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.main import main
from lockstep.cli.options import build_parser
from lockstep.cli.plan import with_planned_layout
from lockstep.cli.start import read_request
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.network.moves import Link
from lockstep.planner.devices import parse_cluster, read_profile
from lockstep.planner.goodput import Failures, expected_goodput, played_outage
from lockstep.planner.memory_cost import MemoryCost
from lockstep.planner.plan import PlannedLayout, layouts
from lockstep.planner.step_cost import StepCost

ENDLESS = '{"links": {"other_host": {"latency_s": 1, "bytes_per_s": 0}}}'
NEVER = '{"links": {"other_host": {"latency_s": 1e999, "bytes_per_s": 1}}}'


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", "--json", *words]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_devices_and_links_are_read() -> None:
    cluster = parse_cluster("4x8:RTX 4090-24GB", "100Gbit/s,5us", "", None)
    assert (cluster.devices, cluster.memory, cluster.other_host) == (
        32,
        24 * 10**9,
        Link(pytest.approx(5e-6), 12.5e9),
    )
    assert (cluster.link(0, 7), cluster.link(0, 8, 2).bytes_per_s) == (cluster.same_host, 6.25e9)
    assert parse_cluster("1x2:cpu", "", "", None).device_type == "cpu"
    other = parse_cluster("1x8:H800-80GB@989.5,3350", "", "", None)
    assert (other.kind, other.memory, other.memory_bytes_per_s) == ("H800", 80 * 10**9, 3350e9)
    assert other.precision() == "bf16" and other.flops("bf16")[0] == pytest.approx(0.4 * 989.5e12)
    for kind, precision in (
        ("P4000", "fp32"),
        ("V100", "fp32"),
        ("A10", "bf16"),
        ("L40S", "bf16"),
        ("B200", "bf16"),
        ("MI300X", "bf16"),
    ):
        assert parse_cluster(f"1x8:{kind}-16GB", "", "", None).precision() == precision


def test_a_gpu_with_given_speeds_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    times = [
        plan(capsys, "--devices", f"1x8:{device}", "--compute.precision", "bf16")["layouts"][0][
            "seconds"
        ]
        for device in ("H100-80GB", "H800-80GB@989", "H800-80GB@494.5", "H800-80GB@989,3350")
    ]
    assert times[0] == times[1] < times[2] and times[3] != times[1]


@pytest.mark.parametrize(
    ("devices", "link", "what"),
    [
        ("8:H100-80GB", "", "names no devices"),
        ("0x8:H100-80GB", "", "0 devices"),
        ("99999x99999:cpu", "", "devices"),
        ("1x8:H900-80GB", "", "'H900' is not known"),
        ("1x8:H900@989", "", "memory of H900 is not given"),
        ("1x8:H900-80GB@0", "", "a speed is zero"),
        ("1x8:H900-80GB@989,0", "", "a speed is zero"),
        ("1x8:H900-80GB@fast", "", "names no devices"),
        ("1x8:cpu-4GiB@1", "", "the speed of a CPU is given"),
        ("1x8:H100", "", "memory of H100 is not given"),
        ("1x8:H100-80parsecs", "", "unknown unit 'parsecs'"),
        ("2x8:H100-80GB", "", "link between them is not known"),
        ("2x8:H100-80GB", "100Gb/s", "may mean bits or bytes"),
        ("2x8:H100-80GB", "100Gbit/s,fast", "is not a quantity"),
        ("2x8:H100-80GB", "100Gbit/s,", "is not a quantity"),
        ("2x8:H100-80GB", "0Gbit/s", "is no rate"),
    ],
)
def test_wrong_words_are_refused(devices: str, link: str, what: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        parse_cluster(devices, link, "", None)
    assert caught.value.where and caught.value.hint


@pytest.mark.parametrize("text", ["{", "[]", '{"links": {"other_host": {}}}', ENDLESS, NEVER])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(UsageError, match="profile"):
        read_profile(tmp_path / "profile.json")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--mtbf", "0s"], "UsageError: argument --mtbf: '0s' is not above zero\n"),
        (["--mtbf", "4parsecs"], "unknown unit 'parsecs'"),
        (["--price", "-1"], "UsageError: a price of -1 dollars per device and hour\n  --price\n"),
        (["--price", "nan"], "a price of nan dollars"),
        (["--tokens", "0"], "argument --tokens: '0' is not above zero\n"),
        (["--tokens", "-5"], "'-5' is not a quantity such as '20B'"),
        (["--tokens", "20X"], "'20X' has the unknown unit 'X'; use one of K, M, B, T"),
        (["--tokens", "1e999"], "argument --tokens: must be a finite number"),
        (["--profile", "absent.json"], "absent.json: No such file"),
    ],
)
def test_impossible_values_are_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], what: str
) -> None:
    assert main(["plan", "--devices", "1x1:cpu", *words]) == 2
    message = capsys.readouterr().err
    assert what in message and message.count("\n") == 3, "what happened, where, what to try"


def test_every_layout_is_ranked_or_refused_with_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    links = {
        "same_host": {"latency_s": 1e-5, "bytes_per_s": 1e9},
        "other_host": {"latency_s": 1e-4, "bytes_per_s": 1e8},
    }
    (tmp_path / "profile.json").write_text(json.dumps({"links": links}))
    words = [
        "--devices",
        "2x4:cpu-500MB",
        "--profile",
        str(tmp_path / "profile.json"),
        "--compute.precision",
        "fp32",
        "--mtbf",
        "4h",
    ]
    answer = plan(capsys, *words, "--price", "2")
    assert len(answer["layouts"]) + len(answer["refused"]) == len(list(layouts(8))) == 20
    seconds = [entry["seconds"] for entry in answer["layouts"]]
    assert seconds == sorted(seconds) and all(
        entry["bytes"] <= 500e6 for entry in answer["layouts"]
    )
    assert all(entry["why"] for entry in answer["refused"])
    assert "tensor 8 does not divide 4" in next(
        entry["why"] for entry in answer["refused"] if entry["layout"]["tensor"] == 8
    )
    assert (
        0.9 < answer["goodput"]["share"] < 1 and answer["goodput"]["dollars_per_million_tokens"] > 0
    )


def test_tokens_cost_device_hours_and_dollars(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--devices", "2x1:cpu", "--link", "1Gbit/s", "--compute.precision", "fp32"]
    words += ["--tokens", "20B", "--mtbf", "1h"]
    answer = plan(capsys, *words)
    rate = answer["tokens"] / answer["layouts"][0]["seconds"]
    hours = 20e9 / rate * 2 / 3600 / answer["goodput"]["share"]
    assert answer["goodput"]["total_tokens"] == 20e9
    assert answer["goodput"]["device_hours_per_million_tokens"] * 20e3 == pytest.approx(hours)
    assert main(["plan", *words, "--price", "0.05"]) == 0
    _, rate_source, cost, _, goodput, *_ = capsys.readouterr().out.splitlines()
    assert cost == (
        f"20,000,000,000 tokens with replicate 2: {hours:,.1f} device hours in {hours / 2:.1f} h, "
        f"{hours * 0.05:,.2f} dollars"
    )
    assert "20 GFLOP/s per worker, assumed" in rate_source
    assert goodput.startswith("goodput 9")
    assert main(["plan", *words[:-2]]) == 0
    shown = capsys.readouterr().out
    assert "goodput" not in shown, "no failures, no goodput"
    assert "dollars" not in shown, "no price, no dollars"


def test_a_slow_link_asks_for_fewer_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    replicas_only = [
        "--model.n_heads",
        "1",
        "--layout.pipeline_chunks",
        "64",
        "--fsdp.prefetch_units",
        "0",
    ]
    fast, slow = (
        plan(capsys, "--devices", "2x1:cpu", "--link", link, *replicas_only)["advice"]
        for link in ("1TB/s", "1Mbit/s")
    )
    assert (fast["parallel.wire"]["value"], fast["diloco.every"]["value"]) == ("fp32", 1)
    assert slow["parallel.wire"]["value"] == "int8" and slow["diloco.every"]["value"] > 100
    assert slow["batch.micro_batches"]["value"] > 8


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "--devices",
        "1x8:H100-80GB",
        "--task",
        "pretrain",
        "--data.kind",
        "stdlib",
        "--llama.size",
        "405B",
    ]
    assert main(words) == 2
    message = capsys.readouterr().err
    assert (
        "no layout of 8 devices works; the nearest is" in message
        and "per device, which has 74.5 GiB" in message
    )


def test_what_is_not_supported_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "--devices",
        "1x1:cpu",
        "--task",
        "sft",
        "--data.kind",
        "drills",
        "--lora.rank",
        "4",
        "--llama.init_from",
        "absent",
    ]
    assert main(words) == 2
    assert "with all parameters trained" in capsys.readouterr().err


def test_what_training_refuses_in_a_layout_is_neither_planned_nor_advised(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--devices", "2x1:cpu", "--link", "1Mbit/s"]
    muon = plan(capsys, *words, "--optim.kind", "muon")
    reasons = {entry["why"] for entry in muon["refused"]}
    assert reasons == {"optim.kind=muon does not support layout.tensor=2: it needs whole matrices"}
    only_pipelines = ["--diloco.learners", "0", "--batch.micro_batches", "1"]
    answer = plan(capsys, *words, *only_pipelines)
    assert answer["layouts"][0]["layout"]["pipeline"] == 2
    assert "parallel.wire" not in answer["advice"]


def test_learners_are_planned_in_replicas_and_shards(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--devices",
        "4x1:cpu",
        "--link",
        "1Mbit/s",
        "--diloco.learners",
        "2",
        "--steps",
        "100",
        "--checkpoint.every_steps",
        "50",
    ]
    four = plan(capsys, *words)
    assert {
        (entry["layout"]["replicate"], entry["layout"]["shard"]) for entry in four["layouts"]
    } == {(2, 2), (1, 4)}
    reasons = {entry["why"] for entry in four["refused"]}
    refused = "diloco.learners=2 does not support"
    assert "2 learners keep 2 of 4 replicas busy" in reasons
    assert {f"{refused} layout.tensor=2", f"{refused} layout.pipeline=4"} < reasons
    assert f"{refused} layout.tensor=2, layout.pipeline=2" in reasons
    one = plan(capsys, "--devices", "2x1:cpu", *words[2:], "--batch.micro_batches", "2")
    why = "layout.shard=2 and 1 micro-batches in a learner's step: each shard needs one"
    assert why in {entry["why"] for entry in one["refused"]}
    two = plan(capsys, "--devices", "2x1:cpu", *words[2:])
    assert two["layouts"][0]["layout"]["replicate"] == 2, (
        "a link between shards would be used in every step"
    )
    assert two["advice"]["diloco.every"]["value"] > 50


def test_the_layout_of_a_run_is_planned(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    args, rest = build_parser().parse_known_args(
        ["train", "--workers", "4", "--layout", "auto", "--out", str(tmp_path)]
    )
    with caplog.at_level("INFO", logger="lockstep"):
        request = with_planned_layout(read_request(args, rest), args.workers)
    assert request.flags == {
        "layout.shard": "1",
        "layout.tensor": "1",
        "layout.pipeline": "1",
    }  # keeps the bits
    assert (
        request.values[:2] == ["--layout.shard", "1"]
        and "--layout auto: replicate 4;" in caplog.text
    )
    args, rest = build_parser().parse_known_args(
        ["train", "--layout", "auto", "--layout.shard=2", "--out", str(tmp_path)]
    )
    with pytest.raises(UsageError, match=r"cannot be combined with --layout\.shard"):
        with_planned_layout(read_request(args, rest), None)


def test_a_layout_is_not_planned_under_another_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torchrun = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    args, rest = build_parser().parse_known_args(
        ["train", "--layout", "auto", "--out", str(tmp_path)]
    )
    with pytest.raises(UsageError, match="another launcher has"):
        with_planned_layout(read_request(args, rest), None)


def test_the_played_protocol_notices_a_lost_host() -> None:
    assert 2.5 < played_outage(4, 2, 1e-4) < 15  # a heartbeat timeout at least


def test_failures_cost_more_where_no_replica_survives() -> None:
    cluster = parse_cluster("4x1:cpu", "1Gbit/s", "", None)
    step, memory = StepCost(1.0, 0.0, 0.0, 0.0, 0.0), MemoryCost(0, 1e6, 0, 0, 0, 0, 0)
    planned = [PlannedLayout(layout, step, memory, "") for layout in (Layout(4), Layout(1, 4))]
    failures = Failures(3600.0, 3.6, 100)
    replicas, shards = (expected_goodput(best, cluster, 1000, failures) for best in planned)
    assert replicas.share > shards.share and shards.lost_s == pytest.approx(30 + 50)
    assert shards.dollars_per_million_tokens == pytest.approx(4 * 0.001 * 1000 / shards.share)
    never = expected_goodput(planned[0], cluster, 1000, Failures(float("inf"), None, 100))
    assert (never.share, never.dollars_per_million_tokens) == (1.0, None)
