"""Flat buffers for the gradients of a whole replica, filled during the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor, nn

from lockstep.network.bucket_sizes import group_by_size
from lockstep.parallel.digest import word_sum
from lockstep.runtime.torch_private import foreach_copy_

ALIGN_BYTES = 64  # of the first element of a gradient, as of memory that torch allocates


class Bucket:
    """A flat buffer with a view for the gradient of each of its parameters.

    A view has the memory format of its parameter, and starts at a multiple of ALIGN_BYTES: on some
    processors the bits of a matrix product depend on where its operands start. The gaps hold zeros.
    """

    def __init__(self, indices: Sequence[int], parameters: Sequence[nn.Parameter]) -> None:
        self.indices = indices
        self.parameters = parameters
        unit = ALIGN_BYTES // parameters[0].element_size()
        sizes = (-(-p.numel() // unit) * unit for p in parameters)
        self._starts = list(accumulate(sizes, initial=0))
        self.buffer = self._new_buffer()
        self.views = self.views_of(self.buffer)
        self._layout = self._current_layout()

    def _new_buffer(self) -> Tensor:
        """Return a buffer in which only the gaps are written: its other pages take no memory
        yet."""
        like = self.parameters[0]
        buffer = torch.empty(self._starts[-1], dtype=like.dtype, device=like.device)
        for p, (start, stop) in zip(self.parameters, pairwise(self._starts), strict=True):
            buffer[start + p.numel() : stop].zero_()
        return buffer

    def views_of(self, buffer: Tensor) -> list[Tensor]:
        """Return views of the gradients, in memory order, which count in-place changes
        separately."""
        first = buffer.storage_offset()
        rows = zip(self._starts[:-1], self.parameters, strict=True)
        return [
            buffer.data.as_strided(p.size(), dense_strides(p), first + start) for start, p in rows
        ]

    def is_current(self) -> bool:
        """Return False after model.to(...), which replaces the memory of parameters and of
        .grad."""
        return self._layout == self._current_layout()

    def _current_layout(self) -> list[tuple[object, ...]]:
        return [
            (p.dtype, p.stride(), view.data_ptr())
            for p, view in zip(self.parameters, self.views, strict=True)
        ]

    def flatten(self, gradients: list[Tensor]) -> Tensor:
        """Copy gradients of these parameters into a new flat buffer."""
        flat = self._new_buffer()
        foreach_copy_(self.views_of(flat), gradients)
        return flat


class GradientBuckets:
    """The buckets of `parameters`, in the order in which their gradients become ready.

    limit     bytes of a bucket
    on_ready  called with each bucket whose gradients are complete, in the order of the buckets
    order     of the parameters; None: the last one first, until `ready_order` is known
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        limit: int,
        on_ready: Callable[[Bucket], None],
        order: list[int] | None = None,
    ) -> None:
        self.order = order
        self._on_ready = on_ready
        self.ready_order: list[int] = []  # of the first backward pass
        self._count = len(parameters)
        sizes = [(p.dtype, p.nbytes) for p in parameters]
        groups = group_by_size(sizes, limit, order or range(self._count)[::-1])
        self.buckets = [Bucket(indices, [parameters[i] for i in indices]) for indices in groups]
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._on_gradient, number, i, view))
            for number, bucket in enumerate(self.buckets)
            for i, p, view in zip(bucket.indices, bucket.parameters, bucket.views, strict=True)
        ]
        self.start_pass()

    def start_pass(self, *, fill: bool = False, send: bool = False, sums: bool = False) -> None:
        """Start a backward pass.

        fill  collect the gradients in the buffers
        send  report each complete bucket to `on_ready`
        sums  add the words of each gradient to `word_sums`
        """
        self._fill = fill
        self._sum = sums
        self.word_sums: list[Tensor] = []
        self._unsent = self.buckets[::-1] if send else []
        self._waiting = [set(bucket.indices) for bucket in self.buckets]
        self.repeated: list[int] = []  # gradients that arrived twice in one backward pass
        if len(self.ready_order) < len(self._hooks):
            self.ready_order = []

    def missing(self) -> list[int]:
        """Return the parameters, by number, whose gradient has not arrived in this pass."""
        return sorted(chain(*self._waiting))

    def known_order(self) -> list[int] | None:
        """Return the order of the buckets, or the one of the first complete backward pass."""
        if self.order or len(self.ready_order) < len(self._hooks):
            return self.order
        return [*self.ready_order, *sorted(set(range(self._count)) - set(self.ready_order))]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _on_gradient(self, number: int, i: int, view: Tensor, parameter: Tensor) -> None:
        """Hook of autograd after it has added to the .grad of parameter `i`.

        Copied at once: the gradient is still in the cache, and its memory serves the next one.
        """
        if i not in self._waiting[number]:
            self.repeated.append(i)
            return
        self._waiting[number].remove(i)
        if len(self.ready_order) < len(self._hooks):
            self.ready_order.append(i)
        gradient = parameter.grad
        if self._sum and gradient is not None and not gradient.is_sparse:
            self.word_sums.append(word_sum(gradient))
        if not self._fill or gradient is None or gradient.is_sparse:
            return
        if gradient is not view:
            view.copy_(gradient)
            parameter.grad = view
        while self._unsent and not self._waiting[-len(self._unsent)]:
            self._on_ready(self._unsent.pop())


def dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of a gradient: the parameter's if it has neither gaps nor overlaps."""
    expected = 1
    # Dense: by ascending stride, each stride is the product of the sizes before.
    for stride, size in sorted(zip(parameter.stride(), parameter.size(), strict=True)):
        if size > 1:
            if stride != expected:
                return torch.empty(parameter.size(), device="meta").stride()
            expected *= size
    return parameter.stride()
