"""Import, export and load Llama models: Hugging Face folders, run folders, memory; the initial
weights of a run.

A run folder of a Llama:

    model.json      {"config": its config.json, "backend": "transformers" or none,
                     "lora": {"rank", "alpha", "targets", "dropout"} of a run that trains adapters,
                     "start", "start_sha256", "dtype": of its starting weights}
    tokenizer/      tokenizer.json, chat template, generation_config.json, ... as imported
    checkpoints/    step 0 is the imported model

Initial weights are random from the seed, or loaded; with or without adapters. Adapters are merged
into the weights whenever a model is loaded, exported or started from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint import commands, commit
from lockstep.checkpoint.folder import committed_steps
from lockstep.checkpoint.shards import StoredTensors, inference_weights
from lockstep.checkpoint.state_dict import tensor_from_bytes
from lockstep.checkpoint.store import CheckpointStore
from lockstep.config.adapter_config import adapter_config
from lockstep.config.schema import LoraOptions, RunConfig
from lockstep.corpus.tokenizer import BEGIN, END
from lockstep.errors import CheckpointError, DataError, UsageError
from lockstep.files import read_json, write_json
from lockstep.models import llama, lora
from lockstep.models.hub import (
    ADAPTER_FILE,
    CONFIG_FILE,
    SHARD_BYTES,
    LazyTensors,
    LlamaWeights,
    copy_files,
    dtype_of,
    is_hub,
    open_hub,
    refuse_existing,
    release_nothing,
    write_adapter,
    write_hub,
)
from lockstep.models.llama import Llama
from lockstep.models.llama_config import (
    LLAMA_CONFIGS,
    LlamaConfig,
    config_from_hf,
    config_to_write,
    packed_matrices,
)
from lockstep.models.lora import is_adapter, merged_weights
from lockstep.models.transformers_model import ModelConfig, TransformersConfig, TransformersModel
from lockstep.parallel.deferred_init import materialize
from lockstep.units import format_bytes, format_count

MODEL = "model.json"
TOKENIZER = "tokenizer"
CHECKPOINTS = "checkpoints"


def is_llama_run(folder: Path) -> bool:
    return (folder / MODEL).is_file()


@dataclass(frozen=True)
class RunModel:
    """The content of model.json.

    start  folder of the weights that the run started from, with their sha256 and dtype; "": random
           or imported ones
    """

    config: ModelConfig
    hf_config: dict[str, Any]
    lora: LoraOptions | None
    start: str
    start_sha256: str
    dtype: str


def read_model(folder: Path) -> RunModel:
    """Read model.json. DataError: it is damaged. CheckpointError: the run has not written it yet,
    or is of another model."""
    where = str(folder / MODEL)
    try:
        value = read_json(folder / MODEL)
        hf_config = dict(value["config"])
        config: ModelConfig = TransformersConfig(hf_config)
        if value.get("backend") != "transformers":
            config = config_from_hf(hf_config, where)
        adapters = value.get("lora")
        if adapters:
            adapters = LoraOptions(**{**adapters, "targets": tuple(adapters["targets"])})
        start = (str(value.get(key, "")) for key in ("start", "start_sha256", "dtype"))
        return RunModel(config, hf_config, adapters, *start)
    except FileNotFoundError:
        raise CheckpointError(
            f"there is no {MODEL}: the run has not started to train, or its model is no Llama",
            str(folder),
            "wait for its first save; without --adapter, "
            "export also writes the weights of other models",
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, CheckpointError) as error:
        raise DataError(
            f"{MODEL} cannot be read: {error}", where, "import the model again"
        ) from error


def backend_of(config: ModelConfig) -> str:
    return "transformers" if isinstance(config, TransformersConfig) else "lockstep"


# -- import, export --------------------------------------------------------------------------------


def refuse_other_backend(config: ModelConfig, backend: str, folder: str) -> None:
    """UsageError: the run in `folder` has another backend than the one that starts from it."""
    if backend_of(config) != backend:
        raise UsageError(
            f"llama.backend is {backend}, but the run in {folder} has another",
            "llama.backend",
            "set the llama.backend of that run, or export it and start from the export",
        )


def import_hub(source: Path, folder: Path) -> str:
    """Import the Hugging Face folder `source` into a new run folder; return a line for the user.

    The checkpoint of step 0 is committed last; importing again changes nothing. Memory: one tensor.
    UsageError: `folder` holds another run. CheckpointError: damaged source, or unwritable target.
    """
    hub = open_hub(source)
    model = {"config": hub.hf_config}
    refuse_other_run(folder, model)
    tensors = LazyTensors(
        [f"model.{name}" for name in hub.tensors],
        lambda name: hub.tensors[name.removeprefix("model.")],
    )
    size = sum(tensor.nbytes for tensor in tensors.values())
    count = sum(tensor.numel() for tensor in tensors.values())
    parents = (folder.absolute(), *folder.absolute().parents)
    existing = next(path for path in parents if path.is_dir())
    with commit.explain_write_errors(f"{folder} was not written", existing, size):
        copy_files(hub.companions, folder / TOKENIZER)
        write_json(folder / MODEL, model)
    CheckpointStore(folder / CHECKPOINTS).save(0, tensors, {"imported": source.name})
    return (
        f"step 0: {len(tensors)} tensors, "
        f"{format_count(count)} parameters, {format_bytes(size)}, written to {folder}"
    )


def refuse_other_run(folder: Path, model: Mapping[str, Any]) -> None:
    """UsageError: `folder` holds another run, or this model after step 0."""
    hint = "name another folder with --out; nothing was changed"
    is_other = is_llama_run(folder) and read_json(folder / MODEL) != model
    if is_other or (folder / "run.json").exists():
        raise UsageError(f"there is another run in {folder}", "--out", hint)
    if (newest := max(committed_steps(folder / CHECKPOINTS), default=0)) > 0:
        raise UsageError(f"the run in {folder} is at step {newest} already", "--out", hint)


def export_run(
    folder: Path,
    step: int | None,
    target: Path,
    shard_bytes: int = SHARD_BYTES,
    dtype: str = "",
    *,
    adapter: bool = False,
) -> str:
    """Export a checkpoint (step None: the newest) to a Hugging Face folder; return a line about it.

    dtype    of the exported tensors, as torch spells it; "": that of the starting weights, of
             adapters that of the training
    adapter  export the adapters alone, to a folder of PEFT

    The checkpoint is verified first. Memory: one tensor.
    """
    run = read_model(folder)
    peft_config = peft_config_of(folder, run) if adapter else None
    refuse_existing(target)
    with commands.open_verified(folder, step) as (newest_step, opened):
        tensors: Mapping[str, Tensor] = model_tensors(opened)
        if peft_config:
            tensors = LazyTensors(filter(is_adapter, tensors), tensors.__getitem__)
            write_adapter(target, peft_config, cast_tensors(tensors, dtype))
            files = [ADAPTER_FILE]
        else:
            weights = weights_of_run(folder, run, tensors)
            tensors = cast_tensors(weights.tensors, dtype or weights.dtype)
            if isinstance(run.config, TransformersConfig):
                tensors = run.config.as_stored(tensors)
            files = write_hub(
                target,
                run.hf_config,
                tensors,
                companions=weights.companions,
                shard_bytes=shard_bytes,
            )
        size = sum(tensor.nbytes for tensor in tensors.values())
    how = f"{len(files)} files" if len(files) > 1 else "1 file"
    return (
        f"step {newest_step}: {len(tensors)} tensors, "
        f"{format_bytes(size)} in {how}, written to {target}"
    )


def peft_config_of(folder: Path, run: RunModel) -> dict[str, Any]:
    """Return the adapter_config.json of a run. UsageError: its adapters do not fit a model of
    PEFT."""
    if run.lora is None:
        raise UsageError(
            f"the run in {folder} trains no adapters",
            "--adapter",
            "leave --adapter out to export its weights",
        )
    base = Path(run.start)
    is_native = isinstance(run.config, LlamaConfig) and is_hub(base)
    if is_native and packed_matrices(read_json(base / CONFIG_FILE), str(base)):
        raise UsageError(
            f"{base} packs query, key and value in one matrix, "
            "and the adapters of the run are of each",
            "--adapter",
            "leave --adapter out to export the merged weights",
        )
    if is_hub(base) and read_json(base / CONFIG_FILE).get("text_config"):
        raise UsageError(
            f"{base} is multimodal, and the adapters of the run have the names of its text model",
            "--adapter",
            "leave --adapter out to export the merged text model",
        )
    return adapter_config(run.lora, run.start)


def cast_tensors(tensors: Mapping[str, Tensor], dtype_name: str) -> Mapping[str, Tensor]:
    """Return the tensors in a dtype, "": unchanged. DataError: torch has no such dtype."""
    if not dtype_name:
        return tensors
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise DataError(f"{MODEL} names the dtype {dtype_name!r}", MODEL, "give one with --dtype")
    return LazyTensors(tensors, lambda name: cast_tensor(name, tensors[name], dtype))


def cast_tensor(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor. CheckpointError: a value overflows `dtype`."""
    converted = tensor.to(dtype)
    if dtype != tensor.dtype and tensor.isfinite().all() and not converted.isfinite().all():
        raise CheckpointError(
            f"{name} has values up to {tensor.abs().max():g}, "
            f"which overflow {str(dtype).removeprefix('torch.')}",
            "--dtype",
            "give another --dtype",
        )
    return converted


