"""Translator: loss and gradient, masks, initial weights, dropout, fast paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config import schema as config
from lockstep.config.schema import ModelOptions
from lockstep.models import kernels
from lockstep.models.kernels import add_dropout, attend_packed, choose_attention, dropout_mask
from lockstep.models.loss import output_cross_entropy
from lockstep.models.translator import Translator, build_translator, init_param
from lockstep.parallel.deferred_init import materialize

V = 50


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def small(
    dropout: float = 0.0,
    attention: kernels.AttentionKernel = "plain",
    vocab_size: int = V,
    **other: Any,
) -> Translator:
    sizes = {"dim": 16, "n_heads": 4, "encoder_layers": 2, "decoder_layers": 2, "ffn_dim": 24}
    options = ModelOptions(**{**sizes, **other}, dropout=dropout, attention=attention)
    return initialized(Translator(vocab_size, options), 1)


def initialized(model: Translator, seed: int) -> Translator:
    return materialize(
        model, torch.device("cpu"), lambda name, shape: init_param(name, shape, seed)
    )


def batch(rows: int = 5, length: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of different lengths; the last one is PAD only."""
    source, target, labels = (torch.randint(4, V, (rows, length)) for _ in range(3))
    for row in range(rows):
        end = 0 if row == rows - 1 else length - row
        source[row, end:] = target[row, end:] = labels[row, end:] = 0
    return source, target, labels


def gradients(loss: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, tensors))


# -- loss -------------------------------------------------------------------------------------------------------------


def torch_loss(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, -2),
        labels.flatten(),
        ignore_index=0,
        reduction="sum",
        label_smoothing=smoothing,
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_equals_that_of_torch_in_float64(smoothing: float) -> None:
    """600 tokens, more than a chunk; a quarter is PAD."""
    states = torch.randn(6, 100, 8, dtype=torch.float64, requires_grad=True)
    weight = (3 * torch.randn(V, 8, dtype=torch.float64)).requires_grad_()
    labels = torch.randint(4, V, (6, 100)) * (torch.rand(6, 100) > 0.25)
    expected = torch_loss(states @ weight.T, labels, smoothing)
    grads = gradients(expected * 0.3, [states, weight])
    loss = output_cross_entropy(states, weight, labels, smoothing=smoothing, ignore_index=0)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for own, theirs in zip(gradients(loss * 0.3, [states, weight]), grads, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-10, atol=1e-12)


def test_gradient_of_the_loss_passes_gradcheck() -> None:
    states = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([4, 0, 5, 10, 0, 6, 4])
    assert torch.autograd.gradcheck(
        lambda s, w: output_cross_entropy(s, w, labels, smoothing=0.2, ignore_index=0),
        (states, weight),
    )


def test_loss_under_autocast_is_float32_and_close_to_the_exact_one() -> None:
    states = torch.randn(300, 32, requires_grad=True)
    weight = torch.randn(V, 32, requires_grad=True)
    labels = torch.randint(4, V, (300,))
    expected = torch_loss(states.double() @ weight.double().T, labels, 0.1)
    grads = gradients(expected, [states, weight])
    with torch.autocast("cpu", torch.bfloat16):
        loss = output_cross_entropy(states, weight, labels, smoothing=0.1, ignore_index=0)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=3e-3, atol=0)
    for own, theirs in zip(gradients(loss, [states, weight]), grads, strict=True):
        assert (own - theirs).norm() < 1e-2 * theirs.norm()


def test_extreme_logits_and_empty_batches_give_finite_numbers() -> None:
    logits = torch.tensor(
        [[1e4, -1e4, 0.0, 0.0, 3.0], [-3e38, 0.0, 0.0, 0.0, 0.0]], requires_grad=True
    )
    loss = output_cross_entropy(
        logits, torch.eye(5), torch.tensor([4, 4]), smoothing=0.0, ignore_index=0
    )
    assert float(loss.detach()) == pytest.approx(9997 + 1.38629, rel=1e-6)
    assert gradients(loss, [logits])[0].isfinite().all()
    states, weight = torch.randn(3, 4, requires_grad=True), torch.randn(V, 4, requires_grad=True)
    loss = output_cross_entropy(
        states, weight, torch.zeros(3, dtype=torch.int64), smoothing=0.1, ignore_index=0
    )
    assert float(loss.detach()) == 0.0
    assert all(not grad.any() for grad in gradients(loss, [states, weight]))


