"""Layout limits and minimum size of a model, from the configuration alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lockstep.config.schema import RunConfig
from lockstep.layout import LayoutLimits
from lockstep.models.llama_config import LLAMA_CONFIGS, LlamaConfig

if TYPE_CHECKING:
    from lockstep.parallel.plans import StagedModel


def layout_limits(run: RunConfig) -> LayoutLimits:
    """Return what the axes of a layout must divide. Reads a Llama's folder, which imports
    torch, only if the layout splits layers."""
    if run.task == "translate":
        model = run.model
        return LayoutLimits(
            run.data_parallel_limit,
            (model.n_heads, model.ffn_dim),
            model.encoder_layers + model.decoder_layers,
        )
    if run.layout.tensor == run.layout.pipeline == 1:
        return LayoutLimits(run.data_parallel_limit)
    config = llama_config(run)
    if run.llama.backend == "transformers":
        from lockstep.parallel.plans import plan_of  # loads torch

        return plan_of(config.meta_model()).layout_limits(run.data_parallel_limit)
    return LayoutLimits(
        run.data_parallel_limit,
        (config.n_heads, config.n_kv_heads, config.ffn_dim),
        config.n_layers,
    )


def llama_config(run: RunConfig) -> LlamaConfig:
    """Return the size of the run's Llama. The vocabulary of a new one depends on its tokenizer."""
    if not run.llama.init_from:
        return LLAMA_CONFIGS[run.llama.size]
    from lockstep.models.hub import open_hub  # these load torch, which the agent does not need
    from lockstep.models.llama_io import is_llama_run, read_model, refuse_other_backend

    start = Path(run.llama.init_from)
    config = (
        read_model(start).config
        if is_llama_run(start)
        else open_hub(start, run.llama.backend).config
    )
    refuse_other_backend(config, run.llama.backend, run.llama.init_from)
    return cast("LlamaConfig", config)


def built_in_model(run: RunConfig, vocab_size: int) -> StagedModel:
    """Return the run's model on the meta device, a new one with this vocabulary."""
    from lockstep.models.translator import translator_on_meta  # loads torch

    if run.task == "translate":
        return translator_on_meta(run.model, vocab_size, "cpu", 1)
    config = llama_config(run)
    if not run.llama.init_from:
        config = replace(config, vocab_size=vocab_size)
    return config.meta_model()


def smallest_model(run: RunConfig) -> StagedModel | None:
    """Return the run's model on the meta device, a new one with a vocabulary of one word, which is
    as large as the prepared data otherwise; None: its size is known when its folder is read."""
    if run.llama.backend == "transformers":
        return None
    return built_in_model(run, 1).requires_grad_(not run.lora.rank)