def model_tensors(stored: StoredTensors) -> LazyTensors:
    """Return the model's tensors in an open checkpoint, each read on access."""
    model = inference_weights(stored)
    return LazyTensors(model, lambda name: tensor_from_bytes(model[name].spec, model[name].data()))


def weights_of_run(folder: Path, run: RunModel, tensors: Mapping[str, Tensor]) -> LlamaWeights:
    """Return the model of a run, given the tensors of a checkpoint: adapters are merged into the
    weights that the run started from. CheckpointError: these have changed."""
    release = release_nothing
    if run.lora:
        base = open_weights(Path(run.start), backend_of(run.config))
        refuse_changed_weights(folder, run, base.sha256())
        tensors = merged_weights(base.tensors, tensors, run.lora)
        release = base.release
    tokenizer = folder / TOKENIZER
    companions = sorted(tokenizer.iterdir()) if tokenizer.is_dir() else []
    dtype = run.dtype or dtype_of(tensors)
    return LlamaWeights(folder, run.config, run.hf_config, tensors, companions, dtype, release)


def refuse_changed_weights(folder: Path, run: RunModel, sha256: str) -> None:
    """CheckpointError: the run in `folder` started from weights with another sha256."""
    if run.start_sha256 != sha256:
        raise CheckpointError(
            f"the weights in {run.start} have changed since the run in {folder} started from them",
            f"sha256 {sha256}\nwas    {run.start_sha256}",
            "restore that folder; "
            "a run with llama.init_from needs it as long as its checkpoints hold adapters alone",
        )


