"""Adapters over matrices that a model may not have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from unit.models.test_families import random_model

from lockstep.config.adapter_config import adapter_config
from lockstep.config.schema import LoraOptions
from lockstep.errors import UsageError
from lockstep.models.hub import open_hub, write_adapter
from lockstep.models.llama_io import load_llama
from lockstep.models.lora import add_adapters, is_adapter


def test_targets_that_a_model_lacks_are_refused(tmp_path: Path) -> None:
    """Phi-3 has one matrix for query, key and value."""
    random_model("phi3", {}, tmp_path)
    config = open_hub(tmp_path, "transformers").config
    model = add_adapters(config.meta_model(), LoraOptions(2, 4.0, ("out", "down")))
    assert sum(is_adapter(name) for name, _ in model.named_parameters()) == 2 * 2 * 2
    with pytest.raises(UsageError, match="no linear layers q_proj") as caught:
        add_adapters(config.meta_model(), LoraOptions(2, 4.0, ("query", "out")))
    assert "remove query from lora.targets" in caught.value.hint


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@torch.no_grad()
def test_adapters_of_other_linear_layers_are_those_of_peft(tmp_path: Path) -> None:
    """GPT-NeoX has none of the seven matrices; its own names are given."""
    peft = pytest.importorskip("peft")
    theirs = random_model("gpt_neox", {}, tmp_path / "hub")
    options = LoraOptions(rank=4, targets=("query_key_value", "dense_4h_to_h"))
    folder = open_hub(tmp_path / "hub", "transformers")
    with pytest.raises(UsageError, match="no linear layers embed_out") as caught:
        add_adapters(folder.config.meta_model(), replace(options, targets=("embed_out",)))
    assert "the model has query_key_value, dense, dense_h_to_4h, dense_4h_to_h" in caught.value.hint
    ours = load_llama(tmp_path / "hub", device=torch.device("cpu"), backend="transformers").model
    adapted = add_adapters(ours, options)
    adapters = {name: p for name, p in adapted.named_parameters() if is_adapter(name)}
    assert len(adapters) == 2 * 2 * theirs.config.num_hidden_layers
    for parameter in adapters.values():
        parameter.normal_(std=0.25)
    write_adapter(tmp_path / "adapter", adapter_config(options, ""), adapters)
    tokens = torch.arange(3, 43).view(2, 20)
    logits = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()(tokens).logits
    torch.testing.assert_close(ours(tokens), logits, rtol=0, atol=1e-4)
