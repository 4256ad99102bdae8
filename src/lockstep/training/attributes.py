"""Attributes of modules and optimizers, and buffers with persistent=False, as part of the state.

A loop may keep a temperature or a counter there: `model.tau.mul_(0.9)` after the micro-batches.
What differs from its value as constructed is in the checkpoints and is sent to joiners, as
`attributes:json`. So a model whose attributes do not change has the same checkpoint as without.

Not part of the state: what forward passes change (a cache, the last attention), seen in the first
micro-batch loop of a start; what differs between workers, with a warning; other objects than
numbers, strings, tensors, and containers of them, with a warning when the loop changes them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.checkpoint.json_tree import JSON_SUFFIX, encode, pack, unpack
from lockstep.checkpoint.optimizer_state import overrides
from lockstep.parallel.digest import digest_of
from lockstep.runtime.tensor_bytes import as_bytes
from lockstep.runtime.torch_private import OPTIMIZER_FLAGS, non_persistent_buffers, own_buffers
from lockstep.training.saved_state import is_alike
from lockstep.units import join_names

log = logging.getLogger("lockstep")

ATTRIBUTES = "attributes"
MODULE_INTERNALS = frozenset(vars(nn.Module()))
OPTIMIZER_INTERNALS = frozenset(("defaults", "state", "param_groups", *OPTIMIZER_FLAGS))
SHOWN_CHARS = 40  # of a value in a warning
Place = tuple[dict[str, Any], str]  # where an attribute or a buffer is kept: holder[key]


class AttributeValue(NamedTuple):
    """An attribute at a moment. mark: equal for equal values; None: not part of the state."""

    value: Any
    mark: str | None


class Attributes:
    """The attributes of `module`, of optimizers whose state_dict is torch's, and of modules in
    `state`. An object in `state` may name further objects in a dict `attribute_holders`.

    excluded  names that are not part of the state
    """

    def __init__(
        self,
        module: nn.Module | None,
        optimizers: Sequence[torch.optim.Optimizer],
        state: Mapping[str, object] | None = None,
    ) -> None:
        named = () if module is None else (state or {}).items()
        self.module = module
        self.averages = {name: value for name, value in named if isinstance(value, nn.Module)}
        self.optimizers = {
            f"optimizer {i}": o for i, o in enumerate(optimizers) if not overrides(o, "state_dict")
        }
        self.holders = {
            f"session state {name} {key}": holder
            for name, value in named
            if isinstance(holders := getattr(value, "attribute_holders", None), dict)
            for key, holder in holders.items()
        }
        self.excluded: set[str] = set()
        from lockstep.unsaved.other_attributes import OtherAttributes

        self._unnamed: set[str] = set()  # that the loop has changed, and no warning has named
        self._others = OtherAttributes([module, *optimizers], (state or {}).values())
        self.initial = {name: now.mark for name, now in self._snapshots().items()}
        self._before_loop: dict[str, AttributeValue] = {}
        self._watched: dict[str, Place] | None = None  # in later loops than the first
        self._objects: dict[str, Any] = {}  # that these places had before the loop
        self._announced: set[str] = set()

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        for path, module in () if self.module is None else self.module.named_modules():
            yield ".".join(part for part in path.split(".") if part != "_orig_mod"), module
        for name, average in self.averages.items():
            yield from average.named_modules(prefix=f"session state {name}")

    def _holders(self) -> Iterator[tuple[str, dict[str, Any], Collection[str]]]:
        """Yield (path of a module or optimizer, what keeps its attributes, their names)."""
        for path, module in self._modules():
            buffers = own_buffers(module)
            yield path, buffers, non_persistent_buffers(module) & buffers.keys()
            yield path, vars(module), vars(module).keys() - MODULE_INTERNALS
        for path, optimizer in self.optimizers.items():
            yield path, vars(optimizer), vars(optimizer).keys() - OPTIMIZER_INTERNALS
        for path, holder in self.holders.items():
            yield path, vars(holder), vars(holder).keys()

    def _places(self) -> dict[str, Place]:
        return {
            f"{path}.{key}".lstrip("."): (holder, key)
            for path, holder, keys in self._holders()
            for key in keys
        }

    def _snapshots(self) -> dict[str, AttributeValue]:
        weights = self._weight_storages()
        return {
            name: AttributeValue(holder[key], mark_of(holder[key], weights))
            for name, (holder, key) in self._places().items()
        }

    def of_state(self, name: str) -> dict[str, str | None]:
        """Return the marks of a module in `state`. A metric of torchmetrics has no other state."""
        start = f"session state {name}."
        return {path: now.mark for path, now in self._snapshots().items() if path.startswith(start)}

    def _weight_storages(self) -> set[int]:
        """Return the addresses of what checkpoints hold as weights: views of it are not state."""
        tensors = [
            tensor
            for _, module in self._modules()
            for tensor in (*module.parameters(recurse=False), *persistent_buffers(module))
        ]
        return {
            tensor.untyped_storage().data_ptr()
            for tensor in tensors
            if type(tensor) in (Tensor, nn.Parameter)
        }

    # -- what forward passes change ----------------------------------------------------------------

    def begin_loop(self) -> None:
        """Take the attributes before a micro-batch loop; in later ones than the first only which
        objects they are."""
        if self._watched is None:
            self._before_loop = self._snapshots()
            self._changed_others(self._before_loop)
        watched = self._watched or {}
        self._objects = {name: holder.get(key) for name, (holder, key) in watched.items()}

    def end_loop(self, followed: Collection[str] = ()) -> None:
        """Exclude what the micro-batch loop has changed, except buffers that follow the
        micro-batches on all workers alike."""
        if self._watched is None:
            now = self._snapshots()
            changed = changes(self._before_loop, now) | self._changed_others(now)
            self._exclude(changed, followed)
            self._before_loop = {}
            self._watched = {
                name: place
                for name, place in self._places().items()
                if self.initial.get(name) and name not in self.excluded
            }
            return
        places = self._watched.items()
        replaced = {
            name for name, (holder, key) in places if holder.get(key) is not self._objects[name]
        }
        self._objects = {}
        lost = sorted(n for n in replaced - self.excluded if n.startswith("session state "))
        if lost:
            log.warning(
                "the micro-batch loop changes what it did not change in the first step: %s. No "
                "checkpoint holds it, and each worker has that of its own micro-batches: change it "
                "after the loop, by a value that is equal on all workers",
                join_names(lost),
            )
        self._exclude(replaced, followed)

    def _changed_others(self, snapshots: Mapping[str, AttributeValue]) -> set[str]:
        """Return the attributes that no checkpoint can hold and that have changed since the newest
        call."""
        return self._others.look(
            {
                name: now.value
                for name, now in snapshots.items()
                if now.mark is None and name not in self.excluded and not is_encodable(now.value)
            }
        )

    def _exclude(self, names: set[str], followed: Collection[str] = ()) -> None:
        self.excluded |= names - set(followed)

    @contextmanager
    def unsaved_changes(self) -> Iterator[None]:
        """Context manager: exclude what is changed inside, such as the scores of an evaluation."""
        before = self._snapshots()
        self._unnamed |= self._changed_others(before)
        yield
        now = self._snapshots()
        self._exclude(changes(before, now) | self._changed_others(now))

    # -- the state ---------------------------------------------------------------------------------

    def changed(self) -> dict[str, AttributeValue]:
        """Return by name what differs from its value as constructed."""
        return {
            name: now
            for name, now in sorted(self._snapshots().items())
            if name not in self.excluded and now.mark not in (None, self.initial.get(name, ""))
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Return the changed attributes as tensors; {} if there are none."""
        changed = {name: now.value for name, now in self.changed().items()}
        return pack(ATTRIBUTES, changed) if changed else {}

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Set the saved attributes, tensors in place if they have the saved shape and dtype. Warn
        of those of objects that do not exist."""
        saved = unpack(ATTRIBUTES, tensors) if f"{ATTRIBUTES}{JSON_SUFFIX}" in tensors else {}
        holders = {path: holder for path, holder, _ in self._holders()}
        places = self._places()
        unknown = [name for name in saved if name.rpartition(".")[0] not in holders]
        if unknown:
            log.warning(
                "the checkpoint has attributes of objects that this run lacks: %s",
                join_names(unknown),
            )
        for name, value in saved.items():
            path, _, key = name.rpartition(".")
            if name in unknown:
                continue
            holder, _ = places.get(name, (holders[path], key))
            current = holder.get(key)
            if isinstance(value, Tensor):
                is_tensor = isinstance(current, Tensor)
                if is_tensor and is_alike(current, value):
                    current.copy_(value)
                    continue
                value = value.to(current.device if is_tensor else device)
            holder[key] = value

    def announce(self) -> None:
        """Log once of each attribute that changes whether checkpoints hold it."""
        if new := sorted(self.changed().keys() - self._announced):
            self._announced |= set(new)
            log.info("checkpoints hold attributes that change between steps: %s", join_names(new))
        self._unnamed |= self._changed_others(self._snapshots())
        self._others.warn_of(self._unnamed - self.excluded)
        self._unnamed = set()

    # -- the same on all workers -------------------------------------------------------------------

    def describe(self) -> list[Any]:
        """Return what `agree` needs of this worker, as JSON."""
        return [{name: now.mark for name, now in self.changed().items()}, sorted(self.excluded)]

    def agree(self, described: Sequence[list[Any] | None]) -> None:
        """Exclude what differs between the workers, or is excluded on one of them. None: of a
        worker without the state."""
        states = [answer for answer in described if answer]
        marks = [own for own, _ in states]
        self.excluded |= {name for _, excluded in states for name in excluded}
        names = {name for own in marks for name in own} - self.excluded
        differing = sorted(name for name in names if len({own.get(name) for own in marks}) > 1)
        self.excluded |= set(differing)
        if differing:
            first = {own.get(differing[0], "as constructed")[:SHOWN_CHARS] for own in marks}
            log.warning(
                "attributes differ between the workers, and no checkpoint holds them: %s (%s: "
                "%s); if forward passes depend on them, the workers train different models: "
                "change them after the micro-batch loop, on all workers alike",
                join_names(differing),
                differing[0],
                ", ".join(sorted(first)),
            )


def persistent_buffers(module: nn.Module) -> list[Tensor]:
    unsaved = non_persistent_buffers(module)
    buffers = own_buffers(module).items()
    return [b for name, b in buffers if b is not None and name not in unsaved]


def changes(before: Mapping[str, AttributeValue], after: Mapping[str, AttributeValue]) -> set[str]:
    """Return the attributes that have another value, or are another tensor: weight_norm replaces
    the weight in each forward pass, in the first one by an equal tensor."""

    return {
        name
        for name, now in after.items()
        if (old := before.get(name)) is None
        or old.mark != now.mark
        or (isinstance(now.value, Tensor) and now.value is not old.value)
    }


def is_encodable(value: Any) -> bool:
    try:
        encode(value, "", {})
    except Exception:  # a value of any class
        return False
    return True


def mark_of(value: Any, weights: Collection[int]) -> str | None:
    """Return a text that is equal for equal values; None for a value that is not part of the
    state."""
    tensors: dict[str, Tensor] = {}
    try:
        text = json.dumps(encode(value, "", tensors))
        if any(
            type(t) is not Tensor or t.untyped_storage().data_ptr() in weights
            for t in tensors.values()
        ):
            return None
        if tensors:
            text += (
                f" {[(str(t.dtype), *t.shape) for t in tensors.values()]} "
                f"{digest_of(as_bytes(t) for t in tensors.values())}"
            )
    except Exception:  # a value of any class: other byte orders, nested tensors, conjugate views
        return None
    return text if len(text) <= SHOWN_CHARS else hashlib.sha256(text.encode()).hexdigest()
