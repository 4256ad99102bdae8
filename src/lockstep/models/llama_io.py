"""Llama models between Hugging Face folders, run folders and memory.

A run folder of a Llama:

    model.json      {"shape": {...}, "config": the config.json that it came with, or null,
                     "lora": {"rank", "alpha", "targets"} of a run that trains adapters,
                     "start", "start_sha256", "dtype": what it began with; export writes that dtype again}
    tokenizer/      tokenizer.json, the chat template, generation_config.json, ... as they came
    checkpoints/    step 0 is what was imported

Adapters are merged into the weights whenever a model is read for use, to export it, or to begin another run with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint import commands, commit
from lockstep.checkpoint import folder as seal
from lockstep.checkpoint import shards as parts
from lockstep.checkpoint.state_dict import digest, tensor_of
from lockstep.checkpoint.store import Store
from lockstep.errors import CheckpointError, DataError, UsageError
from lockstep.files import read_json, write_atomic, write_json
from lockstep.models.hub import SHARD_BYTES, Hub, Place, Tensors, is_hub, open_hub, shape_from_json, shape_to_json, write_hub
from lockstep.models.llama import Llama, Shape
from lockstep.models.lora import Lora, Merged, is_adapter
from lockstep.units import show_bytes, show_count

log = logging.getLogger("lockstep")

MODEL, TOKENIZER, CHECKPOINTS = "model.json", "tokenizer", "checkpoints"


def is_run(folder: Path) -> bool:
    """Whether it is the run folder of a Llama."""
    return (folder / MODEL).is_file()


def read_model(folder: Path) -> tuple[Shape, dict[str, Any]]:
    """(the shape of the run's model, the config.json that it came with or {}). DataError when model.json is damaged."""
    try:
        value = read_json(folder / MODEL)
        return shape_from_json(value["shape"]), dict(value["config"] or {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, CheckpointError) as error:
        raise DataError(f"{MODEL} cannot be read: {error}", str(folder / MODEL), "import the model again") from error


# -- in and out -------------------------------------------------------------------------------------------------------


def import_hub(source: Path, folder: Path) -> str:
    """Make `folder` a run whose checkpoint of step 0 is the model in the Hugging Face folder `source`; a line that says so.

    The checkpoint is committed last; the same import again changes nothing. Memory: one tensor.
    UsageError: there is another run in `folder`. CheckpointError: the source is damaged, the target cannot be written.
    """
    hub = open_hub(source)
    model = {"shape": shape_to_json(hub.shape), "config": hub.config}
    refuse_other(folder, model)
    tensors = Tensors({f"model.{name}": renamed(place, f"model.{name}") for name, place in hub.tensors.places.items()})
    size = sum(place.spec.bytes for place in tensors.places.values())
    with commit.writing(f"{folder} was not written", existing(folder), size):
        (folder / TOKENIZER).mkdir(parents=True, exist_ok=True)
        for path in hub.carried:
            write_atomic(folder / TOKENIZER / path.name, path.read_bytes())
        write_json(folder / MODEL, model)
    Store(folder / CHECKPOINTS).save(0, tensors, {"imported": source.name})
    return f"step 0: {len(tensors)} tensors, {show_count(hub.shape.parameters)} parameters, {show_bytes(size)}, written to {folder}"


def refuse_other(folder: Path, model: Mapping[str, Any]) -> None:
    """UsageError when something else than this model as it was imported is in `folder`."""
    hint = "name another folder with --out; nothing was changed"
    if (folder / "run.json").exists() or (is_run(folder) and read_json(folder / MODEL) != model):
        raise UsageError(f"there is another run in {folder}", "--out", hint)
    if later := [step for step in seal.committed_steps(folder / CHECKPOINTS) if step > 0]:
        raise UsageError(f"the run in {folder} is at step {max(later)} already", "--out", hint)


def export_run(folder: Path, step: int | None, target: Path, shard_bytes: int = SHARD_BYTES, dtype: str = "") -> str:
    """Write one checkpoint of a Llama's run (None: the newest) as a Hugging Face folder; a line that says so.

    dtype  of the numbers, as torch spells it; "": that of the model which the run began with
    The checkpoint is verified first. Memory: one tensor.
    """
    shape, config = read_model(folder)
    spelled = dtype or read_json(folder / MODEL).get("dtype", "")
    kind = getattr(torch, str(spelled), None) if spelled else None
    if spelled and not isinstance(kind, torch.dtype):
        raise DataError(f"{MODEL} names the dtype {spelled!r}", str(folder / MODEL), "give one with --dtype")
    with commands.verified(folder, step) as (found, _):
        saved = merged(folder, saved_in_run(folder, found))
        tensors = Lazy(saved, lambda name: cast(name, saved[name], kind)) if isinstance(kind, torch.dtype) else saved
        carried = sorted((folder / TOKENIZER).iterdir()) if (folder / TOKENIZER).is_dir() else []
        files = write_hub(target, shape, tensors, config=config or None, carried=carried, shard_bytes=shard_bytes)
        size = sum(tensors[name].nbytes for name in tensors)
    how = f"{len(files)} files" if len(files) > 1 else "1 file"
    return f"step {found}: {len(tensors)} tensors, {show_bytes(size)} in {how}, written to {target}"


class Lazy(Mapping[str, Tensor]):
    """Tensors by name, each made when it is asked for."""

    def __init__(self, names: Iterable[str], tensor: Callable[[str], Tensor]) -> None:
        self.names, self.tensor = dict.fromkeys(names), tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in another type of numbers. CheckpointError when a number is beyond that type."""
    found = tensor.to(dtype)
    if dtype != tensor.dtype and tensor.isfinite().all() and not found.isfinite().all():
        what = f"{name} has numbers up to {tensor.abs().max():g}, beyond {str(dtype).removeprefix('torch.')}"
        raise CheckpointError(what, "--dtype", "give another --dtype")
    return found


def saved_in_run(folder: Path, step: int) -> Lazy:
    """The model's tensors in a run's checkpoint, by our names: each is mapped, or put together from its pieces. Nothing is verified."""
    stored = parts.tensors_at(commands.checkpoints_in(folder) / seal.folder_name(step), step)
    model = {name.removeprefix("model."): one for name, one in stored.items() if name.startswith("model.")}
    return Lazy(model, lambda name: tensor_of(model[name].spec, model[name].data()))


def merged(folder: Path, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The weights of a run's model: those in its checkpoint, and where these are adapters, what they adapt with them added."""
    about = read_json(folder / MODEL)
    if not about.get("lora"):
        return tensors
    lora = Lora(about["lora"]["rank"], about["lora"]["alpha"], tuple(about["lora"]["targets"]))
    if any(not is_adapter(name) for name in tensors):
        return Merged({}, tensors, lora)
    base = open_weights(Path(about["start"]))
    if (now := base.sha256()) != about["start_sha256"]:
        raise other_start(folder, about["start"], about["start_sha256"], now)
    return Merged(base.tensors, tensors, lora)


def other_start(folder: Path, start: str, begun: str, now: str) -> CheckpointError:
    return CheckpointError(
        f"the weights in {start} are not those that the run in {folder} began with",
        f"sha256 {now}\nwas    {begun}",
        "put the folder back as it was; a run with llama.start needs it as long as its checkpoints hold adapters alone",
    )


@dataclass(frozen=True)
class Weights:
    """The Llama in a folder, its tensors by our names: each is read when it is asked for. `carried`: the files of its tokenizer.

    `dtype`: of the numbers that it was published in, as torch spells it.
    """

    folder: Path
    shape: Shape
    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    carried: list[Path]
    dtype: str

    def sha256(self) -> str:
        """Of names, types, shapes and bytes of all tensors. Reads them all; memory: one of them."""
        return digest(self.tensors)


def open_weights(folder: Path, step: int | None = None) -> Weights:
    """The Llama in a run's folder (at `step`, default: the newest checkpoint, which is verified) or in a Hugging Face folder.

    UsageError: there is none. CheckpointError: it is damaged. Memory: none to speak of until tensors are asked for.
    """
    if is_run(folder):
        shape, config = read_model(folder)
        with commands.verified(folder, step) as (found, _):
            tensors = merged(folder, saved_in_run(folder, found))
        dtype = read_json(folder / MODEL).get("dtype") or dtype_of(tensors)
        return Weights(folder, shape, config, tensors, sorted((folder / TOKENIZER).iterdir()), dtype)
    refuse_no_model(folder)
    hub = open_hub(folder)
    return Weights(folder, hub.shape, hub.config, hub.tensors, hub.carried, dtype_of(hub.tensors))


def dtype_of(tensors: Mapping[str, Tensor]) -> str:
    """What the numbers of a model are, as torch spells it."""
    return str(next(iter(tensors.values())).dtype).removeprefix("torch.")


def renamed(place: Place, name: str) -> Place:
    return place._replace(spec=place.spec._replace(name=name))


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there: where its room on the disk can be asked."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


# -- for use ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pretrained:
    """A model in evaluation mode with where its tokenizer is, what its config.json says, and the run's step (0: not of a run)."""

    model: Llama
    tokenizer: Path
    config: dict[str, Any]
    step: int


def load(folder: Path, step: int | None = None, *, device: torch.device | None = None) -> Pretrained:
    """The Llama in a run's folder (as it was at `step`; default: the newest whole checkpoint) or in a Hugging Face folder.

    device  default: the GPU if there is one
    Memory: the weights once. Those of a Hugging Face folder on a CPU stay mapped, and are read when they are used first.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if is_run(folder):
        shape, config = read_model(folder)
        store = Store(folder / CHECKPOINTS)
        found = store.load_newest() if step is None else store.load(step)
        if found is None:
            raise CheckpointError("there is no checkpoint yet", str(store.folder), "import the model again")
        tensors = {name.removeprefix("model."): found.tensors[name] for name in found.tensors if name.startswith("model.")}
        found.tensors.clear()
        return Pretrained(filled(shape, merged(folder, tensors), device), folder / TOKENIZER, config, found.step)
    refuse_no_model(folder)
    if step is not None:
        raise UsageError(f"step {step} of {folder}, which has no steps", "--step", "leave --step out for a Hugging Face folder")
    hub: Hub = open_hub(folder)
    return Pretrained(filled(hub.shape, hub.tensors, device), folder, hub.config, 0)


def refuse_no_model(folder: Path) -> None:
    """UsageError when `folder` is no Hugging Face folder."""
    if (folder / "run.json").is_file():
        raise UsageError(f"the run in {folder} trains a translator", str(folder / "run.json"), f"try lockstep translate {folder}")
    if not is_hub(folder):
        hint = "give a folder that lockstep checkpoint import wrote, or one of a Hugging Face model"
        raise UsageError(f"there is no model in {folder}", f"neither {MODEL} nor config.json is there", hint)


def filled(shape: Shape, tensors: Mapping[str, Tensor], device: torch.device) -> Llama:
    """The model with these very tensors as its parameters, moved to `device` one at a time."""
    with torch.device("meta"):
        model = Llama(shape)
    names = {name: parameter.shape for name, parameter in model.named_parameters()}
    if names.keys() != tensors.keys() or any(tensors[name].shape != size for name, size in names.items()):
        raise CheckpointError("the checkpoint is not of the model in model.json", MODEL, "import the model again")
    for name in names:
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, nn.Parameter(tensors[name].to(device), requires_grad=False))
    return model.eval()
