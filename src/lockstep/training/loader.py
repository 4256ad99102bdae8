"""Micro-batches of a data set by (seed, step, micro-batch), loaded here or in worker processes.

A DataLoader is an iterator: what it yields next depends on what was taken before. Here a
micro-batch is requested by its key (step, k), so a failure, a resume or another number of workers
changes nothing. Worker processes only prefetch the keys that come next.
"""

from __future__ import annotations

import copy
import logging
import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from lockstep.data.order import BucketOrder, MixtureOrder, UniformOrder, splitmix64
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import UsageError
from lockstep.runtime.numerics import seed_generators
from lockstep.runtime.sockets import open_sockets
from lockstep.runtime.tensor_bytes import tensors_of

log = logging.getLogger("lockstep")

Key = tuple[int, int]  # (step, micro-batch)
Order = UniformOrder | BucketOrder | MixtureOrder
IGNORED = -100  # the label that torch's losses leave out of their mean
Collate = Callable[[list[Any]], Any]
SAMPLES = 1  # separates the random numbers of the samples from those of the model
CPU = torch.device("cpu")


class KeyedBatches(Dataset[Any]):
    """Collated micro-batches by (step, k), which also seed the random draws of the samples.

    dataset     has __len__ and __getitem__, or __getitems__ for several samples at once. Keep its
                content: a resumed Session detects another length, not other content
    order       which samples belong to which micro-batch
    collate_fn  makes a micro-batch of a list of samples; None: torch's default_collate
    """

    def __init__(self, dataset: Any, order: Order, collate_fn: Collate | None) -> None:
        self.dataset = dataset
        self.order = order
        self.collate_fn = collate_fn or default_collate

    def __getitem__(self, key: Key) -> Any:
        seed_generators(splitmix64(self.order.seed, *key, SAMPLES) >> 1, CPU)
        if makes_micro_batches(self.dataset):
            return self.dataset.micro_batch(*key)
        ids = self.order.ids(*key).tolist()
        if self.collate_fn is default_collate and (rows := rows_of_tensors(self.dataset, ids)):
            return rows
        return self.collate_fn(get_samples(self.dataset, ids))


class Prefetch:
    """Worker processes that load the micro-batches which this worker needs next."""

    def __init__(
        self,
        batches: KeyedBatches,
        runtime: ElasticRuntime,
        own_leaves: Callable[[], Sequence[int]],
        num_workers: int,
    ) -> None:
        self.batches = batches
        self.runtime = runtime
        self.own_leaves = own_leaves
        self.num_workers = num_workers
        self._stream: Iterator[Any] | None = None  # yields the micro-batches of `_keys` in order
        self._keys: Iterator[Key] = iter(())
        self._next: Key = (-1, -1)
        self._last: Key = (-1, -1)
        self._members: tuple[int, ...] = ()  # generation and micro-batches of the stream
        # Few loaders have processes, and a Session loads this module with the first one.
        from lockstep.unsaved.values import Marks

        self._take_marks = partial(Marks, batches.dataset)
        self._marks = self._take_marks()  # of the data set that the processes of the stream have
        self._has_warned = False

    def close(self) -> None:
        self._stream = None

    def __getitem__(self, key: Key) -> Any:
        own = self.own_leaves()
        members = (self.runtime.world.generation, *own)
        repeated = key[1] not in own or (
            members == self._members and (key == self._last or key[0] == self._next[0] != -1)
        )
        if repeated and key != self._next:
            batch = self.batches[key]  # the rehearsal of the first step asks out of turn
            self._marks = self._take_marks()  # a data set may count or keep its samples
            return batch
        if self._stream is None or members != self._members or key != self._next:
            self._members, self._keys = members, keys_from(*key, own)
            self._next = next(self._keys)
            self._stream = self._start(keys_from(*key, own))
        self._last, self._next = key, next(self._keys)
        return next(self._stream)

    def follow_data(self, step: int) -> None:
        """Stop processes that hold the data set as it was before a change by the loop."""
        marks = self._take_marks()
        if self._stream is not None and not marks.equal(self._marks):
            self._stream = None
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "the data set has changed at step %d: the processes that load it start again, "
                    "with its new values, and so after every change (shown once)",
                    step + 1,
                )
        self._marks = marks

    def _start(self, keys: Iterator[Key]) -> Iterator[Any]:
        self._stream = None  # stops the processes before others start
        loader: DataLoader[Any] = DataLoader(
            self.batches,
            batch_size=None,
            sampler=keys,  # any iterable of keys
            collate_fn=unchanged,
            num_workers=self.num_workers,
            pin_memory=self.runtime.world.device.type == "cuda",
            worker_init_fn=release_sockets,
        )
        return iter(loader)


