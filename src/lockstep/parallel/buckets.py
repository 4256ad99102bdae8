"""Flat buffers for the gradients of a whole replica, filled during the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

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
    `missing` counts the gradients that have not arrived in this backward pass.
    """

    def __init__(self, indices: Sequence[int], parameters: Sequence[nn.Parameter]) -> None:
        self.indices, self.parameters, self.missing = indices, parameters, 0
        unit = ALIGN_BYTES // parameters[0].element_size()
        self._starts = list(
            accumulate((-(-p.numel() // unit) * unit for p in parameters), initial=0)
        )
        self.buffer = self._new_buffer()
        self.views = self.views_of(self.buffer)
        self._layout = self._current_layout()

    def _new_buffer(self) -> Tensor:
        """Return a buffer in which only the gaps are written: its other pages take no memory
        yet."""
        buffer = torch.empty(
            self._starts[-1], dtype=self.parameters[0].dtype, device=self.parameters[0].device
        )
        for p, start, stop in zip(
            self.parameters, self._starts[:-1], self._starts[1:], strict=True
        ):
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

    def start_pass(self) -> None:
        self.missing = len(self.indices)

    def count_gradient(self) -> None:
        self.missing -= 1

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

    on_ready  called with each bucket whose gradients are complete, in the order of the buckets
    order     of the parameters; None: the last one first, until `ready_order` is known
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        bucket_bytes: int,
        on_ready: Callable[[Bucket], None],
        order: list[int] | None = None,
    ) -> None:
        self.order, self._on_ready = order, on_ready
        self.ready_order: list[int] = []  # of the first backward pass
        sizes = [(p.dtype, p.nbytes) for p in parameters]
        groups = group_by_size(sizes, bucket_bytes, order or list(reversed(range(len(parameters)))))
        self.buckets = [Bucket(indices, [parameters[i] for i in indices]) for indices in groups]
        self._arrived = [False] * len(parameters)
        self.repeated: list[int] = []  # gradients that arrived twice in one backward pass
        self._fill = self._send = self._sum = False
        self.word_sums: list[
            Tensor
        ] = []  # of the gradients in this pass, where they were asked for
        self._launched = 0
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._on_gradient, bucket, i, view))
            for bucket in self.buckets
            for i, p, view in zip(bucket.indices, bucket.parameters, bucket.views, strict=True)
        ]

    def start_pass(self, *, fill: bool = False, send: bool = False, sums: bool = False) -> None:
        """Start a backward pass.

        fill  collect the gradients in the buffers
        send  report each complete bucket to `on_ready`
        sums  add the words of each gradient to `word_sums`
        """
        self._fill, self._send, self._launched = fill, send, 0
        self._sum, self.word_sums = sums, []
        self._arrived, self.repeated = [False] * len(self._arrived), []
        if len(self.ready_order) < len(self._hooks):
            self.ready_order = []
        for bucket in self.buckets:
            bucket.start_pass()

    def missing(self) -> list[int]:
        """Return the parameters, by number, whose gradient has not arrived in this pass."""
        return sorted(
            i
            for bucket in self.buckets
            if bucket.missing
            for i in bucket.indices
            if not self._arrived[i]
        )

    def known_order(self) -> list[int] | None:
        """Return the order of the buckets, or the one of the first complete backward pass."""
        if self.order or len(self.ready_order) < len(self._hooks):
            return self.order
        return [*self.ready_order, *sorted(set(range(len(self._arrived))) - set(self.ready_order))]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _on_gradient(self, bucket: Bucket, i: int, view: Tensor, parameter: Tensor) -> None:
        """Hook of autograd after it has added to the .grad of parameter `i`.

        Copied at once: the gradient is still in the cache, and its memory serves the next one.
        """
        if self._arrived[i]:
            self.repeated.append(i)
            return
        self._arrived[i] = True
        bucket.count_gradient()
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
        while (
            self._send
            and self._launched < len(self.buckets)
            and not self.buckets[self._launched].missing
        ):
            self._launched += 1
            self._on_ready(self.buckets[self._launched - 1])


def dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of a gradient: the parameter's if it has neither gaps nor overlaps."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.size(), strict=True)):
        if size > 1:
            if stride != expected:
                return torch.empty(parameter.size(), device="meta").stride()
            expected *= size
    return parameter.stride()
