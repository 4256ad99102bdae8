"""Attributes of modules and optimizers, and buffers with persistent=False, as part of the state.

A loop may keep a temperature or a counter there: `model.tau.mul_(0.9)` after the micro-batches.
What differs from its value as constructed is in the checkpoints and is sent to joiners, as
`attributes:json`. So a model whose attributes do not change has the same checkpoint as without.

Not part of the state: what forward passes change (a cache, the last attention), seen in the first
micro-batch loop of a start; what differs between workers, with a warning; other objects than
numbers, strings, tensors, and containers of them.
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

from lockstep.checkpoint.json_tree import encode, pack, unpack
from lockstep.checkpoint.optimizer_state import overrides
from lockstep.parallel.digest import digest_of
from lockstep.runtime.tensor_bytes import as_bytes
from lockstep.runtime.torch_private import OPTIMIZER_FLAGS, non_persistent_buffers, own_buffers
from lockstep.units import join_names

log = logging.getLogger("lockstep")

ATTRIBUTES = "attributes"
MODULE_INTERNALS = frozenset(vars(nn.Module()))
OPTIMIZER_INTERNALS = frozenset(("defaults", "state", "param_groups", *OPTIMIZER_FLAGS))
SHOWN_CHARS = 40  # of a value in a warning


class Holder(NamedTuple):
    """Where an attribute or a buffer is kept: holder[key]."""

    holder: dict[str, Any]
    key: str


class AttributeValue(NamedTuple):
    """An attribute at a moment. mark: equal for equal values; None: not part of the state."""

    value: Any
    mark: str | None


class Attributes:
    """The attributes of `module`, of optimizers whose state_dict is torch's, and of modules in
    `state`.

    excluded  names that are not part of the state
    """

    def __init__(
        self,
        module: nn.Module | None,
        optimizers: Sequence[torch.optim.Optimizer],
        state: Mapping[str, object] | None = None,
    ) -> None:
        self.module = module
        self.averages = {
            name: value for name, value in (state or {}).items() if isinstance(value, nn.Module)
        }
        self.optimizers = {
            f"optimizer {i}": o for i, o in enumerate(optimizers) if not overrides(o, "state_dict")
        }
        self.excluded: set[str] = set()
        self.initial = {name: snapshot.mark for name, snapshot in self._snapshots()}
        self._before_loop: dict[str, AttributeValue] | None = None
        self._is_observed = False
        self._announced: set[str] = set()
        self._watched: list[tuple[str, Holder]] = []  # in later loops
        self._identities: list[tuple[str, Holder, Any]] = []

    def _places(self) -> Iterator[tuple[str, Holder]]:
        for path, module in self._modules():
            for key in vars(module).keys() - MODULE_INTERNALS:
                yield f"{path}.{key}".lstrip("."), Holder(vars(module), key)
            for key in non_persistent_buffers(module) & own_buffers(module).keys():
                yield f"{path}.{key}".lstrip("."), Holder(own_buffers(module), key)
        for path, optimizer in self.optimizers.items():
            for key in vars(optimizer).keys() - OPTIMIZER_INTERNALS:
                yield f"{path}.{key}", Holder(vars(optimizer), key)

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        for path, module in self.module.named_modules() if self.module else ():
            yield ".".join(part for part in path.split(".") if part != "_orig_mod"), module
        for name, average in self.averages.items() if self.module else ():
            yield from average.named_modules(prefix=f"session state {name}")

    def _snapshots(self) -> Iterator[tuple[str, AttributeValue]]:
        weights = self._weight_storages()
        for name, (holder, key) in self._places():
            yield name, AttributeValue(holder[key], mark_of(holder[key], weights))

    def _weight_storages(self) -> set[int]:
        """Return the addresses of what checkpoints hold as weights: views of it are not state."""
        modules = [self.module, *self.averages.values()] if self.module else []
        tensors = [
            tensor
            for module in modules
            for tensor in (*module.parameters(), *persistent_buffers(module))
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
        if not self._is_observed:
            self._before_loop = dict(self._snapshots())
        self._identities = [
            (name, place, place.holder.get(place.key)) for name, place in self._watched
        ]

    def end_loop(self, followed: Collection[str] = ()) -> None:
        """Exclude what the micro-batch loop has changed, except buffers that follow the
        micro-batches on all workers alike."""
        replaced = {
            name
            for name, place, before in self._identities
            if place.holder.get(place.key) is not before
        }
        self._identities = []
        self.excluded |= replaced - set(followed)
        if self._before_loop is not None:
            self._exclude_changes(self._before_loop, followed)
            self._before_loop, self._is_observed = None, True
            self._watched = [
                (name, place)
                for name, place in self._places()
                if self.initial.get(name) and name not in self.excluded
            ]

    @contextmanager
    def unsaved_changes(self) -> Iterator[None]:
        """Context manager: exclude what is changed inside, such as the scores of an evaluation."""
        before = dict(self._snapshots())
        yield
        self._exclude_changes(before)

    def _exclude_changes(
        self, before: Mapping[str, AttributeValue], followed: Collection[str] = ()
    ) -> None:
        changed = {name for name, now in self._snapshots() if is_changed(before.get(name), now)}
        self.excluded |= changed - set(followed)

    # -- the state ---------------------------------------------------------------------------------

    def changed(self) -> dict[str, AttributeValue]:
        """Return by name what differs from its value as constructed."""
        snapshots = {name: now for name, now in self._snapshots() if name not in self.excluded}
        return {
            name: now
            for name, now in sorted(snapshots.items())
            if now.mark not in (None, self._initial(name))
        }

    def _initial(self, name: str) -> str | None:
        return self.initial.get(name, "")

    def state_dict(self) -> dict[str, Tensor]:
        """Return the changed attributes as tensors; {} if there are none."""
        changed = {name: now.value for name, now in self.changed().items()}
        return pack(ATTRIBUTES, changed) if changed else {}

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Set the saved attributes, tensors in place if they have the saved shape and dtype. Warn
        of those of modules that the model lacks."""
        holders, places = dict(self._holders()), dict(self._places())
        saved = self._unpack(tensors)
        unknown = [name for name in saved if name.rpartition(".")[0] not in holders]
        if unknown:
            log.warning(
                "the checkpoint has attributes of modules that the model lacks: %s",
                join_names(unknown),
            )
        for name, value in saved.items():
            path, _, key = name.rpartition(".")
            if name in unknown:
                continue
            holder = places[name].holder if name in places else holders[path]
            current = holder.get(key)
            if (
                isinstance(value, Tensor)
                and isinstance(current, Tensor)
                and (value.shape, value.dtype) == (current.shape, current.dtype)
            ):
                current.copy_(value)
            else:
                holder[key] = (
                    value.to(current.device if isinstance(current, Tensor) else device)
                    if isinstance(value, Tensor)
                    else value
                )

    def _holders(self) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from ((path, vars(module)) for path, module in self._modules())
        yield from ((path, vars(optimizer)) for path, optimizer in self.optimizers.items())

    def _unpack(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        values: dict[str, Any] = (
            unpack(ATTRIBUTES, tensors) if f"{ATTRIBUTES}:json" in tensors else {}
        )
        return values

    def announce(self) -> None:
        """Log once of each attribute that checkpoints hold it."""
        if new := sorted(self.changed().keys() - self._announced):
            self._announced |= set(new)
            log.info("checkpoints hold attributes that change between steps: %s", join_names(new))

    # -- the same on all workers -------------------------------------------------------------------

    def describe(self) -> list[Any]:
        """Return what `agree` needs of this worker, as JSON."""
        return [{name: now.mark for name, now in self.changed().items()}, sorted(self.excluded)]

    def agree(self, described: Sequence[list[Any] | None]) -> None:
        """Exclude what differs between the workers, or is excluded on one of them. None: of a
        worker without the state."""
        states = {rank: marks for rank, (marks, _) in enumerate(filter(None, described))}
        self.excluded |= {name for _, excluded in filter(None, described) for name in excluded}
        names = sorted({name for marks in states.values() for name in marks} - self.excluded)
        differing = [
            name for name in names if len({marks.get(name) for marks in states.values()}) > 1
        ]
        self.excluded |= set(differing)
        if differing:
            marks = [
                rank_marks.get(differing[0], "as constructed") for rank_marks in states.values()
            ]
            log.warning(
                "attributes differ between the workers, and no checkpoint holds them: %s (%s: %s); if forward passes depend on them, "
                "the workers train different models: change them after the micro-batch loop, on all workers alike",
                *(
                    join_names(differing),
                    differing[0],
                    ", ".join(sorted({mark[:SHOWN_CHARS] for mark in marks})),
                ),
            )


def persistent_buffers(module: nn.Module) -> Iterator[Tensor]:
    for child in module.modules():
        yield from (
            b
            for name, b in own_buffers(child).items()
            if b is not None and name not in non_persistent_buffers(child)
        )


def is_changed(before: AttributeValue | None, now: AttributeValue) -> bool:
    """Return whether an attribute has another value, or is another tensor: weight_norm replaces the
    weight in each forward pass, in the first one by an equal tensor."""
    if before is None or before.mark != now.mark:
        return True
    return isinstance(now.value, Tensor) and before.value is not now.value


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
            text += f" {[(str(t.dtype), *t.shape) for t in tensors.values()]} {digest_of(as_bytes(t) for t in tensors.values())}"
    except Exception:  # a value of any class: other byte orders, nested tensors, conjugate views
        return None
    return text if len(text) <= SHOWN_CHARS else hashlib.sha256(text.encode()).hexdigest()
