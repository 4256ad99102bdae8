"""The owner rule: optimizers that couple the elements of a tensor, for models in shards.

Muon and Adafactor compute the update of an element from its whole matrix. So each parameter has an
owner among the shards of a replica. In `optimizer.step()` the owner receives the rows of weight,
gradient and state, updates the whole parameter as a single worker does, and returns the rows. The
bits do not depend on the number of shards.

State of the parameter's shape stays sharded like the parameter. Other state is equal on all shards.
So checkpoints and joiners know nothing of owners.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import FencedError, UsageError
from lockstep.layout import Layout
from lockstep.parallel.exchange import start_exchange
from lockstep.parallel.parallelize import LocalModel
from lockstep.runtime.exit_report import error_summary
from lockstep.runtime.tensor_bytes import DTYPES, TORCH_DTYPES, as_bytes
from lockstep.runtime.work import WorkWaiter
from lockstep.tensor_slice import TensorSlice

# The update of a slice is the slice of the update: tests/unit/training/test_elementwise.py. On a
# CPU not with fused=True.
ELEMENTWISE = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
)
TAG = 61  # of these messages in the group of all workers
LOCAL_STATE = ("ema",)  # keys that the optimizer's own step does not read
Transfers = list[tuple[int, Tensor]]


def couples_elements(optimizer: optim.Optimizer) -> bool:
    """Return whether the update of a slice may differ from the slice of the update."""
    declared = getattr(optimizer, "elementwise", None)
    if declared is not None:
        return not declared
    fused_on_cpu = any(
        group.get("fused") and p.device.type == "cpu"
        for group in optimizer.param_groups
        for p in group["params"]
    )
    return fused_on_cpu or type(optimizer) not in ELEMENTWISE


def apply_owner_rule(
    optimizer: optim.Optimizer, local: LocalModel, runtime: ElasticRuntime
) -> None:
    """Let `optimizer.step()` update whole parameters where the optimizer needs them.

    UsageError for an optimizer or a layout that the owner rule does not cover.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, optim.LBFGS) and local.layout.workers_per_replica > 1:
        what, hint = (
            "LBFGS evaluates the loss several times per update and couples all parameters",
            "use another optimizer, or replicas",
        )
        raise UsageError(f"{what}: not supported with shards", f"layout {local.layout}", hint)
    if local.layout.workers_per_replica == 1 or not couples_elements(optimizer):
        return
    numbers: list[list[dict[str, float]]] = []
    optimizer.register_step_pre_hook(lambda *_: numbers.append(numbers_of_groups(optimizer)))
    optimizer.register_step_post_hook(
        lambda *_: refuse_changed_numbers(optimizer, numbers.pop(), local.layout)
    )
    if local.layout.shard == local.layout.tensor == 1:
        return
    if local.layout.tensor > 1:
        hint = "set layout.tensor to 1; an optimizer that updates each element by itself declares elementwise = True"
        raise UsageError(
            f"{name} needs whole matrices, which layout.tensor splits",
            f"layout {local.layout}",
            hint,
        )
    OwnerUpdate(optimizer, local, runtime)


class Whole(NamedTuple):
    """A parameter in shards during an update. rows: of each shard."""

    name: str
    local: nn.Parameter
    shape: tuple[int, ...]
    rows: list[TensorSlice]
    owner: int


