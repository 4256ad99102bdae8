"""Compute the loss of 1,536 tokens over 128,256 words; print by how many bytes the process grew."""

import resource

import torch
import torch._dynamo  # custom operators import it, which would count as memory of the loss

from lockstep.models.loss import output_cross_entropy


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    states, weight = (
        torch.randn(1536, 8, requires_grad=True),
        torch.randn(128_256, 8, requires_grad=True),
    )
    before = peak_bytes()
    output_cross_entropy(
        states, weight, torch.arange(1536), smoothing=0.0, ignore_index=-100
    ).backward()
    print(peak_bytes() - before)
