"""Packed documents on a GPU: variable-length attention instead of a mask of B x T x T.

The kernel runs in tests/gpu. Here torch's shape function checks the call, and attention to one
document after the other gives the values.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.attention.varlen as torch_varlen
import torch.nn.functional as F
from torch import Tensor

from lockstep.models import llama
from lockstep.models.llama import DocumentEnds, attend, build_llama, positions_and_mask
from lockstep.models.llama_config import LlamaConfig

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1, 1, 1]])


def one_document_at_a_time(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    key_ends: Tensor,
    max_q: int,
    max_k: int,
    **options: Any,
) -> Tensor:
    """Reference for varlen_attn: (positions, heads, E)."""
    assert (
        options == {"window_size": (-1, 0), **llama.GROUPED} and ends is key_ends and max_q == max_k
    )
    spans = [
        slice(start, end) for start, end in zip(ends.tolist(), ends.tolist()[1:], strict=False)
    ]
    parts = [[tensor[span].transpose(0, 1) for tensor in (query, key, value)] for span in spans]
    return torch.cat(
        [
            F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True).transpose(0, 1)
            for part in parts
        ]
    )


def test_the_ends_of_documents_over_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "has_document_attention", lambda device: True)
    positions, ends = positions_and_mask(DOCUMENTS, DOCUMENTS)
    assert isinstance(ends, DocumentEnds) and ends.ends.dtype == torch.int32
    assert ends.ends.tolist() == [0, 3, 7, 8, 9, 16] and ends.length == 8
    assert positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [0, 0, 1, 2, 3, 4, 5, 6]]


def test_document_attention_gives_the_logits_of_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(50, 32, 2, 4, 2, 8, 48)
    model = build_llama(config, device=torch.device("cpu"), seed=3)
    tokens = torch.randint(0, 50, DOCUMENTS.shape, generator=torch.Generator().manual_seed(1))
    with_mask = model(tokens, documents=DOCUMENTS)
    monkeypatch.setattr(torch_varlen, "varlen_attn", one_document_at_a_time)
    monkeypatch.setattr(llama, "has_document_attention", lambda device: True)
    monkeypatch.setattr(
        torch, "get_autocast_dtype", lambda device_type: torch.float32
    )  # to compare without bf16's rounding
    torch.testing.assert_close(model(tokens, documents=DOCUMENTS), with_mask)


def test_torch_accepts_the_call_and_its_gradient() -> None:
    """On the device "meta", which has shapes and no values."""
    with torch.device("meta"):
        query, key, value = (
            torch.empty(2, heads, 8, 16, dtype=torch.bfloat16, requires_grad=True)
            for heads in (4, 2, 2)
        )
        ends = DocumentEnds(torch.empty(6, dtype=torch.int32), 8, torch.bfloat16)
    attended = attend(query, key, value, ends)
    assert attended.shape == query.shape
    attended.sum().backward()
    assert key.grad is not None and key.grad.shape == key.shape


def test_a_cpu_uses_the_mask() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert isinstance(positions_and_mask(DOCUMENTS, DOCUMENTS)[1], Tensor)
