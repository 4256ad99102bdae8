"""Restored models and optimizers continue with the same bits; misfits are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.checkpoint import commands, safetensors_io
from lockstep.checkpoint.state_dict import digest, get_state_dict, set_state_dict
from lockstep.checkpoint.store import CheckpointStore
from lockstep.errors import CheckpointError

Make = Callable[[Any], torch.optim.Optimizer]


class Tied(nn.Module):
    """Embedding and output share their weight; one buffer is state, the other is not."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.norm = nn.BatchNorm1d(width)
        self.unused = nn.Linear(3, 3)
        self.out = nn.Linear(width, 11, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.norm(self.embed(ids)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        ids = torch.arange(6) * (step + 1) % 11
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids), (ids + 1) % 11).backward()
        optimizer.step()


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw foreach amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_restored_run_continues_with_the_same_bits(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Tied()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, range(3))
    CheckpointStore(tmp_path).save(3, get_state_dict(model, optimizer), {})
    train(model, optimizer, range(3, 6))

    torch.manual_seed(2)
    restored = Tied()
    restored_optimizer = OPTIMIZERS[name](restored.parameters())
    checkpoint = CheckpointStore(tmp_path).load(3)
    set_state_dict(restored, restored_optimizer, checkpoint.tensors)
    assert digest(get_state_dict(restored, restored_optimizer)) == digest(checkpoint.tensors)
    train(restored, restored_optimizer, range(3, 6))
    assert digest(get_state_dict(restored, restored_optimizer)) == digest(
        get_state_dict(model, optimizer)
    )
    assert restored.out.weight is restored.embed.weight

    set_state_dict(
        restored, restored_optimizer, checkpoint.tensors
    )  # and again, over existing state
    train(restored, restored_optimizer, range(3, 6))
    assert digest(get_state_dict(restored, restored_optimizer)) == digest(
        get_state_dict(model, optimizer)
    )


def test_names_are_those_of_the_unwrapped_model_and_tied_weights_are_saved_once() -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    names = set(get_state_dict(model, optimizer))
    assert {n for n in names if n.startswith("model.")} == {
        "model.embed.weight", "model.norm.weight", "model.norm.bias", "model.norm.running_mean", "model.norm.running_var",
        "model.norm.num_batches_tracked", "model.unused.weight", "model.unused.bias",
    }  # fmt: skip
    keys = ("exp_avg", "exp_avg_sq", "step")
    assert names - set(get_state_dict(model)) == {
        f"optim.{n}.{k}" for n in ("embed.weight", "norm.weight", "norm.bias") for k in keys
    }
    compiled = torch.compile(model)
    assert isinstance(compiled, nn.Module)
    assert set(get_state_dict(compiled, optimizer)) == names
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(compiled)
        assert set(get_state_dict(wrapped, optimizer)) == names
        set_state_dict(wrapped, optimizer, get_state_dict(model, optimizer))
    finally:
        dist.destroy_process_group()
    model.norm = torch.compile(model.norm)  # type: ignore[assignment]
    assert set(get_state_dict(model, optimizer)) == names


def test_user_module_named_module_keeps_its_name() -> None:
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    assert set(get_state_dict(model)) == {"model.module.weight", "model.module.bias"}


