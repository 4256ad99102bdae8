"""Memory options change no bits, or as few as documented, and reduce measured memory."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launching import run_command
from support.tensor_memory import TensorMemory
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from lockstep.checkpoint.state_dict import digest, get_state_dict, set_state_dict
from lockstep.config.resolve import resolve
from lockstep.config.schema import MemoryOptions, ModelOptions, OptimOptions
from lockstep.errors import ConfigError
from lockstep.layout import Layout
from lockstep.models.llama import Llama, build_llama
from lockstep.models.llama_config import LLAMA_CONFIGS, LlamaConfig
from lockstep.models.translator import Translator, build_translator
from lockstep.parallel.activation_checkpoint import Mode, checkpoint_activations
from lockstep.parallel.plans import ParallelPlan, plan_of
from lockstep.planner.memory_estimate import StateSize, memory_limit, refuse_too_large
from lockstep.tasks.layout_limits import smallest_model
from lockstep.tasks.optim import LeanAdamW, make_optimizers, stochastic_round

CONFIG = LlamaConfig(300, 64, 4, 4, 2, 16, 192, max_seq_len=256)
CPU = torch.device("cpu")
MODES: list[Mode] = ["none", "selective", "full"]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [model.get_submodule(name) for name in plan_of(model).units]


def llama_loss(model: nn.Module) -> Tensor:
    tokens = torch.randint(300, (4, 128), generator=torch.Generator().manual_seed(1))
    loss: Tensor = model(tokens, tokens.roll(-1, 1), torch.arange(128).expand(4, 128) // 50)
    return loss


def translator_loss(model: nn.Module) -> Tensor:
    source, target = torch.randint(1, 100, (2, 3, 20), generator=torch.Generator().manual_seed(1))
    loss: Tensor = model(source, target, target.roll(-1, 1))
    return loss


def translator() -> Translator:
    return Translator(100, ModelOptions(32, 4, 2, 2, 64, dropout=0.1, attention="plain"))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    "make, loss_of",
    [(lambda: build_llama(CONFIG, device=CPU, seed=1), llama_loss), (translator, translator_loss)],
)
def test_recomputation_has_the_same_bits(
    make: Callable[[], nn.Module], loss_of: Callable[[nn.Module], Tensor], bf16: bool
) -> None:
    """Including dropout."""
    plain, results = make(), []
    for mode in MODES:
        model = copy.deepcopy(plain)
        checkpoint_activations(blocks_of(model), mode)
        assert digest(get_state_dict(model)) == digest(get_state_dict(plain)), "no name has changed"
        torch.manual_seed(7)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = loss_of(model)
        loss.backward()
        grads = {
            name: parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        results.append((float(loss.detach()), digest(grads), len(grads)))
    assert results[0] == results[1] == results[2] and results[0][2] == len(list(plain.parameters()))


def test_activation_checkpointing_lowers_peak_memory() -> None:
    peaks = []
    for mode in MODES:
        model = build_llama(LlamaConfig(300, 64, 8, 4, 2, 16, 192), device=CPU, seed=1)
        checkpoint_activations(blocks_of(model), mode)
        with TensorMemory() as living:
            llama_loss(model).backward()
        peaks.append(living.peak - sum(parameter.nbytes for parameter in model.parameters()))
    print("bytes beside the gradients, by mode:", dict(zip(MODES, peaks, strict=True)))
    assert peaks[1] < 0.7 * peaks[0] and peaks[2] < 0.4 * peaks[0]


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch.compile reads it
@pytest.mark.parametrize("mode", MODES)
def test_one_graph_serves_all_blocks(mode: Mode) -> None:
    plain = build_llama(CONFIG, device=CPU, seed=1)
    model = copy.deepcopy(plain)
    checkpoint_activations(blocks_of(model), mode)
    counter = CompileCounter()
    for block in blocks_of(model):
        block.compile(dynamic=False, backend=counter, fullgraph=True)
    loss = llama_loss(model)
    loss.backward()
    assert counter.frame_count == 1
    torch.testing.assert_close(loss, llama_loss(plain))


# -- the optimizer ----------------------------------------------------------------------------------------------------


def trained(memory: MemoryOptions, steps: int = 12) -> tuple[Llama, torch.optim.Optimizer]:
    model = build_llama(CONFIG, device=CPU, seed=1)
    if memory.weights == "bf16":
        model.bfloat16()
    optimizer = make_optimizers(model, OptimOptions(learning_rate=1e-2), memory)[0]
    train_further(model, optimizer, steps)
    return model, optimizer


def train_further(model: Llama, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (llama_loss(model) / 512).backward()
        optimizer.step()


def test_offloaded_optimizer_on_a_cpu_has_the_bits_of_torch_adamw() -> None:
    expected, lean = trained(MemoryOptions()), trained(MemoryOptions(offload="optimizer"))
    assert isinstance(expected[1], torch.optim.AdamW) and isinstance(lean[1], LeanAdamW)
    assert digest(get_state_dict(*expected)) == digest(get_state_dict(*lean))


@pytest.mark.parametrize(
    "memory",
    [
        MemoryOptions(optimizer_state="bf16"),
        MemoryOptions(weights="bf16"),
        MemoryOptions(optimizer_state="bf16", weights="bf16"),
    ],
)
def test_bf16_state_trains_as_well_in_less_memory_and_resumes_with_the_same_bits(
    memory: MemoryOptions,
) -> None:
    expected, _ = trained(MemoryOptions())
    model, optimizer = trained(memory)
    before = float(llama_loss(build_llama(CONFIG, device=CPU, seed=1)).detach())
    losses = [float(llama_loss(one).detach()) for one in (expected, model)]
    assert losses[0] < 0.7 * before and losses[1] == pytest.approx(losses[0], rel=0.05)
    numbers = CONFIG.num_parameters
    state_bytes = sum(
        t.nbytes
        for name, t in get_state_dict(model, optimizer).items()
        if not name.endswith("step")
    )
    each = (
        (2 if memory.weights == "bf16" else 4)
        + (4 if memory.weights == "bf16" else 0)
        + (4 if memory.optimizer_state == "bf16" else 8)
    )
    assert state_bytes == numbers * each
    saved = {name: tensor.clone() for name, tensor in get_state_dict(model, optimizer).items()}
    again = build_llama(CONFIG, device=CPU, seed=2).to(next(model.parameters()).dtype)
    other = make_optimizers(again, OptimOptions(learning_rate=1e-2), memory)[0]
    set_state_dict(again, other, saved)
    train_further(model, optimizer, 2)
    train_further(again, other, 2)
    assert digest(get_state_dict(model, optimizer)) == digest(get_state_dict(again, other))


def test_update_does_not_depend_on_how_tensors_are_split() -> None:
    whole = nn.Parameter(torch.randn(64, 24).bfloat16())
    cuts = [nn.Parameter(part.detach().clone()) for part in whole.split((13, 51))]
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "state_dtype": torch.bfloat16}
    optimizers = LeanAdamW([whole], **options), LeanAdamW(cuts, **options)
    for _ in range(5):
        whole.grad = torch.randn(64, 24).bfloat16()
        for part, grad in zip(cuts, whole.grad.split((13, 51)), strict=True):
            part.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(whole, torch.cat([part.detach() for part in cuts]))


def test_stochastic_rounding_is_unbiased() -> None:
    wide = torch.full((100_000,), 1 + 1 / 1024)  # an eighth of the way from 1 to the next number
    rounded = stochastic_round(wide, torch.randn(100_000), 5).float()
    assert set(rounded.tolist()) == {1.0, 1.0078125}
    assert float(rounded.mean()) == pytest.approx(1 + 1 / 1024, abs=5e-5)
    fading = torch.ones(2000).bfloat16()
    for step in range(1000):
        fading = stochastic_round(fading.float() * 0.999, torch.randn(2000) * 1e-6, step)
    assert float(fading.float().mean()) == pytest.approx(0.999**1000, rel=0.02), (
        "rounding to nearest would stay at 1"
    )


def test_stochastic_rounding_keeps_nan_and_infinities() -> None:
    bits = torch.tensor(
        [0x7FFFFFFF, 0x7FFF0001, 0x7F800001, -1, 0x7FC00000, 0x7F800000, -0x800000],
        dtype=torch.int32,
    )
    rounded = [
        stochastic_round(bits.view(torch.float32), torch.full((7,), noise), step)
        for noise in (0.0, 1.5, -3e38)
        for step in range(8)
    ]
    assert all(
        row[:5].isnan().all() and row[5:].tolist() == [math.inf, -math.inf] for row in rounded
    )


def test_logits_of_a_large_vocabulary_never_exist_at_once() -> None:
    """1,536 tokens of 128,256 words: the logits would take 788 MB, their gradient as much again."""
    script = Path(__file__).parents[1] / "support/memory/large_vocabulary_loss.py"
    result = run_command([sys.executable, script], check=True)
    assert int(result.stdout) < 400e6 < 1536 * 128_256 * 4


def test_model_too_large_for_this_machine_is_refused_before_data_preparation() -> None:
    flags = {
        "model.dim": "24",
        "model.n_heads": "3",
        "model.encoder_layers": "2",
        "model.decoder_layers": "5",
    }
    run = resolve(None, flags).run
    translator = build_translator(run.model, vocab_size=100, device=torch.device("meta"), seed=1)
    assert parameters_of(smallest_model(run)) == parameters_of(translator) - 99 * 24
    for size in ("1M", "405B"):
        run = resolve(None, {"task": "pretrain", "data.kind": "stdlib", "llama.size": size}).run
        config = replace(LLAMA_CONFIGS[size], vocab_size=1)
        assert parameters_of(smallest_model(run)) == config.num_parameters

    limit, _ = memory_limit(CPU)
    refuse(limit // 16)
    refuse(limit // 4, frozen=True)
    refuse(limit // 4, layout=Layout(1, shard=4))
    for memory, each in (
        (MemoryOptions(), 16),
        (MemoryOptions(optimizer_state="bf16"), 12),
        (MemoryOptions(weights="bf16", optimizer_state="bf16"), 12),
    ):
        with pytest.raises(ConfigError, match="parameters takes") as caught:
            refuse(limit // each + 1000, memory=memory)
        assert "over at least 2 workers" in caught.value.hint
    for kind, each in (("sgd", 12), ("adafactor", 8)):  # fewer moments than AdamW
        optim = OptimOptions(kind=kind)  # type: ignore[arg-type]
        refuse(limit // (each + 1), optim)
        with pytest.raises(ConfigError):  # averaged weights
            refuse(limit // (each + 1), replace(optim, ema_decay=0.9))


def parameters_of(model: nn.Module | None) -> int:
    assert model is not None
    return sum(p.numel() for p in model.parameters())


class OneMatrix(nn.Linear):
    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(())


def refuse(
    parameters: int,
    optim: OptimOptions | None = None,
    memory: MemoryOptions | None = None,
    layout: Layout | None = None,
    frozen: bool = False,
) -> None:
    """Call `refuse_too_large` for a matrix of so many parameters."""
    model = OneMatrix(parameters, 1, bias=False, device="meta").requires_grad_(not frozen)
    size = StateSize.of(model, optim or OptimOptions(), memory or MemoryOptions(), CPU)
    refuse_too_large(size, layout or Layout(1), CPU)
