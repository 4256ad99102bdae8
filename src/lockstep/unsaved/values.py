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
import sys
import time
import types
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.runtime.tensor_bytes import as_bytes
from lockstep.runtime.torch_private import version_of
from lockstep.units import words

MAX_OBJECTS = 50_000  # of a look
MAX_DEPTH = 40
MAX_ITEMS = 2_000  # of a list or dict that are looked at; of longer ones a sample
MAX_MARKS = 2_000  # of an object
MAX_PARTS = 32  # of a container whose items are marked
MAX_MARKED_BYTES = 1 << 14  # of an array; of a larger one a sample
MAX_BYTES = 1 << 18  # of a tensor or array; of larger ones a sample
OPAQUE_PACKAGES = words("""
    lockstep threading _thread socket logging multiprocessing concurrent asyncio subprocess
    tqdm tensorboard tensorboardX wandb mlflow rich matplotlib pathlib re datetime weakref
    _pytest pytest unittest contextlib typing enum ast inspect importlib omegaconf loguru ctypes
""")
OPAQUE_MODULES = (
    "torch.utils.tensorboard",
    "torch.cuda",
    "torch.profiler",
    "torch.distributed",
    "torch._",
    "torch.autograd",
)
CONTAINERS: tuple[Any, ...] = (dict, list, tuple, collections.deque, set, frozenset)
FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Unfinished(Exception):
    """The look has reached its limit of objects or of time."""


class Look:
    """One look at many values.

    skipped  ids of objects that checkpoints hold
    modules  of the user: the attributes of objects of their classes are listed one by one
    """

    def __init__(self, skipped: set[int], modules: set[str], seconds: float) -> None:
        self.skipped = skipped
        self.modules = modules
        self.deadline = time.thread_time() + seconds  # without the time of other processes
        self.objects = 0
        self._owners: set[int] = set()  # ids of the objects whose attributes are listed already
        self._visited: dict[int, int] = {}
        self._kept: list[Any] = []  # copies, so that their ids stay theirs during one hash

    def attributes(self, path: str, value: Any) -> Iterator[tuple[str, str, str, Any]]:
        """Yield (path, ".NAME", class of its object, value) of each attribute of an object of a
        user's class, and of such objects in it."""
        pending = [(path, value)]
        while pending:
            where, owner = pending.pop()
            if id(owner) in self.skipped or id(owner) in self._owners:
                continue
            self._owners.add(id(owner))
            for name, item in attributes(owner):
                if self.is_object(item):
                    pending.append((f"{where}.{name}", item))
                elif id(item) not in self.skipped:
                    yield f"{where}.{name}", f".{name}", kind_of(owner), item

    def is_object(self, value: Any) -> bool:
        """Return whether the attributes of this value are compared one by one."""
        return id(value) not in self.skipped and is_plain_object(value, self.modules)

    def hash_of(self, value: Any) -> int:
        """Return a hash of the value's contents. Raises Unfinished at the limit."""
        self._visited, self._kept = {}, []
        found = self._hash(value, 0)
        self._visited, self._kept = {}, []
        return found

    def _hash(self, value: Any, depth: int) -> int:
        kind = type(value)
        if kind in PLAIN:
            return hash(plain_mark(value))
        self.objects += 1
        is_late = self.objects % 64 == 0 and time.thread_time() > self.deadline
        if self.objects > MAX_OBJECTS or depth > MAX_DEPTH or is_late:
            raise Unfinished("the limit of a look")
        if id(value) in self.skipped or is_opaque(kind):
            return hash(kind.__qualname__)
        if id(value) in self._visited:
            return self._visited[id(value)]
        self._visited[id(value)] = len(self._visited)
        return hash((kind.__qualname__, *self._contents(value, depth + 1)))

    def _contents(self, value: Any, depth: int) -> Iterator[int]:
        if isinstance(value, Tensor):
            yield from tensor_marks(value)
            return
        if isinstance(value, np.ndarray | np.generic):
            yield from array_marks(np.asarray(value))
        elif isinstance(value, bytearray | memoryview | array.array):
            yield hash(bytes(value[:MAX_BYTES]))
        elif isinstance(value, int | str | float):  # a subclass of them
            yield hash(str.__str__(value) if isinstance(value, str) else float(value))
        elif not isinstance(value, CONTAINERS):
            state = internal_state(value)
            self._kept.append(state)
            yield self._hash(state, depth)
        yield size_of(value)
        hashes = (self._hash(part, depth) for part in parts_of(value, MAX_ITEMS))
        yield from [sum(hashes)] if isinstance(value, set | frozenset) else hashes