class Odd(torch.optim.Optimizer):
    """An optimizer with state of every type of Python number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] |= {
                    "calls": 2**40,
                    "scale": 0.1,
                    "warm": True,
                    "tensor": torch.tensor(3),
                    "none": None,
                }


def test_numbers_of_an_optimizer_keep_their_types(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = Odd(model.parameters())
    optimizer.step()
    CheckpointStore(tmp_path).save(1, get_state_dict(model, optimizer), {})
    restored = Odd(model.parameters())
    set_state_dict(model, restored, CheckpointStore(tmp_path).load(1).tensors)
    state = restored.state[model.weight]
    assert state == {"calls": 2**40, "scale": 0.1, "warm": True, "tensor": torch.tensor(3)}
    assert {key: type(value) for key, value in state.items()} == {
        "calls": int,
        "scale": float,
        "warm": bool,
        "tensor": Tensor,
    }


def test_lists_of_an_optimizer_are_restored(tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = (model(torch.ones(2)).exp() - 3).square().sum()
            loss.backward()
            return float(loss.detach())

        optimizer.step(closure)

    torch.manual_seed(1)
    model = nn.Linear(2, 2)
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)
    step(model, lbfgs)
    CheckpointStore(tmp_path).save(1, get_state_dict(model, lbfgs), {})
    step(model, lbfgs)
    restored = nn.Linear(2, 2)
    restored_lbfgs = torch.optim.LBFGS(restored.parameters(), max_iter=3)
    set_state_dict(restored, restored_lbfgs, CheckpointStore(tmp_path).load(1).tensors)
    step(restored, restored_lbfgs)
    assert digest(get_state_dict(restored, restored_lbfgs)) == digest(get_state_dict(model, lbfgs))


def test_unsupported_state_is_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    optimizer = Odd(model.parameters())
    optimizer.state[model.weight] = {"seen": {1, 2}}
    with pytest.raises(
        CheckpointError,
        match=r"Odd keeps 'seen' as a set, which a checkpoint cannot hold\n  state of weight",
    ):
        get_state_dict(model, optimizer)
    optimizer.state[model.weight] = {"seen": [{1, 2}]}
    with pytest.raises(
        CheckpointError,
        match=r"Odd keeps 'seen' as a list, which a checkpoint cannot hold\n  state of weight; seen.0 is a set",
    ):
        get_state_dict(model, optimizer)

    class Extra(nn.Linear):
        def get_extra_state(self) -> int:
            return 1

    with pytest.raises(CheckpointError, match=r"Extra keeps extra state[\s\S]*module 1,"):
        get_state_dict(nn.Sequential(nn.Linear(1, 1), Extra(1, 1)))
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(7))])
    with pytest.raises(
        CheckpointError, match=r"1 of the optimizer's parameters are not in the model: shape \(7,\)"
    ):
        get_state_dict(model, optimizer)
    with pytest.raises(
        CheckpointError, match=r"cannot hold a tensor of torch.complex128[\s\S]*model.x"
    ):
        digest({"model.x": torch.ones(1, dtype=torch.complex128)})


def test_state_that_does_not_fit_is_named_and_nothing_changes() -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(2))
    saved = {name: tensor.clone() for name, tensor in get_state_dict(model, optimizer).items()}
    train(model, optimizer, range(2))
    before = digest(get_state_dict(model, optimizer))
    saved["model.extra"] = torch.ones(1)
    saved["optim.absent.exp_avg"] = torch.ones(1)
    del saved["model.unused.bias"]
    saved["model.norm.weight"] = torch.ones(9)
    saved["model.norm.bias"] = saved["model.norm.bias"].double()
    saved["optim.norm.weight.exp_avg"] = torch.ones(9)
    del saved["optim.norm.bias.exp_avg"]
    with pytest.raises(CheckpointError) as error:
        set_state_dict(model, optimizer, saved)
    for line in (
        "does not fit Tied and AdamW",
        "missing in the checkpoint: unused.bias",
        "unexpected in the checkpoint: extra",
        "norm.bias is float64 (8,) in the checkpoint, float32 (8,) here, norm.weight is float32 (9,)",
        "unexpected in the checkpoint: optim.absent",
        "missing in the checkpoint: optim.norm.bias.exp_avg",
        "wrong: optim.norm.weight.exp_avg is float32 (9,)",
    ):
        assert line in str(error.value)
    assert digest(get_state_dict(model, optimizer)) == before


def test_weights_can_be_loaded_without_optimizer() -> None:
    model, restored = Tied(), Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    set_state_dict(restored, None, get_state_dict(model, optimizer))
    assert digest(get_state_dict(restored)) == digest(get_state_dict(model))


EVERY_DTYPE = {
    f"{dtype}": torch.arange(24).reshape(2, 3, 4).to(dtype)
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
    )
} | {"zero": torch.tensor(1.5), "empty": torch.empty(0, 3), "an ünusual\nname": torch.ones(1)}  # fmt: skip


def test_digest_depends_on_names_dtypes_shapes_and_bytes_only() -> None:
    tensors = {"x": torch.arange(6.0).reshape(2, 3), "y": torch.ones(2, dtype=torch.bfloat16)}
    equal = {"y": tensors["y"].clone(), "x": torch.stack([tensors["x"]] * 2, dim=-1)[..., 0]}
    assert not equal["x"].is_contiguous()
    assert digest(tensors) == digest(equal)
    for changed in (
        {"x": tensors["x"].reshape(3, 2), "y": tensors["y"]},
        {"x": tensors["x"].view(torch.int32), "y": tensors["y"]},
        {"x": tensors["x"], "z": tensors["y"]},
        {"x": tensors["x"]},
        {"x": tensors["x"], "y": torch.tensor([1, 1 + 2**-7], dtype=torch.bfloat16)},
        {"x": tensors["x"] * torch.tensor([[-1.0], [1.0]]), "y": tensors["y"]},  # -0.0 is not 0.0
    ):
        assert digest(tensors) != digest(changed)


@pytest.mark.parametrize("file_bytes", [1, 100, 10**9])
def test_every_dtype_is_restored_and_the_digest_is_that_of_the_command(
    tmp_path: Path, file_bytes: int
) -> None:
    store = CheckpointStore(tmp_path, file_bytes=file_bytes)
    facts = {"run": {"seed": 1}, "text": "è", "none": None}
    path = store.save(7, EVERY_DTYPE, facts)
    assert len(list(path.glob("*.safetensors"))) == {1: 19, 100: 12, 10**9: 1}[file_bytes]
    checkpoint = store.load(7)
    assert checkpoint.facts == facts
    assert checkpoint.tensors.keys() == EVERY_DTYPE.keys()
    for name, tensor in EVERY_DTYPE.items():
        assert checkpoint.tensors[name].dtype == tensor.dtype
        assert checkpoint.tensors[name].shape == tensor.shape
    assert digest(checkpoint.tensors) == digest(EVERY_DTYPE)
    assert commands.digest_line(tmp_path) == f"step 7 sha256 {digest(EVERY_DTYPE)}"


def test_files_are_compatible_with_the_safetensors_library(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save(1, EVERY_DTYPE, {})
    loaded = safetensors.torch.load_file(path / "tensors-00000.safetensors")
    assert digest(loaded) == digest(EVERY_DTYPE)
    safetensors.torch.save_file(EVERY_DTYPE, tmp_path / "theirs.safetensors", metadata={"a": "b"})
    parsed = {
        spec.name: (spec, data)
        for spec, data in safetensors_io.parse_file(
            safetensors_io.map_file(tmp_path / "theirs.safetensors")
        )[1]
    }
    assert parsed.keys() == EVERY_DTYPE.keys()
    assert safetensors_io.digest_of_fingerprints(
        {name: safetensors_io.tensor_fingerprint(*pair) for name, pair in parsed.items()}
    ) == digest(EVERY_DTYPE)


def test_safetensors_library_reads_exported_weights(tmp_path: Path) -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    CheckpointStore(tmp_path, file_bytes=100).save(1, get_state_dict(model, optimizer), {})
    commands.export(tmp_path, None, tmp_path / "weights.safetensors")
    theirs = safetensors.torch.load_file(tmp_path / "weights.safetensors")
    assert digest({f"model.{name}": tensor for name, tensor in theirs.items()}) == digest(
        get_state_dict(model)
    )
    with safetensors.safe_open(tmp_path / "weights.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "1"}
