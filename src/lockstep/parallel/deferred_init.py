"""Build a module without memory for its weights; compute their initial values later, one by one.

The function that builds it runs on the meta device, and the operations that write to tensors are
recorded. A value is computed by repeating the operations behind it, each from the state that its
generator had: the bits of a module that is built at once. While the function runs, its random
operations also run on the CPU, one by one, so that the generators end in the same state. So do the
operations behind a number that the function reads (`.item()`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage, nn
from torch.overrides import TorchFunctionMode

from lockstep.errors import UsageError, refuse
from lockstep.runtime.tensor_bytes import tensors_of
from lockstep.runtime.torch_private import (
    TorchDispatchMode,
    schema_of,
    tree_map,
    version_of,
)

Model = TypeVar("Model", bound=nn.Module)
WHERE = "lockstep.deferred_init(function)"
READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Of all elements, unread.
OVERWRITES = ("aten::normal_", "aten::uniform_", "aten::zero_", "aten::fill_", "aten::copy_")
Storages = set[UntypedStorage]  # on the meta device
Memory = dict[UntypedStorage, UntypedStorage]  # on the CPU, by storage on the meta device
# Run, what it reads and writes, generator.
Operation = tuple[Callable[[Memory], None], Storages, Storages, torch.Generator | None]


class Recording(TorchDispatchMode):
    """While entered, torch's operations on the CPU run on the meta device and are recorded."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.known: Storages = set()
        self.values: dict[str, Tensor] = {}  # that are needed
        self.marks: dict[str, object] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        inputs, schema = (arguments, named or {}), schema_of(function)
        tensors, reads = list(tensors_of(inputs)), storages_in(inputs)
        if tensors and (
            not reads
            or READS & {*function.tags}
            or (schema.is_mutable and not storages_in(tensors[0]))
        ):
            return call_on_cpu(function, inputs, self.compute(reads))
        if not reads <= self.known:
            raise UsageError(
                "a tensor on the meta device is not the function's",
                WHERE,
                "build the whole module in the function",
            )
        is_random = torch.Tag.nondeterministic_seeded in function.tags
        device = str(inputs[1].get("device"))
        generator = (inputs[1].get("generator") or torch.default_generator) if is_random else None
        state: Any = generator and generator.get_state()
        inputs = map_tensors(lambda t: t.detach() if storages_in(t) else t.clone(), inputs)
        on_meta = map_tensors(lambda t: t.to("meta"), arguments)  # tensors of data
        here = {"device": "meta"} if device.startswith("cpu") else {}
        result = function(*on_meta, **inputs[1] | here)
        results = [tensor.detach() for tensor in tensors_of(result)]

        def run(memory: Memory) -> None:
            if generator:
                generator.set_state(state)
            values = tensors_of(call_on_cpu(function, inputs, memory))
            for tensor, value in zip(results, values, strict=True):
                if not storages_in(tensor) <= memory.keys():
                    on_cpu(tensor, memory).copy_(value)

        writes = storages_in(results)
        writes = writes | reads if schema.is_mutable else writes - self.known
        if schema.name in OVERWRITES and tensors[0].nbytes == tensors[0].untyped_storage().nbytes():
            reads = storages_in(tensors[1:])
        if generator:
            run(self.compute(reads))
        if writes and "::empty" not in schema.name:
            self.operations.append((run, reads, writes, generator))
        self.known |= writes
        return result

    def compute(self, needed: Storages) -> Memory:
        """Return the memory of these storages, with their values."""
        memory, plan = Memory(), list[tuple[Callable[[Memory], None], Storages]]()
        states = dict[torch.Generator, Tensor]()
        for run, reads, writes, generator in reversed(self.operations):
            # Backward: what wrote a needed storage needs its inputs in place of it. The storages
            # that no later operation needs are freed after this one.
            if writes & needed:
                plan.append((run, (reads | writes) - needed))
                needed = needed - writes | reads
                states |= {generator: generator.get_state()} if generator else {}
        for run, unneeded in reversed(plan):
            run(memory)
            for storage in unneeded:
                del memory[storage]
        for generator, state in states.items():
            generator.set_state(state)
        return memory

    def finish(self, tensors: dict[str, Tensor]) -> None:
        """Set the tensors whose values are needed. UsageError: the function has not set all of
        them."""
        self.values = {name: tensor.detach() for name, tensor in tensors.items()}
        self.marks = marks_of(tensors)
        written = Storages().union(*(writes for _, _, writes, _ in self.operations))
        refuse(
            [name for name, value in self.values.items() if storages_in(value) - written],
            "the function does not initialize",
            WHERE,
            "initialize them in the module's __init__",
        )

    def value(self, name: str) -> Any:
        """Compute an initial value, on the CPU."""
        return on_cpu(self.values[name], self.compute(storages_in(self.values[name])))


