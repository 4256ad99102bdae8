"""Layout limits, from the configuration alone."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from lockstep.config.resolve import resolve
from lockstep.layout import LayoutLimits
from lockstep.models.llama_config import LLAMA_CONFIGS
from lockstep.tasks.layout_limits import layout_limits, smallest_model

LLAMA = {"task": "pretrain", "data.kind": "stdlib", "llama.size": "5M"}


def test_a_translator_is_limited_by_its_heads_feed_forward_and_layers() -> None:
    sizes = {
        "model.n_heads": 4,
        "model.ffn_dim": 96,
        "model.encoder_layers": 2,
        "model.decoder_layers": 3,
        "batch.micro_batches": 6,
    }
    assert layout_limits(resolve(None, sizes).run) == LayoutLimits(6, (4, 96), 5)


def test_a_llama_is_limited_by_its_size_when_a_layout_splits_layers() -> None:
    config = LLAMA_CONFIGS["5M"]
    limits = LayoutLimits(8, (config.n_heads, config.n_kv_heads, config.ffn_dim), config.n_layers)
    assert layout_limits(resolve(None, LLAMA | {"layout.tensor": 2}).run) == limits
    assert layout_limits(resolve(None, LLAMA | {"layout.pipeline": 2}).run) == limits
    assert layout_limits(resolve(None, LLAMA | {"layout.shard": 2}).run) == LayoutLimits(8)


def test_limits_of_whole_layers_do_not_import_torch() -> None:
    code = f"""
import sys
from typing import Any
from lockstep.config.resolve import resolve
from lockstep.tasks.layout_limits import layout_limits
layout_limits(resolve(None, {LLAMA}).run), layout_limits(resolve(None, {{"layout.tensor": 2}}).run)
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def parameters_of(values: dict[str, Any]) -> int:
    model = smallest_model(resolve(None, values).run)
    assert model is not None
    return sum(p.numel() for p in model.parameters())


def test_a_larger_model_has_more_parameters() -> None:
    sizes = [parameters_of(LLAMA | {"llama.size": size}) for size in ("1M", "5M", "25M")]
    assert sizes == sorted(sizes) and sizes[0] > 0
    assert parameters_of({"model.encoder_layers": 4}) > parameters_of({})