class Loader:
    """The micro-batches of a step on this worker's device: `for batch in loader(step)`. Stateless.

    batches        of all workers, by (step, k)
    micro_batches  yields the numbers of this worker's micro-batches (Session.micro_batches)
    own_leaves     returns these numbers, in a step
    num_workers    processes that prefetch; 0: samples are loaded in the training process
    """

    def __init__(
        self,
        batches: KeyedBatches,
        runtime: ElasticRuntime,
        micro_batches: Callable[[int], Iterator[int]],
        own_leaves: Callable[[], Sequence[int]],
        num_workers: int,
    ) -> None:
        self.batches = batches
        self.order = batches.order
        self.runtime = runtime
        self._micro_batches = micro_batches
        self._prefetch = None
        if num_workers:
            self._prefetch = Prefetch(self.batches, runtime, own_leaves, num_workers)
        self._batch: Any = None  # the micro-batch that the loop has, before its copy to the device
        self.newest_step = -1
        self._waited_s = 0.0  # for micro-batches, since it was last asked for
        self._sizes = MeanSizes()

    def __call__(self, step: int) -> Iterator[Any]:
        """Collective. Yield this worker's micro-batches; after a failure, its new share."""
        seed, device = self.order.seed, self.runtime.world.device
        if self._prefetch:
            self._prefetch.follow_data(step)
        self.newest_step = step
        for k in self._micro_batches(step):
            start_s = time.perf_counter()
            self._batch = (self._prefetch or self.batches)[step, k]
            batch = to_device(self._batch, device)
            self._waited_s += time.perf_counter() - start_s
            # As ReplicaGroup does: the model draws the same numbers, however samples are loaded.
            seed_generators(splitmix64(seed, step, k) >> 1, device)
            yield batch
            self._batch = None

    def batch(self, step: int, k: int) -> Any:
        """Return micro-batch `k` of a step on this worker's device, whichever worker trains it."""
        return to_device(self.batches[step, k], self.runtime.world.device)

    @property
    def sample_kind(self) -> str:
        """What the numbers of samples count: a data set that makes micro-batches may say it."""
        return str(getattr(self.batches.dataset, "sample_kind", "samples"))

    def samples(self, step: int, k: int) -> list[int]:
        """Return the numbers of the samples in micro-batch `k`, as the data set numbers them."""
        named = getattr(self.batches.dataset, "samples", None)
        if makes_micro_batches(self.batches.dataset) and named:
            return list(named(step, k))
        return sorted(self.order.ids(step, k).tolist())

    def take_waited_s(self) -> float:
        """Return the seconds that this worker has waited for micro-batches since the last call."""
        waited_s = self._waited_s
        self._waited_s = 0.0
        return waited_s

    def samples_in_step(self, step: int, trained: Sequence[int] | None) -> int | None:
        """Return the samples of all workers in `step`; None if the loop took others, or under a
        token budget.

        trained  the micro-batches that were not skipped; None: all
        """
        if step != self.newest_step or isinstance(self.order, BucketOrder):
            return None
        micro_batches = self.order.micro_batches
        return self.order.batch_size // micro_batches * len(trained or range(micro_batches))

    def samples_of_mean(self) -> int | None:
        """Return the number of samples of the micro-batch that the loop has now, whose loss is a
        mean; None without one. Warns once when the sizes of micro-batches differ otherwise.

        UsageError for an order whose micro-batches have different numbers of samples.
        """
        if self._batch is None:
            return None
        if isinstance(self.order, BucketOrder):
            what, where = (
                "micro-batches under a token budget have different numbers of samples",
                "session.backward(loss), without count",
            )
            raise UsageError(
                what,
                where,
                "give the sum and the number of tokens or samples it is over: "
                "session.backward(loss_sum, count=n)",
            )
        return self._sizes.samples(
            Sizes.of(self._batch), self.order.batch_size // self.order.micro_batches
        )

    def __iter__(self) -> Iterator[Any]:
        raise UsageError(
            "the loader was iterated without a step",
            "for ... in loader",
            "write `for batch in loader(step)`",
        )

    def close(self) -> None:
        """Stop the worker processes."""
        if self._prefetch:
            self._prefetch.close()


