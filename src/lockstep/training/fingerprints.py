"""Fingerprints of values in a user's process, to see which of them change from step to step.

A look walks objects without running the user's code: no properties, no comparisons, no `repr`. It
keeps hashes of contents, never the objects.
"""

from __future__ import annotations

import array
import collections
import functools
import io
import itertools
import random
import struct
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.runtime.tensor_bytes import as_bytes
from lockstep.runtime.torch_private import version_of

MAX_OBJECTS = 50_000  # of a look
MAX_DEPTH = 40
MAX_ITEMS = 2_000  # of a list or dict that are looked at; of longer ones a sample
MAX_MARKS = 1_000  # of an object
MAX_PARTS = 32  # of a container whose items are marked
MAX_MARKED_BYTES = 1 << 14  # of an array; of a larger one a sample
MAX_BYTES = 1 << 18  # of a tensor or array; of larger ones a sample
OPAQUE_PACKAGES = {
    *(
        "lockstep",
        "threading",
        "_thread",
        "socket",
        "logging",
        "multiprocessing",
        "concurrent",
        "asyncio",
        "subprocess",
    ),
    *(
        "tqdm",
        "tensorboard",
        "tensorboardX",
        "wandb",
        "mlflow",
        "rich",
        "matplotlib",
        "pathlib",
        "re",
        "datetime",
        "weakref",
    ),
    *(
        "_pytest",
        "pytest",
        "unittest",
        "contextlib",
        "typing",
        "enum",
        "ast",
        "inspect",
        "importlib",
        "omegaconf",
        "loguru",
        "ctypes",
    ),
}
OPAQUE_MODULES = (
    "torch.utils.tensorboard",
    "torch.cuda",
    "torch.profiler",
    "torch.distributed",
    "torch._",
    "torch.autograd",
)
SAMPLES_OF_ITERATORS: tuple[Any, ...] = (
    *(iter([]), iter(()), iter(range(0)), reversed([]), iter(""), iter(b"")),
    *(iter({}), iter(dict[Any, Any]().items()), iter(dict[Any, Any]().values())),
)
BUILTIN_ITERATORS = tuple(type(iterator) for iterator in SAMPLES_OF_ITERATORS)
ITERATORS = (
    *BUILTIN_ITERATORS,
    enumerate,
    zip,
    map,
    filter,
    reversed,
    itertools.count,
    itertools.cycle,
    itertools.chain,
    itertools.islice,
)
PLAIN = (int, float, str, bytes, bool, type(None))
SIMPLE = (int, str, bytes, bool, complex, type(None))


class Unfinished(Exception):
    """The look has reached its limit of objects or of time."""


