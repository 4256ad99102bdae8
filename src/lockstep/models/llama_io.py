"""Import, export and load Llama models: Hugging Face folders, run folders, memory; the initial
weights of a run.

A run folder of a Llama:

    model.json      {"shape": the fields of LlamaConfig, "config": its config.json, or null,
                     "lora": {"rank", "alpha", "targets", "dropout"} of a run that trains adapters,
                     "start", "start_sha256", "dtype": of its starting weights}
    tokenizer/      tokenizer.json, chat template, generation_config.json, ... as imported
    checkpoints/    step 0 is the imported model

Initial weights are random from the seed, or loaded; with or without adapters. Adapters are merged
into the weights whenever a model is loaded, exported or started from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
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
from lockstep.files import read_json, write_atomic, write_json
from lockstep.models import llama, lora
from lockstep.models.hf_config import config_from_json, config_to_hf
from lockstep.models.hub import (
    CONFIG_FILE,
    SHARD_BYTES,
    LazyTensors,
    LlamaWeights,
    dtype_of,
    is_hub,
    open_hub,
    write_hub,
)
from lockstep.models.llama import Llama
from lockstep.models.llama_config import LLAMA_CONFIGS, LlamaConfig
from lockstep.models.lora import is_adapter, merged_weights
from lockstep.models.transformers_model import TransformersConfig, TransformersModel
from lockstep.parallel.materialize import materialize
from lockstep.units import format_bytes, format_count

MODEL, TOKENIZER, CHECKPOINTS = "model.json", "tokenizer", "checkpoints"


def is_llama_run(folder: Path) -> bool:
    return (folder / MODEL).is_file()


def read_model(folder: Path) -> tuple[LlamaConfig | TransformersConfig, dict[str, Any]]:
    """Read model.json: (config, its config.json or {}). DataError: it is damaged. CheckpointError:
    the run has not written it yet, or is of another model."""
    try:
        value = read_json(folder / MODEL)
        if value.get("backend") == "transformers":
            return TransformersConfig(dict(value["config"])), dict(value["config"])
        return config_from_json(value["shape"]), dict(value["config"] or {})
    except FileNotFoundError:
        what = f"there is no {MODEL}: the run has not started to train, or its model is no Llama"
        hint = "wait for its first save; without --adapter, export also writes the weights of other models"
        raise CheckpointError(what, str(folder), hint) from None
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
        CheckpointError,
    ) as error:
        raise DataError(
            f"{MODEL} cannot be read: {error}", str(folder / MODEL), "import the model again"
        ) from error


# -- import, export --------------------------------------------------------------------------------


def refuse_other_backend(
    config: LlamaConfig | TransformersConfig, backend: str, folder: str
) -> None:
    """UsageError: the run in `folder` has another backend than the one that starts from it."""
    if isinstance(config, TransformersConfig) != (backend == "transformers"):
        what = f"llama.backend is {backend}, but the run in {folder} has another"
        raise UsageError(
            what,
            "llama.backend",
            "set the llama.backend of that run, or export it and start from the export",
        )


def import_hub(source: Path, folder: Path) -> str:
    """Import the Hugging Face folder `source` into a new run folder; return a line for the user.

    The checkpoint of step 0 is committed last; importing again changes nothing. Memory: one tensor.
    UsageError: `folder` holds another run. CheckpointError: damaged source, or unwritable target.
    """
    hub = open_hub(source)
    model = {"shape": asdict(hub.config), "config": hub.hf_config}
    refuse_other_run(folder, model)
    tensors = LazyTensors(
        [f"model.{name}" for name in hub.tensors],
        lambda name: hub.tensors[name.removeprefix("model.")],
    )
    size = sum(tensor.nbytes for tensor in tensors.values())
    existing = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir()
    )
    with commit.explain_write_errors(f"{folder} was not written", existing, size):
        (folder / TOKENIZER).mkdir(parents=True, exist_ok=True)
        for path in hub.companions:
            write_atomic(folder / TOKENIZER / path.name, path.read_bytes())
        write_json(folder / MODEL, model)
    CheckpointStore(folder / CHECKPOINTS).save(0, tensors, {"imported": source.name})
    assert isinstance(hub.config, LlamaConfig)
    count = format_count(hub.config.num_parameters)
    return f"step 0: {len(tensors)} tensors, {count} parameters, {format_bytes(size)}, written to {folder}"


def refuse_other_run(folder: Path, model: Mapping[str, Any]) -> None:
    """UsageError: `folder` holds another run, or this model after step 0."""
    hint = "name another folder with --out; nothing was changed"
    if (folder / "run.json").exists() or (
        is_llama_run(folder) and read_json(folder / MODEL) != model
    ):
        raise UsageError(f"there is another run in {folder}", "--out", hint)
    if later := [step for step in committed_steps(folder / CHECKPOINTS) if step > 0]:
        raise UsageError(f"the run in {folder} is at step {max(later)} already", "--out", hint)


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
    config, hf_config = read_model(folder)
    peft_config = peft_config_of(folder) if adapter else None
    dtype_name = dtype or ("" if adapter else read_json(folder / MODEL).get("dtype", ""))
    torch_dtype: Any = getattr(torch, str(dtype_name), None) if dtype_name else None
    if dtype_name and not isinstance(torch_dtype, torch.dtype):
        raise DataError(
            f"{MODEL} names the dtype {dtype_name!r}", str(folder / MODEL), "give one with --dtype"
        )
    with commands.open_verified(folder, step) as (newest_step, opened):
        stored = model_tensors(opened)
        saved = (
            LazyTensors(filter(is_adapter, stored), stored.__getitem__)
            if adapter
            else merge_adapters(folder, stored)
        )
        tensors = (
            LazyTensors(saved, lambda name: cast_tensor(name, saved[name], torch_dtype))
            if torch_dtype
            else saved
        )
        companions = (
            sorted((folder / TOKENIZER).iterdir())
            if (folder / TOKENIZER).is_dir() and not adapter
            else []
        )
        options: dict[str, Any] = {
            "companions": companions,
            "shard_bytes": shard_bytes,
            "adapter": peft_config,
        }
        files = write_hub(target, config, tensors, hf_config=hf_config or None, **options)
        size = sum(tensors[name].nbytes for name in tensors)
    how = f"{len(files)} files" if len(files) > 1 else "1 file"
    return f"step {newest_step}: {len(tensors)} tensors, {format_bytes(size)} in {how}, written to {target}"


def peft_config_of(folder: Path) -> dict[str, Any]:
    """Return the adapter_config.json of a run. UsageError: its adapters do not fit a model of
    PEFT."""
    model_json = read_json(folder / MODEL)
    if (lora := lora_of(model_json)) is None:
        raise UsageError(
            f"the run in {folder} trains no adapters",
            "--adapter",
            "leave --adapter out to export its weights",
        )
    base = Path(model_json["start"])
    if is_hub(base) and read_json(base / CONFIG_FILE).get("model_type") == "phi3":
        what = f"{base} packs query, key and value in one matrix, and the adapters of the run are of each"
        raise UsageError(what, "--adapter", "leave --adapter out to export the merged weights")
    return adapter_config(lora, str(base))


def lora_of(model_json: Mapping[str, Any]) -> LoraOptions | None:
    lora = model_json.get("lora")
    return LoraOptions(**{**lora, "targets": tuple(lora["targets"])}) if lora else None


def cast_tensor(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor. CheckpointError: a value overflows `dtype`."""
    converted = tensor.to(dtype)
    if dtype != tensor.dtype and tensor.isfinite().all() and not converted.isfinite().all():
        what = f"{name} has values up to {tensor.abs().max():g}, which overflow {str(dtype).removeprefix('torch.')}"
        raise CheckpointError(what, "--dtype", "give another --dtype")
    return converted