def test_loss_of_the_model_equals_the_loss_of_its_logits() -> None:
    model, (source, target, labels) = small().double(), batch()
    expected = torch_loss(model(source, target), labels, 0.1)
    grads = gradients(expected, list(model.parameters()))
    loss = model(source, target, labels, smoothing=0.1)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for own, theirs in zip(gradients(loss, list(model.parameters())), grads, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-9, atol=1e-11)


# -- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["plain", "sdpa"])
def test_rows_of_padding_give_finite_numbers_and_change_nothing(
    attention: kernels.AttentionKernel,
) -> None:
    model, (source, target, labels) = small(attention=attention).double(), batch()
    with_empty = model(source, target, labels)
    grads = gradients(with_empty, list(model.parameters()))
    assert all(grad.isfinite().all() for grad in grads)
    assert model(source, target).isfinite().all()
    for own, theirs in zip(
        gradients(model(source[:-1], target[:-1], labels[:-1]), list(model.parameters())),
        grads,
        strict=True,
    ):
        torch.testing.assert_close(own, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("attention", ["plain", "sdpa"])
def test_sentence_does_not_attend_to_padding_or_later_tokens(
    attention: kernels.AttentionKernel,
) -> None:
    model, (source, target, _) = small(attention=attention).double().eval(), batch()
    whole = model(source, target)
    wider = model(F.pad(source, (0, 3)), F.pad(target, (0, 3)))[:, : target.shape[1]]
    torch.testing.assert_close(wider, whole, rtol=1e-12, atol=1e-12)
    other = target.clone()
    other[:, 4:] = torch.randint(4, V, other[:, 4:].shape)
    torch.testing.assert_close(model(source, other)[:, :4], whole[:, :4], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(model(source, other)[0, 4:], whole[0, 4:])


# -- fast paths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to_itself", [True, False])
def test_packed_attention_equals_torch_attention(
    to_itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = torch.randn(
        3, 5, 3 if to_itself else 1, 2, 4, dtype=torch.float64, requires_grad=True
    )
    others = (
        None if to_itself else torch.randn(3, 6, 2, 2, 4, dtype=torch.float64, requires_grad=True)
    )
    bias = torch.full((1, 1, 5, 5), -torch.inf).triu(1) if to_itself else torch.zeros(3, 1, 1, 6)
    bias[..., 5:] = -torch.inf
    given = [queries] if others is None else [queries, others]
    weights = torch.randn(3, 5, 8, dtype=torch.float64)

    def both(choice: kernels.AttentionKernel) -> list[Tensor]:
        mixed = attend_packed(queries, others, bias.double(), choice)
        return [mixed, *gradients((mixed * weights).sum(), given)]

    fast = both("plain")
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "use_cpu_kernels", lambda tensor: False)
        answers = [both("plain"), both("sdpa")]
    for answer in answers:
        for own, theirs in zip(fast, answer, strict=True):
            torch.testing.assert_close(own, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("probability", [0.1, 0.3])
def test_dropout_has_the_given_probability_and_scales_the_rest(probability: float) -> None:
    mask = dropout_mask(torch.Size((1001, 333)), probability, torch.float64)
    kept = mask > 0
    assert kept.double().mean().item() == pytest.approx(
        1 - probability, abs=4 * (probability / kept.numel()) ** 0.5
    )
    assert mask[kept].unique().tolist() == pytest.approx([1 / (1 - probability)], rel=1e-4)
    assert mask.mean().item() == pytest.approx(1.0, abs=0.005)
    runs = (kept[:, 1:] == kept[:, :-1]).double().mean().item()
    assert runs == pytest.approx(probability**2 + (1 - probability) ** 2, abs=0.005), (
        "adjacent elements are independent"
    )


def test_dropout_with_a_probability_near_1_is_finite() -> None:
    assert dropout_mask(torch.Size((999,)), 0.999999, torch.float32).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_dropout_adds_and_its_gradient_is_the_mask(dtype: torch.dtype) -> None:
    residual = torch.randn(40, 16, requires_grad=True)
    branch = torch.randn(40, 16).to(dtype).requires_grad_()
    torch.manual_seed(7)
    added = add_dropout(residual, branch, 0.4)
    torch.manual_seed(7)
    mask = dropout_mask(branch.shape, 0.4, torch.float32)
    torch.testing.assert_close(added, residual + mask * branch.float())
    weights = torch.randn(40, 16)
    to_residual, to_branch = gradients((added * weights).sum(), [residual, branch])
    assert torch.equal(to_residual, weights)
    assert to_branch.dtype == dtype
    torch.testing.assert_close(to_branch, (weights * mask).to(dtype))


def test_loss_and_gradient_depend_on_the_seed() -> None:
    model, given = small(dropout=0.3), batch()

    def step(seed: int, precision: bool) -> list[Tensor]:
        torch.manual_seed(seed)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision):
            loss = model(*given, smoothing=0.1)
        return [loss.detach(), *gradients(loss, list(model.parameters()))]

    for precision in (False, True):
        first, again, other = step(1, precision), step(1, precision), step(2, precision)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not torch.equal(first[0], other[0])
    assert torch.equal(model.eval()(*given), model.eval()(*given)), "no dropout in evaluation mode"


def test_the_compiled_model_has_no_graph_break() -> None:
    model, given = small(dropout=0.1), batch()

    def loss(source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: Tensor = model(source, target, labels, smoothing=0.1)
        return found

    explained = torch._dynamo.explain(loss)(*given)
    assert explained.graph_break_count == 0, explained.break_reasons
    assert explained.graph_count == 1


# -- initial weights --------------------------------------------------------------------------------------------------


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    first = small()
    deeper = small(encoder_layers=3)
    known = dict(deeper.named_parameters())
    assert all(torch.equal(parameter, known[name]) for name, parameter in first.named_parameters())
    other = dict(initialized(deeper, 2).named_parameters())
    matrices = [
        (name, parameter) for name, parameter in first.named_parameters() if parameter.dim() > 1
    ]
    assert not any(torch.equal(matrix, other[name]) for name, matrix in matrices)


def test_building_on_the_meta_device_gives_the_same_model() -> None:
    section = config.ModelOptions(
        dim=16, n_heads=4, encoder_layers=2, decoder_layers=2, ffn_dim=24, dropout=0.0
    )
    state = torch.random.get_rng_state()
    model = build_translator(section, vocab_size=V, device=torch.device("cpu"), seed=1)
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator is untouched"
    expected = small()
    source, target, labels = batch()
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert torch.equal(model(source, target, labels), expected(source, target, labels))
    assert model.training


def test_initial_weights_have_the_documented_deviation() -> None:
    model = small(vocab_size=2000, dim=128)
    assert model.embedding.weight.std().item() == pytest.approx(128**-0.5, rel=0.02)
    layer = model.get_submodule("decoder.1")
    for name, parts in (
        ("self_attention.query_key_value", 3),
        ("cross_attention.key_value", 2),
        ("cross_attention.out", 1),
    ):
        projection = layer.get_submodule(name)
        assert isinstance(projection, nn.Linear)
        assert projection.weight.shape == (parts * 128, 128)
        assert projection.weight.abs().max().item() == pytest.approx((6 / 256) ** 0.5, rel=0.01)
    assert bool(model(*batch()).isfinite())


def test_attention_is_chosen_with_a_reason() -> None:
    choices: list[Callable[[], tuple[str, str]]] = [
        lambda: choose_attention("cpu", 32),
        lambda: choose_attention("cuda", 32),
    ]
    assert [choice()[0] for choice in choices] == ["plain", "sdpa"]
    assert choose_attention("cpu", 4000)[0] == "sdpa"
    assert all(choice()[1] for choice in choices)
