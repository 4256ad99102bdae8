"""Adapters over matrices that a model may not have."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.models.test_families import random_model

from lockstep.config.schema import LoraOptions
from lockstep.errors import UsageError
from lockstep.models.hub import open_hub
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