def model_tensors(stored: StoredTensors) -> LazyTensors:
    """Return the model's tensors in an open checkpoint, each read on access."""
    model = inference_weights(stored)
    return LazyTensors(model, lambda name: tensor_from_bytes(model[name].spec, model[name].data()))


def merge_adapters(folder: Path, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the weights of a run, with adapters merged into the base model."""
    model_json = read_json(folder / MODEL)
    if (lora := lora_of(model_json)) is None:
        return tensors
    base = open_weights(Path(model_json["start"]))
    if (current := base.sha256()) != model_json["start_sha256"]:
        raise weights_changed_error(
            folder, model_json["start"], model_json["start_sha256"], current
        )
    return merged_weights(base.tensors, tensors, lora)


def weights_changed_error(folder: Path, start: str, expected: str, current: str) -> CheckpointError:
    return CheckpointError(
        f"the weights in {start} have changed since the run in {folder} started from them",
        f"sha256 {current}\nwas    {expected}",
        "restore that folder; a run with llama.init_from needs it as long as its checkpoints hold adapters alone",
    )


def open_weights(folder: Path, backend: str = "lockstep") -> LlamaWeights:
    """Open the model in a run folder (the newest, verified) or Hugging Face folder.

    UsageError: there is none. CheckpointError: it is damaged.
    """
    if is_llama_run(folder):
        config, hf_config = read_model(folder)
        with commands.open_verified(folder, None) as (_, opened):
            tensors = merge_adapters(folder, model_tensors(opened))
        dtype = read_json(folder / MODEL).get("dtype") or dtype_of(tensors)
        return LlamaWeights(
            folder, config, hf_config, tensors, sorted((folder / TOKENIZER).iterdir()), dtype
        )
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
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if is_llama_run(folder):
        config, hf_config = read_model(folder)
        store = CheckpointStore(folder / CHECKPOINTS)
        checkpoint = store.load_newest() if step is None else store.load(step)
        if checkpoint is None:
            raise CheckpointError(
                "there is no checkpoint yet", str(store.folder), "import the model again"
            )
        tensors = inference_weights(checkpoint.tensors)
        newest_step = checkpoint.step
        del checkpoint  # frees the optimizer's state
        model = model_from_tensors(config, merge_adapters(folder, tensors), device)
        return LoadedLlama(model, folder / TOKENIZER, hf_config, (newest_step,))
    refuse_no_model(folder)
    if step is not None:
        raise UsageError(
            f"step {step} of {folder}, which has no steps",
            "--step",
            "leave --step out for a Hugging Face folder",
        )
    hub = open_hub(folder, backend)
    return LoadedLlama(
        model_from_tensors(hub.config, hub.tensors, device), folder, hub.hf_config, (0,)
    )


def refuse_no_model(folder: Path) -> None:
    if (folder / "run.json").is_file():
        raise UsageError(
            f"the run in {folder} trains a translator",
            str(folder / "run.json"),
            f"try lockstep translate {folder}",
        )
    if not is_hub(folder):
        hint = "give a folder that lockstep checkpoint import wrote, or one of a Hugging Face model"
        raise UsageError(
            f"there is no model in {folder}", f"neither {MODEL} nor config.json is there", hint
        )


def model_from_tensors(
    config: LlamaConfig | TransformersConfig, tensors: Mapping[str, Tensor], device: torch.device
) -> Llama | TransformersModel:
    """Build the model around these tensors, moved to `device` one at a time."""
    model = config.meta_model()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    if shapes.keys() != tensors.keys() or any(
        tensors[name].shape != shape for name, shape in shapes.items()
    ):
        raise CheckpointError(
            "the checkpoint is not of the model in model.json", MODEL, "import the model again"
        )
    if isinstance(config, TransformersConfig):
        return materialize(
            model,
            device,
            lambda name, _: config.buffers[name] if name in config.buffers else tensors[name],
        ).eval()
    for name in shapes:
        path, _, leaf = name.rpartition(".")
        setattr(
            model.get_submodule(path),
            leaf,
            nn.Parameter(tensors[name].to(device), requires_grad=False),
        )
    return model.eval()


@dataclass(frozen=True)
class InitialWeights:
    """Everything that determines the model before its first step.

    start    the weights that training starts from; None: random ones
    lora     None: without adapters
    adapter  the adapters that training starts from; None: new ones
    """

    config: LlamaConfig | TransformersConfig
    seed: int
    start: LlamaWeights | None
    lora: LoraOptions | None
    adapter: Mapping[str, Tensor] | None

    @classmethod
    def of(cls, run: RunConfig, vocab_size: int) -> InitialWeights:
        """UsageError, CheckpointError: `llama.init_from` or `lora.init_from` cannot be read."""
        start = (
            open_weights(Path(run.llama.init_from), backend=run.llama.backend)
            if run.llama.init_from
            else None
        )
        config = (
            start.config if start else replace(LLAMA_CONFIGS[run.llama.size], vocab_size=vocab_size)
        )
        refuse_other_backend(config, run.llama.backend, run.llama.init_from)
        if run.llama.max_seq_len and isinstance(config, LlamaConfig):
            config = replace(config, max_seq_len=run.llama.max_seq_len)
        initial = cls(config, run.seed, start, run.lora if run.lora.rank else None, None)
        if not run.lora.init_from:
            return initial
        return replace(
            initial,
            adapter=lora.open_adapter(Path(run.lora.init_from), initial.meta_model(), run.lora),
        )

    def meta_model(self) -> nn.Module:
        model = self.config.meta_model()
        return lora.add_adapters(model, self.lora) if self.lora else model

    def init_param(self, name: str, shape: torch.Size) -> Tensor:
        if lora.is_adapter(name):
            return self.adapter[name] if self.adapter else lora.init_param(name, shape, self.seed)
        if isinstance(self.config, TransformersConfig) and name in self.config.buffers:
            return self.config.buffers[name]
        if self.start:
            return self.start.tensors[name]
        return llama.init_param(name, shape, self.config.n_layers, self.seed)

    def is_saved(self, name: str) -> bool:
        return self.lora is None or lora.is_adapter(name)

    def to_json(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "lora": self.lora
            and {key: getattr(self.lora, key) for key in ("rank", "alpha", "targets", "dropout")}
        }
        if self.start:
            content |= {
                "start": str(self.start.folder),
                "start_sha256": self.start.sha256(),
                "dtype": self.start.dtype,
            }
            content |= {"config": self.start.hf_config}
        if isinstance(self.config, TransformersConfig):
            return {"backend": "transformers", **content}
        new = config_to_hf(self.config) | {"bos_token_id": BEGIN, "eos_token_id": END}
        return {"shape": asdict(self.config), "config": new, **content}


def write_model_json(initial: InitialWeights, folder: Path) -> str:
    """Write model.json, on rank 0; return the sha256 of the starting weights, "" for random ones.

    CheckpointError: the run there started from other weights.
    """
    content = initial.to_json()
    if is_llama_run(folder):
        was, now = read_json(folder / MODEL).get("start_sha256"), content.get("start_sha256")
        if was != now:
            raise weights_changed_error(folder, str(content.get("start")), str(was), str(now))
    else:
        write_json(folder / MODEL, content)
    return str(content.get("start_sha256", ""))