def open_weights(folder: Path, backend: str = "lockstep") -> LlamaWeights:
    """Open the model in a run folder (the newest, verified) or Hugging Face folder.

    UsageError: there is none. CheckpointError: it is damaged.
    """
    if is_llama_run(folder):
        with commands.open_verified(folder, None) as (_, opened):
            return weights_of_run(folder, read_model(folder), model_tensors(opened))
    refuse_no_model(folder)
    return open_hub(folder, backend)


# -- loading ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadedLlama:
    """A model in evaluation mode; `steps`: its checkpoint, (0,) for a Hugging Face folder."""

    model: Llama | TransformersModel
    tokenizer: Path  # folder
    hf_config: dict[str, Any]
    steps: tuple[int, ...]


def load_llama(
    folder: Path,
    step: int | None = None,
    *,
    device: torch.device | None = None,
    backend: str = "lockstep",
) -> LoadedLlama:
    """Load the Llama in a run folder (at `step`; None: the newest) or Hugging Face folder.

    device   default: the GPU if there is one
    backend  of a Hugging Face folder
    Memory: the weights once. On a CPU a Hugging Face folder stays mapped and is read on first use.
    """
    tokenizer, steps = folder, (0,)
    if is_llama_run(folder):
        checkpoint = CheckpointStore(folder / CHECKPOINTS).require(step)
        tokenizer, steps = folder / TOKENIZER, (checkpoint.step,)
        tensors = inference_weights(checkpoint.tensors)
        weights = weights_of_run(folder, read_model(folder), tensors)
        del checkpoint  # frees the optimizer's state
    else:
        refuse_no_model(folder)
        if step is not None:
            raise UsageError(
                f"step {step} of {folder}, which has no steps",
                "--step",
                "leave --step out for a Hugging Face folder",
            )
        weights = open_hub(folder, backend)
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model_from_tensors(weights.config, weights.tensors, device)
    return LoadedLlama(model, tokenizer, weights.hf_config, steps)


def refuse_no_model(folder: Path) -> None:
    if (folder / "run.json").is_file():
        raise UsageError(
            f"the run in {folder} trains a translator",
            str(folder / "run.json"),
            f"try lockstep translate {folder}",
        )
    if not is_hub(folder):
        raise UsageError(
            f"there is no model in {folder}",
            f"neither {MODEL} nor config.json is there",
            "give a folder that lockstep checkpoint import wrote, or one of a Hugging Face model",
        )