class Look:
    """One look at many values. skipped: ids of objects that checkpoints hold; is_user_class:
    whether the attributes of a class's objects are listed one by one."""

    def __init__(
        self, skipped: set[int], is_user_class: Callable[[type], bool], seconds: float
    ) -> None:
        self.skipped, self.is_user_class = skipped, is_user_class
        self.deadline = time.thread_time() + seconds  # without the time of other processes
        self.objects = 0
        self.owners: set[int] = set()  # ids of the objects whose attributes are listed already
        self.visited: dict[int, int] = {}
        self.kept: list[Any] = []  # copies, so that their ids stay theirs during one fingerprint

    def attributes(self, path: str, value: Any) -> Iterator[tuple[str, str, str, Any]]:
        """Yield (path, attribute, class of its object, value) of each attribute of an object of a
        user's class, and of such objects in it."""
        pending = [(path, value)]
        while pending:
            where, owner = pending.pop()
            if id(owner) in self.skipped or id(owner) in self.owners:
                continue
            self.owners.add(id(owner))
            for name, item in attributes(owner):
                if id(item) in self.skipped:
                    continue
                if self._has_slots(item):
                    pending.append((f"{where}.{name}", item))
                else:
                    yield f"{where}.{name}", name, kind_of(owner), item

    def is_object(self, value: Any) -> bool:
        """Return whether the attributes of this value are compared one by one."""
        return id(value) not in self.skipped and self._has_slots(value)

    def _has_slots(self, value: Any) -> bool:
        kind = type(value)
        return kind is types.SimpleNamespace or (
            self.is_user_class(kind) and not isinstance(value, type | types.FunctionType)
        )

    def fingerprint(self, value: Any) -> int:
        """Return a hash of the value's contents. Raises Unfinished at the limit."""
        self.visited, self.kept = {}, []
        found = self._hash(value, 0)
        self.visited, self.kept = {}, []
        return found

    def _hash(self, value: Any, depth: int) -> int:
        kind = type(value)
        if kind in SIMPLE:
            return hash((kind.__name__, value))
        if kind is float:
            return hash(struct.pack("d", value))
        self.objects += 1
        if (
            self.objects > MAX_OBJECTS
            or depth > MAX_DEPTH
            or (self.objects % 64 == 0 and time.thread_time() > self.deadline)
        ):
            raise Unfinished("the limit of a look")
        if id(value) in self.skipped or is_opaque(kind):
            return hash(kind.__qualname__)
        if id(value) in self.visited:
            return self.visited[id(value)]
        self.visited[id(value)] = len(self.visited)
        return hash((kind.__qualname__, *self._parts(value, depth + 1)))

    def _parts(self, value: Any, depth: int) -> Iterator[int]:
        if isinstance(value, Tensor):
            yield from tensor_marks(value)
        elif isinstance(value, np.ndarray | np.generic):
            yield from self._array(value, depth)
        elif isinstance(value, dict):
            yield from self._mapping(value, depth)
        elif isinstance(value, list | tuple | collections.deque):
            yield from self._sequence(value, depth)
        elif isinstance(value, set | frozenset):
            yield from (
                len(value),
                sum(self._hash(item, depth) for item in itertools.islice(value, MAX_ITEMS)),
            )
        elif isinstance(value, bytearray | memoryview | array.array):
            yield hash(bytes(value[:MAX_BYTES]))
        elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            self.kept.append(parts := parts_of_function(value))
            yield from (self._hash(part, depth) for part in parts)
        elif (state := internal_state(value)) is not None:
            self.kept.append(state)
            yield self._hash(state, depth)
        if isinstance(value, int | str | float):  # a subclass of them
            yield hash(str.__str__(value) if isinstance(value, str) else float(value))
        for name, item in () if isinstance(value, type | Tensor) else attributes(value):
            yield hash(name)
            yield self._hash(item, depth)

    def _mapping(self, value: dict[Any, Any], depth: int) -> Iterator[int]:
        yield len(value)
        items = itertools.islice(dict.items(value), MAX_ITEMS)
        last = (
            itertools.islice(reversed(dict.items(value)), MAX_ITEMS)
            if len(value) > MAX_ITEMS
            else ()
        )
        for key, item in (*items, *last):
            yield self._hash(key, depth)
            yield self._hash(item, depth)

    def _sequence(self, value: Any, depth: int) -> Iterator[int]:
        yield len(value)
        kind = (
            list
            if isinstance(value, list)
            else tuple
            if isinstance(value, tuple)
            else collections.deque
        )
        items = list(kind.__iter__(value))
        if len(items) > MAX_ITEMS:
            items = [
                *items[: MAX_ITEMS // 4],
                *items[:: len(items) // MAX_ITEMS + 1],
                *items[-MAX_ITEMS // 4 :],
            ]
        for item in items:
            yield self._hash(item, depth)

    def _array(self, value: Any, depth: int) -> Iterator[int]:
        values = np.asarray(value)
        yield hash((values.shape, values.dtype.str))
        if values.dtype.hasobject:
            yield from (self._hash(item, depth) for item in values.reshape(-1)[:MAX_ITEMS])
        elif values.nbytes <= MAX_BYTES:
            yield hash(values.tobytes())
        else:
            flat = values.reshape(-1)
            yield hash(flat[:: flat.size * flat.itemsize // MAX_BYTES + 1].tobytes())
            yield hash(flat[: MAX_BYTES // flat.itemsize // 4].tobytes())


class PartMark(NamedTuple):
    """What tells cheaply whether a part of an object has changed: its content where that is small,
    and which object it is."""

    name: str
    content: Any
    value: Any

    def equals(self, other: PartMark) -> bool:
        is_same = self.value is other.value
        return is_same and self.name == other.name and self.content == other.content


class Marks:
    """Marks of what an object consists of: attributes, items of short containers, closures."""

    def __init__(self, value: Any) -> None:
        self.marks: list[PartMark] = []
        seen: set[int] = set()
        pending = [("", value)]
        while pending and len(self.marks) < MAX_MARKS:
            name, part = pending.pop()
            is_plain = type(part) in PLAIN
            self.marks.append(PartMark(name, content_mark(part), None if is_plain else part))
            if is_plain or id(part) in seen or is_opaque(type(part)):
                continue
            seen.add(id(part))
            pending += parts_to_mark(part)

    def equal(self, other: Marks) -> bool:
        if len(self.marks) != len(other.marks):
            return False
        return all(map(PartMark.equals, self.marks, other.marks))


def content_mark(value: Any) -> Any:
    """Return a plain value itself, bytes of an array, the version of a tensor, or a length."""
    if type(value) is float:
        return repr(value)  # NaN is not equal to itself
    if type(value) in PLAIN:
        return type(value), value
    if isinstance(value, Tensor):
        return None if value.is_inference() else version_of(value)
    if isinstance(value, np.ndarray) and value.flags.c_contiguous and not value.dtype.hasobject:
        stride = value.nbytes // MAX_MARKED_BYTES + 1
        return value.reshape(-1)[::stride].tobytes()
    return len(value) if type(value) in (list, dict, set, collections.deque) else None


def parts_to_mark(value: Any) -> list[tuple[str, Any]]:
    """Return (name, part) of what an object consists of; of a long container nothing."""
    if isinstance(value, Tensor | np.ndarray):
        return []
    parts = attributes(value)
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        parts += [("", part) for part in parts_of_function(value)]
    if isinstance(value, dict) and len(value) <= MAX_PARTS:
        parts += [(str(key), part) for key, part in dict.items(value)]
    if isinstance(value, list | tuple | collections.deque) and len(value) <= MAX_PARTS:
        parts += [("", part) for part in value]
    return parts


def tensor_marks(tensor: Tensor) -> Iterator[int]:
    """Yield hashes of a tensor's shape and bytes; of a large one, or one on a device, of a version
    counter."""
    tensor = tensor.detach() if type(tensor) is torch.nn.Parameter else tensor
    yield hash((tuple(tensor.shape), str(tensor.dtype)))
    is_plain = (
        type(tensor) is Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
    )
    if is_plain and tensor.numel() * tensor.element_size() <= MAX_BYTES:
        yield hash(as_bytes(tensor).numpy().tobytes())
    elif tensor.is_inference():
        return
    else:
        yield version_of(tensor)
        if is_plain:
            sample = (
                tensor.reshape(-1)[:: tensor.numel() * tensor.element_size() // MAX_BYTES + 1]
                if tensor.is_contiguous()
                else None
            )
            yield 0 if sample is None else hash(as_bytes(sample).numpy().tobytes())


def attributes(value: Any) -> list[tuple[str, Any]]:
    """Return the attributes that an object has itself, in __dict__ and __slots__."""
    found: list[tuple[str, Any]] = []
    with suppress(AttributeError):
        own = object.__getattribute__(value, "__dict__")
        if type(own) is dict:
            found += [item for item in list(own.items()) if type(item[0]) is str]
    for kind in type(value).__mro__ if "__slots__" in dir(type(value)) else ():
        for name, member in list(vars(kind).items()):
            if isinstance(member, types.MemberDescriptorType) and kind.__module__ != "builtins":
                with suppress(AttributeError):
                    found.append((name, member.__get__(value)))
    return found


def parts_of_function(function: Any) -> list[Any]:
    """Return the objects that a function keeps between its calls."""
    if isinstance(function, functools.partial):
        return [function.func, function.args, function.keywords]
    if isinstance(function, types.MethodType):
        return [function.__self__]
    return [
        *(value for _, value in closure_of(function)),
        function.__defaults__,
        function.__kwdefaults__,
    ]


def closure_of(function: types.FunctionType) -> list[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    found = []
    for name, cell in cells:
        with suppress(ValueError):  # not assigned yet
            found.append((name, cell.cell_contents))
    return found


def internal_state(value: Any) -> Any:
    """Return the position of a generator, iterator, file or random generator; None for another
    value."""
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return "finished" if frame is None else (frame.f_lasti, locals_of(frame))
    if isinstance(value, random.Random):
        return random.Random.getstate(value)
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.BitGenerator):
        return value.state
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, io.IOBase):
        return file_position(value)
    if type(value) in ITERATORS:
        with warnings.catch_warnings(), suppress(TypeError, AttributeError):
            warnings.simplefilter("ignore")  # itertools: no copies from Python 3.14 on
            return value.__reduce__()
        return repr(value) if type(value) is itertools.count else None
    return None


def locals_of(frame: types.FrameType) -> dict[str, Any]:
    """Return a copy of a frame's variables. Before Python 3.13 the frame keeps a second copy from
    then on, which would prolong the life of tensors, so that one is emptied."""
    found = dict(frame.f_locals)
    if sys.version_info < (3, 13) and frame.f_locals is not frame.f_globals:
        frame.f_locals.clear()
    return found


def file_position(file: io.IOBase) -> int | None:
    """Return the position in a file that is open for reading; None for another one."""
    with suppress(OSError, ValueError, io.UnsupportedOperation):
        if isinstance(file, io.StringIO | io.BytesIO):
            return file.tell()
        if file.readable() and not file.writable():
            return file.buffer.tell() if isinstance(file, io.TextIOWrapper) else file.tell()
    return None


def has_position(value: Any) -> bool:
    """Return whether a value exists to be consumed: a generator, an iterator, a file, random
    numbers."""
    kinds = (
        types.GeneratorType,
        random.Random,
        np.random.Generator,
        np.random.RandomState,
        torch.Generator,
    )
    is_open = isinstance(value, io.IOBase) and file_position(value) is not None
    return isinstance(value, kinds) or type(value) in ITERATORS or is_open


def is_opaque(kind: type) -> bool:
    """Return whether objects of this class are never looked into."""
    module = kind.__module__ if isinstance(kind.__module__, str) else ""
    if issubclass(kind, torch.Generator):
        return False
    if module.partition(".")[0] in OPAQUE_PACKAGES or module.startswith(OPAQUE_MODULES):
        return True
    return issubclass(
        kind,
        type
        | types.ModuleType
        | types.BuiltinFunctionType
        | BaseException
        | types.CodeType
        | types.FrameType,
    )


def kind_of(value: Any) -> str:
    return type(value).__name__