def keys_from(step: int, k: int, own: Sequence[int]) -> Iterator[Key]:
    """Yield the keys of a worker's micro-batches, starting with (step, k), forever."""
    while True:
        yield from ((step, number) for number in own if number >= k)
        step, k = step + 1, 0


def rows_of_tensors(dataset: Any, ids: Sequence[int]) -> list[torch.Tensor]:
    """Return what default_collate makes of these samples of a TensorDataset, or of a Subset of one:
    of each tensor its rows, taken at once. [] for other data sets, subclasses of these, and indices
    that are not plain numbers."""
    while type(dataset) is Subset:
        ids = [dataset.indices[i] for i in ids]
        dataset = dataset.dataset
    is_plain = type(dataset) is TensorDataset and all(type(i) is int and i >= 0 for i in ids)
    if not is_plain or any(t.layout != torch.strided or t.is_nested for t in dataset.tensors):
        return []
    rows = torch.tensor(ids)
    # Contiguous, as a stack of samples is, for any strides of the data set.
    return [tensor.index_select(0, rows.to(tensor.device)) for tensor in dataset.tensors]


def get_samples(dataset: Any, ids: Sequence[int]) -> list[Any]:
    if hasattr(dataset, "__getitems__"):
        return list(dataset.__getitems__(list(ids)))
    return [dataset[i] for i in ids]


def makes_micro_batches(dataset: Any) -> bool:
    """Return whether a data set makes whole micro-batches, by step and number."""
    return callable(getattr(dataset, "micro_batch", None))