class Marks:
    """What tells cheaply whether an object has changed: of each of its parts the content where that
    is small, and which object it is."""

    def __init__(self, value: Any) -> None:
        self._marks: list[tuple[Any, Any]] = []
        self._parts: list[Any] = []  # they keep their ids
        seen: set[int] = set()
        pending = [value]
        while pending and len(self._marks) < MAX_MARKS:
            part = pending.pop()
            kind = type(part)
            if kind in PLAIN:
                self._marks.append(plain_mark(part))
                continue
            self._marks.append((content_mark(part), id(part)))
            self._parts.append(part)
            if id(part) in seen or is_opaque(kind):
                continue
            seen.add(id(part))
            if size_of(part) <= MAX_PARTS and not isinstance(part, Tensor | np.ndarray):
                pending += parts_of(part, MAX_PARTS)

    def equal(self, other: Marks) -> bool:
        return self._marks == other._marks


def plain_mark(value: Any) -> tuple[type, Any]:
    kind = type(value)
    return kind, repr(value) if kind is float else value  # as text NaN is equal to itself


def content_mark(value: Any) -> Any:
    """Return bytes of an array, the version of a tensor, or a length."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else version_of(value)
    if isinstance(value, np.ndarray) and value.flags.c_contiguous and not value.dtype.hasobject:
        stride = value.nbytes // MAX_MARKED_BYTES + 1
        return value.reshape(-1)[::stride].tobytes()
    return size_of(value)


def container_kind(value: Any) -> Any:
    """Return the class of Python's that a container is of: its methods run no code of the user."""
    if not isinstance(value, CONTAINERS):
        return None
    return next(kind for kind in CONTAINERS if isinstance(value, kind))


def size_of(value: Any) -> int:
    """Return the length of a container; 0 for other values."""
    kind = container_kind(value)
    return kind.__len__(value) if kind else 0


def parts_of(value: Any, most: int) -> list[Any]:
    """Return what an object consists of: items of a container, the objects that a function keeps
    between its calls, the names and values of attributes.

    most  items, of a longer container a sample
    """
    parts: list[Any] = []
    kind = container_kind(value)
    size = size_of(value)
    if kind is dict:
        items = [*itertools.islice(dict.items(value), most)]
        if size > most:
            items += itertools.islice(reversed(dict.items(value)), most)
        parts = [*itertools.chain.from_iterable(items)]
    elif kind in (set, frozenset):
        parts = [*itertools.islice(kind.__iter__(value), most)]
    elif kind:
        parts = [*kind.__iter__(value)]
        if size > most:
            sample = parts[:: size // most + 1]
            parts = [*parts[: most // 4], *sample, *parts[-most // 4 :]]
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        parts = [*value.reshape(-1)[:most]]
    elif isinstance(value, functools.partial):
        parts = [value.func, value.args, value.keywords]
    elif isinstance(value, types.MethodType):
        parts = [value.__self__]
    elif isinstance(value, types.FunctionType):
        closure = [item for _, item in closure_of(value)]
        parts = [*closure, value.__defaults__, value.__kwdefaults__]
    return parts + [part for attribute in attributes(value) for part in attribute]


def tensor_marks(tensor: Tensor) -> Iterator[int]:
    """Yield hashes of a tensor's shape and bytes; of a large one, or one on a device, of a version
    counter."""
    tensor = tensor.detach() if type(tensor) is torch.nn.Parameter else tensor
    yield hash((tuple(tensor.shape), str(tensor.dtype)))
    is_plain = (
        type(tensor) is Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
    )
    is_large = tensor.numel() * tensor.element_size() > MAX_BYTES
    if is_large or not is_plain:
        if tensor.is_inference():
            return
        yield version_of(tensor)
    if is_plain and (not is_large or tensor.is_contiguous()):
        yield from array_marks(as_bytes(tensor).numpy())


def array_marks(values: np.ndarray[Any, Any]) -> Iterator[int]:
    """Yield hashes of an array's shape and bytes; of a large one of samples."""
    yield hash((values.shape, values.dtype.str))
    if values.dtype.hasobject:
        return
    if values.nbytes <= MAX_BYTES:
        yield hash(values.tobytes())
    else:
        flat = values.reshape(-1)
        stride = values.nbytes // MAX_BYTES | 1  # odd: each byte of a tensor's items in turn
        yield hash(flat[::stride].tobytes())
        yield hash(flat[: MAX_BYTES // flat.itemsize // 4].tobytes())


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


def closure_of(function: types.FunctionType) -> list[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    found = []
    for name, cell in cells:
        with suppress(ValueError):  # not assigned yet
            found.append((name, cell.cell_contents))
    return found


def internal_state(value: Any) -> Any:
    """Return the position of what exists to be consumed: a generator, an iterator, a file, random
    numbers; None for another value."""
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
    kind = type(value)
    if kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__"):
        with warnings.catch_warnings(), suppress(TypeError, AttributeError):
            warnings.simplefilter("ignore")  # itertools: no copies from Python 3.14 on
            return value.__reduce__()
        return repr(value) if kind is itertools.count else "unknown"
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


def is_plain_object(value: Any, modules: set[str]) -> bool:
    """Return whether this is an object of a class of these modules, or a namespace."""
    kind = type(value)
    is_own = kind.__module__ in modules and not is_opaque(kind)
    return kind is types.SimpleNamespace or (is_own and not isinstance(value, FUNCTIONS))


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
