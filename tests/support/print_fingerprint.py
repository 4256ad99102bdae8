"""Print a digest of products and the results of the probes: test_numerics.py."""

import torch

from lockstep.runtime import numerics

torch.set_num_threads(1)
left, right = (
    torch.rand(size, generator=torch.Generator().manual_seed(1)) for size in ((96, 700), (700, 48))
)
results = [
    left @ right,
    left.bfloat16() @ right.bfloat16(),
    torch.nn.functional.gelu(left),
    left.log_softmax(-1),
]
print(numerics.sha256_of(results), sorted(numerics.probe_results("cpu", 1).items()))