def number_of_samples(dataset: Any, where: str) -> int:
    """Return the length. UsageError for a data set without length or index (IterableDataset)."""
    if isinstance(dataset, tuple) and all(isinstance(tensor, torch.Tensor) for tensor in dataset):
        raise UsageError(
            "a tuple of tensors is not a data set",
            where,
            "pass torch.utils.data.TensorDataset(x, y)",
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or isinstance(
        dataset, torch.utils.data.IterableDataset
    ):
        raise UsageError(
            f"{type(dataset).__name__} has no length or no index",
            where,
            "pass a data set with __len__ and __getitem__, "
            "such as lockstep.index_dataset(stream, folder), which writes a stream once: "
            "a step's samples are found by their number, after a failure and a resume too",
        )
    return len(dataset)


def unchanged(batch: Any) -> Any:
    """Return a micro-batch as KeyedBatches made it."""
    return batch


def release_sockets(worker_id: int) -> None:
    """Close the sockets that a loading process inherited, so that peers notice when the training
    process dies."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor, _ in open_sockets():
        # Not closed: an object of the training process may still close this number.
        os.dup2(null, descriptor)


@dataclass(frozen=True)
class Sizes:
    """Shapes of a micro-batch's tensors, and the number of labels that a mean leaves out."""

    shapes: tuple[tuple[int, ...], ...]
    ignored: int

    @classmethod
    def of(cls, batch: Any) -> Sizes:
        tensors = list(tensors_of(batch))
        integers = [tensor for tensor in tensors if tensor.dtype == torch.int64]
        return cls(
            tuple(tuple(tensor.shape) for tensor in tensors),
            sum(int((tensor == IGNORED).sum()) for tensor in integers),
        )

    def samples(self, rows: int | None) -> int | None:
        """Return the common number of rows, at most `rows`: some collate functions leave samples
        out. Tensors with other numbers of rows may be anything, such as nodes of graphs: `rows`."""
        numbers = {shape[0] for shape in self.shapes if shape}
        return min(*numbers, *numbers if rows is None else [rows]) if len(numbers) == 1 else rows

    def __str__(self) -> str:
        shapes = ", ".join(" x ".join(map(str, shape)) or "1" for shape in self.shapes)
        return shapes + f" ({self.ignored} labels of {IGNORED})" * bool(self.ignored)


class MeanSizes:
    """The sizes of micro-batches whose loss is a mean."""

    def __init__(self) -> None:
        self.first: Sizes | None = None
        self.warned = False

    def samples(self, sizes: Sizes, rows: int | None = None) -> int | None:
        """Return `sizes.samples(rows)`. Warns once when micro-batches of as many samples differ."""
        self.first = self.first or sizes
        samples = sizes.samples(rows)
        if sizes != self.first and samples == self.first.samples(rows) and not self.warned:
            self.warned = True
            log.warning(
                "micro-batches differ: %s, then %s. "
                "session.backward(loss) gives each the same weight: right for a mean over samples, "
                "wrong for a mean over tokens, which needs session.backward(loss_sum, count=n)",
                self.first,
                sizes,
            )
        return samples


def to_device(value: Any, device: torch.device) -> Any:
    """Return `value` with every tensor on `device`; see `map_tensors`. A copy to the CPU is
    complete."""
    waits = device.type == "cpu"
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=not waits), device)


def map_tensors(
    value: Any, function: Callable[[torch.Tensor], torch.Tensor], device: torch.device | None = None
) -> Any:
    """Return `value` with function(tensor) for every tensor in it: in mappings, lists, tuples and
    dataclasses, which keep their classes. What needs no change is returned itself, and nothing is
    changed in place.

    device  to which objects with a method `to` are moved; None: they stay
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if device and callable(getattr(value, "to", None)):
        return value.to(device)
    if isinstance(value, Mapping):
        moved = {key: map_tensors(item, function, device) for key, item in value.items()}
        is_same = all(moved[key] is item for key, item in value.items())
        return value if is_same else with_items(value, moved)
    if isinstance(value, list | tuple):
        items = [map_tensors(item, function, device) for item in value]
        is_same = all(map(operator.is_, items, value))
        return value if is_same else with_sequence(value, items)
    if is_dataclass(value) and not isinstance(value, type):
        clone = copy.copy(value)  # its constructor may take other arguments
        for name in (field.name for field in fields(value)):
            item = map_tensors(getattr(value, name), function, device)
            object.__setattr__(clone, name, item)
        return clone
    return value


def with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the same class with other values, as torch's pin_memory does."""
    if isinstance(mapping, MutableMapping):
        clone = copy.copy(mapping)
        for key, item in items.items():
            clone[key] = item  # one by one: the outputs of transformers refuse update
        return clone
    try:
        return type(mapping)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def with_sequence(sequence: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    """Return a list or tuple of the same class and attributes with other items.

    The class of a tuple is not called: it may take other arguments.
    """
    if isinstance(sequence, list):
        clone = copy.copy(sequence)
        clone[:] = items
        return clone
    moved = tuple.__new__(type(sequence), items)
    if attributes := getattr(sequence, "__dict__", {}):
        vars(moved).update(attributes)
    return moved