class LikeOnCpu(TorchFunctionMode):
    """While entered, meta tensors say that they are on the CPU: torch.nn.init skips meta
    tensors."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        if function == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        if function == Tensor.tolist:
            if not arguments[0].dim():
                return arguments[0].item()
            return [self.__torch_function__(function, types, (row,)) for row in arguments[0]]
        result = function(*arguments, **(named or {}))
        is_meta = isinstance(result, torch.device) and result.type == "meta"
        return torch.device("cpu") if is_meta else result


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def storages_in(tree: Any) -> Storages:
    storages = {tensor.untyped_storage() for tensor in tensors_of(tree)}
    # LikeOnCpu changes only the devices of tensors.
    return {storage for storage in storages if storage.device.type == "meta"}


def on_cpu(tensor: Any, memory: Memory) -> Any:
    """Return the tensor in `memory` for a meta tensor; other values as they are."""
    for storage in storages_in(tensor):
        if storage not in memory:
            memory[storage] = UntypedStorage(storage.nbytes())
        return torch.empty(0, dtype=tensor.dtype).set_(
            memory[storage], tensor.storage_offset(), tensor.size(), tensor.stride()
        )
    return tensor


def call_on_cpu(function: Any, inputs: Any, memory: Memory) -> Any:
    arguments, named = tree_map(lambda leaf: on_cpu(leaf, memory), inputs)
    if str(named.get("device")) == "meta":  # torch took it from a tensor, as in tensor[0] = 1
        named["device"] = torch.device("cpu")
    return function(*arguments, **named)


def marks_of(tensors: dict[str, Tensor]) -> dict[str, object]:
    return {
        name: (tensor.untyped_storage(), version_of(tensor)) for name, tensor in tensors.items()
    }


def named_tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


RECORDINGS: WeakKeyDictionary[nn.Module, Recording] = WeakKeyDictionary()


def deferred_init(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return function(*arguments, **named), a module whose weights take no memory yet.

    A Session computes them, in shards each worker's slices only, with the bits of a module that is
    built at once. The function must set all weights. Optimizers may be made before.
    UsageError: it leaves weights uninitialized, or needs memory, as `.numpy()` does.
    """
    try:
        with LikeOnCpu(), Recording() as recording:
            module = function(*arguments, **named)
    except (NotImplementedError, TypeError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
        raise UsageError(
            f"the function cannot run without values: {error}", WHERE, "build the module at once"
        ) from error
    recording.finish(named_tensors_of(module))
    RECORDINGS[module] = recording
    return module


def recording_of(module: nn.Module) -> Recording | None:
    """Return, once, how to compute the weights of a module; None: it has them.

    UsageError: they have changed since `deferred_init`.
    """
    if not (recording := RECORDINGS.pop(module, None)):
        return None
    before, now = recording.marks, marks_of(named_tensors_of(module))
    refuse(
        [name for name in before | now if before.get(name) != now.get(name)],
        "weights changed between deferred_init and their computation:",
        WHERE,
        "set them in the function",
    )
    return recording


def move_to(module: nn.Module, device: torch.device) -> nn.Module:
    """Move a module to `device` in place, after its deferred weights are computed."""
    if recording := recording_of(module):
        materialize(module, device, lambda name, _: recording.value(name))
    return module.to(device)


@torch.no_grad()
def materialize(
    model: Model, device: torch.device, init_param: Callable[[str, torch.Size], Tensor]
) -> Model:
    """Move a model from the meta device to `device` and initialize it, in place.

    init_param  returns the initial value of the parameter or buffer of this name and shape, on the
                CPU; called for one tensor at a time
    """
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    # Keeps ties, and the parameters of optimizers.
    torch.__future__.set_swap_module_params_on_conversion(True)
    model.to_empty(device=device)
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.copy_(init_param(name, tensor.shape))
    return model


def generator_of(seed: int, name: str) -> torch.Generator:
    """Return the generator, on the CPU, of a parameter's initial value."""
    return torch.Generator().manual_seed(number_of(f"{seed} {name}"))


def number_of(text: str) -> int:
    """Return 56 bits of a hash."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