def model_from_tensors(
    config: ModelConfig, tensors: Mapping[str, Tensor], device: torch.device
) -> Llama | TransformersModel:
    """Build the model around these tensors, moved to `device` one at a time."""
    model = config.meta_model()
    parameters = dict(model.named_parameters())
    if parameters.keys() != tensors.keys() or any(
        tensors[name].shape != parameter.shape for name, parameter in parameters.items()
    ):
        raise CheckpointError(
            "the checkpoint is not of the model in model.json", MODEL, "import the model again"
        )
    if isinstance(model, Llama):
        model.load_state_dict({name: tensors[name].to(device) for name in tensors}, assign=True)
        return model.requires_grad_(False).eval()
    return materialize(model, device, lambda name, _: tensor_of(name, config, tensors)).eval()


def tensor_of(name: str, config: ModelConfig, tensors: Mapping[str, Tensor]) -> Tensor:
    return config.buffers[name] if name in config.buffers else tensors[name]


@dataclass(frozen=True)
class InitialWeights:
    """Everything that determines the model before its first step.

    start    the weights that training starts from; None: random ones
    lora     None: without adapters
    adapter  the adapters that training starts from; None: new ones
    """

    config: ModelConfig
    seed: int
    start: LlamaWeights | None
    lora: LoraOptions | None
    adapter: Mapping[str, Tensor] | None

    @classmethod
    def of(cls, run: RunConfig, vocab_size: int) -> InitialWeights:
        """UsageError, CheckpointError: `llama.init_from` or `lora.init_from` cannot be read."""
        start = None
        config: ModelConfig
        config = replace(LLAMA_CONFIGS[run.llama.size], vocab_size=vocab_size)
        if run.llama.init_from:
            start = open_weights(Path(run.llama.init_from), backend=run.llama.backend)
            config = start.config
        refuse_other_backend(config, run.llama.backend, run.llama.init_from)
        if run.llama.max_seq_len and isinstance(config, LlamaConfig):
            config = replace(config, max_seq_len=run.llama.max_seq_len)
        if isinstance(config, TransformersConfig):
            config = replace(config, packing=run.data.packing)
        initial = cls(config, run.seed, start, run.lora if run.lora.rank else None, None)
        if not run.lora.init_from:
            return initial
        adapter = lora.open_adapter(Path(run.lora.init_from), initial.meta_model(), run.lora)
        return replace(initial, adapter=adapter)

    def meta_model(self) -> nn.Module:
        model = self.config.meta_model()
        return lora.add_adapters(model, self.lora) if self.lora else model

    def init_param(self, name: str, shape: torch.Size) -> Tensor:
        if lora.is_adapter(name):
            return self.adapter[name] if self.adapter else lora.init_param(name, shape, self.seed)
        if self.start:
            return tensor_of(name, self.config, self.start.tensors)
        return llama.init_param(name, shape, self.config.n_layers, self.seed)

    def is_saved(self, name: str) -> bool:
        return self.lora is None or lora.is_adapter(name)

    def release(self) -> None:
        if self.start:
            self.start.release()

    def to_json(self) -> dict[str, Any]:
        """Return the content of model.json."""
        content: dict[str, Any] = {}
        if self.lora:
            keys = ("rank", "alpha", "targets", "dropout")
            content["lora"] = {key: getattr(self.lora, key) for key in keys}
        if self.start:
            content["start"] = str(self.start.folder)
            content["start_sha256"] = self.start.sha256()
            content["dtype"] = self.start.dtype
        if isinstance(self.config, TransformersConfig):
            return content | {"backend": "transformers", "config": self.config.hf_config}
        token_ids = {"bos_token_id": BEGIN, "eos_token_id": END}
        old = self.start.hf_config if self.start else token_ids
        return content | {"config": config_to_write(self.config, old)}


def write_model_json(initial: InitialWeights, folder: Path) -> str:
    """Write model.json, on rank 0; return the sha256 of the starting weights, "" for random ones.

    CheckpointError: the run there started from other weights.
    """
    content = initial.to_json()
    sha256 = str(content.get("start_sha256", ""))
    if is_llama_run(folder):
        refuse_changed_weights(folder, read_model(folder), sha256)
    else:
        write_json(folder / MODEL, content)
    return sha256
