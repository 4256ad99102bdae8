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
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import FencedError, UsageError
from lockstep.layout import Layout
from lockstep.parallel.ordered_sum import start_exchange
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
WEIGHT = ""  # the key of the parameter itself, beside those of its state
State = dict[str, Any]
Transfers = list[tuple[int, Tensor]]  # (peer, bytes)


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
    where = f"layout {local.layout}"
    if local.layout.workers_per_replica == 1:
        return
    if isinstance(optimizer, optim.LBFGS):
        raise UsageError(
            "LBFGS evaluates the loss several times per update "
            "and couples all parameters: not supported with shards",
            where,
            "use another optimizer, or replicas",
        )
    if not couples_elements(optimizer):
        return
    numbers: list[list[dict[str, float]]] = []
    optimizer.register_step_pre_hook(lambda *_: numbers.append(numbers_of_groups(optimizer)))
    optimizer.register_step_post_hook(
        lambda *_: refuse_changed_numbers(optimizer, numbers.pop(), local.layout)
    )
    if local.layout.shard == local.layout.tensor == 1:
        return
    if local.layout.tensor > 1:
        raise UsageError(
            f"{type(optimizer).__name__} needs whole matrices, which layout.tensor splits",
            where,
            "set layout.tensor to 1; "
            "an optimizer that updates each element by itself declares elementwise = True",
        )
    OwnerUpdate(optimizer, local, runtime)