class OwnerUpdate:
    """Hooks of one optimizer, called before and after its step on all shards of a replica."""

    def __init__(
        self, optimizer: optim.Optimizer, local: LocalModel, runtime: ElasticRuntime
    ) -> None:
        assert local.groups is not None
        self.local, self.groups, self.runtime = local, local.groups, runtime
        self.names = {id(parameter): name for name, parameter in local.local_params.items()}
        self.waits = WorkWaiter(self._abort_reason, in_thread=local.groups.in_thread)
        runtime.updates.add()
        optimizer.register_step_pre_hook(self.gather)
        optimizer.register_step_post_hook(self.scatter)

    def _wholes(self, parameters: Iterable[nn.Parameter]) -> list[Whole]:
        """Deal the parameters to owners: each to the shard with the fewest elements so far."""
        shards, wholes = self.local.layout.shard, list[Whole]()
        elements = [0] * shards
        for parameter in parameters:
            name = self.names[id(parameter)]
            slices = [
                self.local.tensor_slices[name].split_rows(shard, shards) for shard in range(shards)
            ]
            owner = elements.index(min(elements))
            wholes.append(Whole(name, parameter, slices[0].shape, slices, owner))
            elements[owner] += torch.Size(slices[0].shape).numel()
        return wholes

    @torch.no_grad()
    def gather(
        self, optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Collective. Give the optimizer the whole parameters that this shard owns, and no
        others."""
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            what, hint = (
                f"{type(optimizer).__name__}.step was called with a closure, in shards",
                "compute the loss in the micro-batch loop",
            )
            raise UsageError(what, f"layout {self.local.layout}", hint)
        rank = dist.get_rank()
        self.ranks = self.groups.current_layout().ranks_along(rank, "shard")
        self.own = self.ranks.index(rank)
        self.parameters = [group["params"] for group in optimizer.param_groups]
        self.wholes = self._wholes(
            p for parameters in self.parameters for p in parameters if p.grad is not None
        )
        self.states: dict[str, dict[str, Any]] = {}
        owned: dict[int, nn.Parameter] = {}
        sends, receives = Transfers(), Transfers()
        for whole in self.wholes:
            p = whole.local
            self.states[whole.name] = optimizer.state.pop(p, {})
            state = {
                key: value
                for key, value in self.states[whole.name].items()
                if key not in LOCAL_STATE
            }
            tensors_by_key = {
                key: state[key] for key in sorted(state) if isinstance(state[key], Tensor)
            }
            # In the order of the keys: shards may have made their state in another order.
            sharded = {
                key: value for key, value in tensors_by_key.items() if value.shape == p.shape
            }
            assert p.grad is not None
            parts = [p.detach(), p.grad, *sharded.values()]
            if whole.owner != self.own:
                sends += [(self.ranks[whole.owner], as_bytes(part)) for part in parts]
                continue
            tensors = [part.new_empty(whole.shape) for part in parts]
            for tensor, part in zip(tensors, parts, strict=True):
                for shard, rows in enumerate(whole.rows):
                    if shard == self.own:
                        rows.of(tensor).copy_(part)
                    else:
                        receives.append((self.ranks[shard], as_bytes(rows.of(tensor))))
            owned[id(p)] = parameter = nn.Parameter(tensors[0])
            parameter.grad = tensors[1]
            if state:
                optimizer.state[parameter] = state | dict(zip(sharded, tensors[2:], strict=True))
        self._exchange(sends, receives)
        for group, parameters in zip(optimizer.param_groups, self.parameters, strict=True):
            group["params"] = [owned[id(p)] for p in parameters if id(p) in owned]
        self.owned = owned

    @torch.no_grad()
    def scatter(
        self, optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Collective. Return the rows of weights and state to their shards."""
        owned = {
            whole.name: self.owned[id(whole.local)]
            for whole in self.wholes
            if whole.owner == self.own
        }
        states = {name: optimizer.state.pop(parameter, {}) for name, parameter in owned.items()}
        rows_of = {whole.name: whole.rows for whole in self.wholes}
        described = self._exchange_json(
            {
                name: describe(name, state, rows_of[name], optimizer)
                for name, state in states.items()
            }
        )
        sends, receives, weights = Transfers(), Transfers(), list[tuple[nn.Parameter, Tensor]]()
        for whole in self.wholes:
            is_owner, p = whole.owner == self.own, whole.local
            state = {
                key: value for key, value in self.states[whole.name].items() if key in LOCAL_STATE
            }
            rows = [("", DTYPES[p.dtype], whole.shape, None), *described[whole.owner][whole.name]]
            for key, dtype, shape, value in rows:
                if dtype is None or value is not None:
                    state[key] = (
                        value
                        if dtype is None
                        else torch.tensor(value, dtype=TORCH_DTYPES[dtype]).view(shape)
                    )
                    continue
                is_sharded = tuple(shape) == whole.shape
                tensor = (
                    (states[whole.name][key] if key else owned[whole.name].detach()).to(p.device)
                    if is_owner
                    else p
                )
                parts = (
                    [part.of(tensor) if is_sharded else tensor for part in whole.rows]
                    if is_owner
                    else []
                )
                received = torch.empty(
                    p.shape if is_sharded else shape, dtype=TORCH_DTYPES[dtype], device=p.device
                )
                if is_owner:
                    sends += [
                        (self.ranks[shard], as_bytes(part))
                        for shard, part in enumerate(parts)
                        if shard != self.own
                    ]
                    received.copy_(parts[self.own])
                else:
                    receives.append((self.ranks[whole.owner], as_bytes(received)))
                if key:
                    state[key] = received
                else:
                    weights.append((p, received))
            if state:
                optimizer.state[p] = state
        self._exchange(sends, receives)
        self.runtime.updates.end()
        for p, received in weights:
            p.copy_(received)
        for group, parameters in zip(optimizer.param_groups, self.parameters, strict=True):
            group["params"] = parameters
        del self.owned, self.states, self.wholes

    def _abort_reason(self) -> str:
        """Return why this generation is over, but "" while an abort waits for this update."""
        reason = self.runtime.generation_error()
        return "" if reason and self.runtime.group.is_abort_held() else reason

    def _exchange(self, sends: Transfers, receives: Transfers) -> None:
        """Collective in the shards of a replica. FencedError when one is lost: the update is
        applied in part, and this worker receives the state of another replica."""
        group = dist.group.WORLD  # others need not take part, and it exists in every generation
        assert group is not None
        self.groups.board.enter_collective(sum(tensor.nbytes for _, tensor in sends))
        try:
            self.waits.wait(start_exchange(sends, receives, group, tag=TAG), group)
        except Exception as error:
            if not self.runtime.is_peer_loss(error):
                raise
            what = f"a worker was lost while the shards of a replica exchanged an update: {error_summary(error)}"
            raise FencedError(
                what,
                f"rank {dist.get_rank()}",
                "this worker restarts and receives the state of another replica",
            ) from error

    def _exchange_json(self, value: Any) -> list[Any]:
        """Collective in the shards of a replica. Return the values of all shards."""
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        others = [rank for rank in self.ranks if rank != self.ranks[self.own]]
        sizes = {rank: torch.zeros(1, dtype=torch.int64) for rank in others}
        self._exchange([(rank, torch.tensor([own.numel()])) for rank in others], [*sizes.items()])
        texts = {
            rank: torch.empty(int(size), dtype=torch.uint8) for rank, size in sizes.items()
        } | {self.ranks[self.own]: own}
        self._exchange([(rank, own) for rank in others], [(rank, texts[rank]) for rank in others])
        return [json.loads(texts[rank].numpy().tobytes()) for rank in self.ranks]


def numbers_of_groups(optimizer: optim.Optimizer) -> list[dict[str, float]]:
    """Return the numbers in each parameter group, such as its learning rate."""
    return [
        {key: float(value) for key, value in group.items() if isinstance(value, int | float)}
        for group in optimizer.param_groups
    ]


def refuse_changed_numbers(
    optimizer: optim.Optimizer, before: list[dict[str, float]], layout: Layout
) -> None:
    if numbers_of_groups(optimizer) != before:
        what = f"{type(optimizer).__name__} changes the values of its parameter groups in step: it couples parameters with each other"
        raise UsageError(what, f"layout {layout}", "use another optimizer, or whole replicas")


def describe(
    name: str, state: dict[str, Any], rows: list[TensorSlice], optimizer: optim.Optimizer
) -> list[Any]:
    """Return [key, dtype, shape, value] of each entry of a whole parameter's state. dtype: None for
    a number. value: None for a tensor with several elements."""
    entries = list[Any]()
    for key, value in state.items():
        where = f"{type(optimizer).__name__}, state {key!r} of {name}"
        if not isinstance(value, Tensor):
            if not isinstance(value, int | float | None):
                raise UsageError(
                    f"a {type(value).__name__} in the state of an optimizer, in shards",
                    where,
                    "keep tensors and numbers",
                )
            entries.append([key, None, [], value])
            continue
        shape = tuple(value.shape)
        if shape != rows[0].shape and shape in {part.local_shape for part in rows}:
            what = f"state of the shape {shape}, which is also that of a shard of the parameter {rows[0].shape}"
            raise UsageError(what, where, "set another layout.shard")
        is_small = value.numel() == 1 and shape != rows[0].shape and not value.is_cuda
        entries.append([key, DTYPES[value.dtype], shape, value.item() if is_small else None])
    return entries