@dataclass
class Whole:
    """A parameter in shards during an update.

    rows       of each shard
    owner      rank of the shard that updates it
    kept       state that the optimizer's own step does not read
    parameter  in one piece, on its owner
    """

    name: str
    local: nn.Parameter
    rows: list[TensorSlice]
    owner: int
    kept: State = field(default_factory=dict)
    parameter: nn.Parameter | None = None

    def take(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows[0].shape


class OwnerUpdate:
    """Hooks of one optimizer, called before and after its step on all shards of a replica."""

    def __init__(
        self, optimizer: optim.Optimizer, local: LocalModel, runtime: ElasticRuntime
    ) -> None:
        self.local = local
        self.groups = local.groups
        self.runtime = runtime
        self.names = {id(parameter): name for name, parameter in local.local_params.items()}
        self.waits = WorkWaiter(self._abort_reason, in_thread=local.groups.in_thread)
        runtime.updates.add()
        optimizer.register_step_pre_hook(self.gather)
        optimizer.register_step_post_hook(self.scatter)

    def _wholes(self, parameters: Iterable[nn.Parameter]) -> list[Whole]:
        """Deal the parameters to owners: each to the shard with the fewest elements so far."""
        shards = len(self.ranks)
        wholes = list[Whole]()
        elements = [0] * shards
        for parameter in parameters:
            name = self.names[id(parameter)]
            part = self.local.tensor_slices[name]
            rows = [part.split_rows(shard, shards) for shard in range(shards)]
            owner = elements.index(min(elements))
            wholes.append(Whole(name, parameter, rows, self.ranks[owner]))
            elements[owner] += math.prod(part.shape)
        return wholes

    @torch.no_grad()
    def gather(self, optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: State) -> None:
        """Collective. Give the optimizer the whole parameters that this shard owns, and no
        others."""
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise UsageError(
                f"{type(optimizer).__name__}.step was called with a closure, in shards",
                f"layout {self.local.layout}",
                "compute the loss in the micro-batch loop",
            )
        rank, layout, _ = self.groups.position
        self.ranks = layout.ranks_along(rank, "shard")
        self.parameters = [group["params"] for group in optimizer.param_groups]
        self.wholes = self._wholes(p for p in chain(*self.parameters) if p.grad is not None)
        sends = Transfers()
        receives = Transfers()
        owned = dict[int, nn.Parameter]()
        for whole in self.wholes:
            p = whole.local
            state: State = optimizer.state.pop(p, {})
            whole.kept.update({key: state.pop(key) for key in LOCAL_STATE if key in state})
            # In the order of the keys: shards may have made their state in another order.
            sharded = [
                key
                for key in sorted(state)
                if isinstance(state[key], Tensor) and state[key].shape == p.shape
            ]
            assert p.grad is not None
            parts = [p.detach(), p.grad, *(state[key] for key in sharded)]
            sends += [(whole.owner, as_bytes(part)) for part in parts]
            if whole.owner != rank:
                continue
            tensors = [part.new_empty(whole.shape) for part in parts]
            for tensor in tensors:
                receives += self._rows(whole, tensor)
            owned[id(p)] = parameter = nn.Parameter(tensors[0])
            parameter.grad = tensors[1]
            whole.take(parameter)
            if state:
                optimizer.state[parameter] = state | dict(zip(sharded, tensors[2:], strict=True))
        self._exchange(sends, receives)
        for group, parameters in zip(optimizer.param_groups, self.parameters, strict=True):
            group["params"] = [owned[id(p)] for p in parameters if id(p) in owned]

    @torch.no_grad()
    def scatter(self, optimizer: optim.Optimizer, *_: Any) -> None:
        """Collective. Return the rows of weights and state to their shards."""
        owned = {
            whole.name: {
                WEIGHT: whole.parameter.detach(),
                **optimizer.state.pop(whole.parameter, {}),
            }
            for whole in self.wholes
            if whole.parameter is not None
        }
        described = dict[str, list[Any]]()
        rows = {whole.name: whole.rows for whole in self.wholes}
        own = {name: describe(name, owned[name], rows[name], optimizer) for name in owned}
        for of_owner in self._exchange_json(own):
            described |= of_owner
        sends = Transfers()
        receives = Transfers()
        for whole in self.wholes:
            p = whole.local
            state = whole.kept
            for key, dtype, shape, value in described[whole.name]:
                if dtype is None:
                    state[key] = value
                    continue
                if value is not None:
                    state[key] = torch.tensor(value, dtype=TORCH_DTYPES[dtype]).view(shape)
                    continue
                is_sharded = tuple(shape) == whole.shape
                received = torch.empty(
                    p.shape if is_sharded else shape, dtype=TORCH_DTYPES[dtype], device=p.device
                )
                state[key] = received
                receives.append((whole.owner, as_bytes(received)))
                if whole.name not in owned:
                    continue
                tensor = owned[whole.name][key].to(p.device)
                if is_sharded:
                    sends += self._rows(whole, tensor)
                else:
                    sends += [(rank, as_bytes(tensor)) for rank in self.ranks]
        self._exchange(sends, receives)
        self.runtime.updates.end()
        for whole in self.wholes:
            whole.local.copy_(whole.kept.pop(WEIGHT))
            if whole.kept:
                optimizer.state[whole.local] = whole.kept
        for group, parameters in zip(optimizer.param_groups, self.parameters, strict=True):
            group["params"] = parameters
        self.wholes = []

    def _rows(self, whole: Whole, tensor: Tensor) -> Transfers:
        """Return the rows of a whole tensor, with the ranks of their shards."""
        pairs = zip(self.ranks, whole.rows, strict=True)
        return [(rank, as_bytes(rows.of(tensor))) for rank, rows in pairs]

    def _abort_reason(self) -> str:
        """Return why this generation is over, but "" while an abort waits for this update."""
        reason = self.runtime.generation_error()
        return "" if reason and self.runtime.group.is_abort_held() else reason

    def _exchange(self, sends: Transfers, receives: Transfers) -> None:
        """Collective in the shards of a replica. FencedError when one is lost: the update is
        applied in part, and this worker receives the state of another replica."""
        group = dist.group.WORLD  # others need not take part, and it exists in every generation
        assert group is not None
        rank = group.rank()
        to_own, from_own = (
            [tensor for peer, tensor in transfers if peer == rank]
            for transfers in (sends, receives)
        )
        for source, target in zip(to_own, from_own, strict=True):
            target.copy_(source)
        sends, receives = (
            [(peer, tensor) for peer, tensor in transfers if peer != rank]
            for transfers in (sends, receives)
        )
        self.groups.board.enter_collective(sum(tensor.nbytes for _, tensor in sends))
        try:
            self.waits.wait(start_exchange(sends, receives, group, tag=TAG), group)
        except Exception as error:
            if not self.runtime.is_peer_loss(error):
                raise
            raise FencedError(
                "a worker was lost while the shards of a replica exchanged an update: "
                f"{error_summary(error)}",
                f"rank {rank}",
                "this worker restarts and receives the state of another replica",
            ) from error

    def _exchange_json(self, value: Any) -> list[Any]:
        """Collective in the shards of a replica. Return the values of all shards."""
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        size = torch.tensor([own.numel()])
        sizes = [(rank, torch.zeros_like(size)) for rank in self.ranks]
        self._exchange([(rank, size) for rank in self.ranks], sizes)
        texts = [(rank, own.new_empty(int(size))) for rank, size in sizes]
        self._exchange([(rank, own) for rank in self.ranks], texts)
        return [json.loads(text.numpy().tobytes()) for _, text in texts]


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
        raise UsageError(
            f"{type(optimizer).__name__} changes the values of its parameter groups in step: "
            "it couples parameters with each other",
            f"layout {layout}",
            "use another optimizer, or whole replicas",
        )


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
            raise UsageError(
                f"state of the shape {shape}, "
                f"which is also that of a shard of the parameter {rows[0].shape}",
                where,
                "set another layout.shard",
            )
        is_small = value.numel() == 1 and shape != rows[0].shape and not value.is_cuda
        entries.append([key, DTYPES[value.dtype], shape, value.item() if is_small else None])
    return entries
