"""CUDA kernels and NCCL, as described in docs/gpu.md. Two ranks share one GPU where NCCL allows it."""

from __future__ import annotations

import faulthandler
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn

from bench.gpu.check import NCCL_THAT_SHARES_GPUS, nccl_version
from lockstep.config.schema import OptimOptions
from lockstep.elastic.generation_group import NCCL_SETTINGS, start_aborts
from lockstep.models.llama import attend, positions_and_mask
from lockstep.runtime.numerics import make_deterministic
from lockstep.runtime.process_group import init_default_group, new_subgroup
from lockstep.runtime.torch_private import detach_groups, device_backends, is_in_bad_fork
from lockstep.runtime.work import WorkWaiter, start_p2p
from lockstep.tasks.optim import adamw
from lockstep.training.evaluation import on_cpu
from lockstep.training.loader import to_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
SHARED = {"LOCKSTEP_DEVICE": "cuda:0", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
GPU = torch.device("cuda", 0)


@pytest.fixture
def deterministic() -> Iterator[None]:
    make_deterministic(GPU)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture
def pair() -> dict[str, str]:
    """The environment of two ranks with NCCL: on two GPUs, or on one where NCCL allows it."""
    if torch.cuda.device_count() > 1:
        return {}
    if nccl_version() < NCCL_THAT_SHARES_GPUS:
        pytest.skip("one GPU here, and an NCCL before 2.30, which refuses two ranks on it")
    return SHARED


def digest(*tensors: Tensor) -> str:
    return hashlib.sha256(
        b"".join(tensor.detach().float().cpu().numpy().tobytes() for tensor in tensors)
    ).hexdigest()


# -- one process ------------------------------------------------------------------------------------------------------


def test_a_fork_after_cuda_is_detected() -> None:
    torch.zeros(1, device=GPU)
    child = os.fork()
    if not child:
        os._exit(not is_in_bad_fork())
    assert os.waitpid(child, 0)[1] == 0 and not is_in_bad_fork()


@pytest.mark.parametrize("packed", [True, False])
def test_attention_and_its_gradient_have_the_same_bits_each_time(
    deterministic: None, packed: bool
) -> None:
    documents = (
        torch.arange(2048, device=GPU).div(300, rounding_mode="floor")[None].expand(4, -1)
        if packed
        else None
    )
    generator = torch.Generator(GPU).manual_seed(1)

    def gradients() -> tuple[Tensor, ...]:
        generator.manual_seed(1)
        query, key, value = (
            torch.randn(
                4,
                heads,
                2048,
                64,
                generator=generator,
                device=GPU,
                dtype=torch.bfloat16,
                requires_grad=True,
            )
            for heads in (8, 2, 2)
        )
        with torch.autocast("cuda", torch.bfloat16):
            mask = positions_and_mask(
                torch.zeros(4, 2048, dtype=torch.int64, device=GPU), documents
            )[1]
            attended = attend(query, key, value, mask)
        attended.backward(
            torch.randn(attended.shape, generator=generator, device=GPU, dtype=attended.dtype)
        )
        return attended, *(heads.grad for heads in (query, key, value) if heads.grad is not None)

    assert len({digest(*gradients()) for _ in range(5)}) == 1


def test_packed_documents_attend_as_with_a_mask() -> None:
    documents = torch.tensor([[0] * 100 + [1] * 27 + [2], [0] + [1] * 127], device=GPU)
    query, key, value = (
        torch.randn(2, heads, 128, 64, device=GPU, dtype=torch.bfloat16) for heads in (4, 2, 2)
    )
    with torch.autocast("cuda", torch.bfloat16):
        ends = positions_and_mask(documents, documents)[1]
    mask = positions_and_mask(documents, documents)[1]
    assert isinstance(mask, Tensor)
    torch.testing.assert_close(
        attend(query, key, value, ends), attend(query, key, value, mask), atol=2e-2, rtol=2e-2
    )


def test_adamw_gives_the_same_bits_to_a_tensor_and_its_parts() -> None:
    whole, gradient = torch.randn(1000, 37, device=GPU), torch.randn(1000, 37, device=GPU)
    results = []
    for cut in (1000, 333, 64):
        model = nn.Module()
        model.parts = nn.ParameterList([part.clone() for part in whole.split(cut)])
        optimizer = adamw(model.named_parameters(), OptimOptions(), on_gpu=True)
        for _ in range(3):
            for parameter, grad in zip(model.parts, gradient.split(cut), strict=True):
                parameter.grad = grad.clone()
            optimizer.step()
        results.append(digest(torch.cat(list(model.parts))))
    assert len(set(results)) == 1


def test_an_operation_without_deterministic_kernel_is_refused(deterministic: None) -> None:
    image = torch.ones(1, 1, 4, 4, device=GPU, requires_grad=True)
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        F.max_unpool2d(image, torch.zeros(1, 1, 4, 4, dtype=torch.int64, device=GPU), 2)


def test_results_of_a_gather_are_complete_before_they_are_sent() -> None:
    """A copy to the CPU that does not wait would be read while the GPU still computes."""
    torch.cuda._sleep(200_000_000)  # cycles, about 0.1 s
    results = torch.full((1_000_000,), 3.0, device=GPU)
    copies = [on_cpu(results), to_device(results, torch.device("cpu"))]
    assert all(torch.equal(copy, torch.full((1_000_000,), 3.0)) for copy in copies)


# -- several processes ------------------------------------------------------------------------------------------------


def run_in_processes(
    function: Callable[..., Any], size: int, environ: dict[str, str], seconds: float = 120.0
) -> list[Any]:
    """Return function(rank, device) of processes with a common group; None: it was killed."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    arguments = [
        (function, rank, size, store.port, environ, pipes[rank][1]) for rank in range(size)
    ]
    processes = [
        context.Process(target=serve_rank, args=values, daemon=True) for values in arguments
    ]
    for process in processes:
        process.start()
    answers = [reader.recv() if reader.poll(seconds) else None for reader, _ in pipes]
    for process in processes:
        process.kill()
        process.join()
    return answers


def serve_rank(
    function: Callable[..., Any],
    rank: int,
    size: int,
    port: int,
    environ: dict[str, str],
    answer: Any,
) -> None:
    faulthandler.dump_traceback_later(40.0)  # what hangs is seen in the output of the test
    os.environ.update(NCCL_SETTINGS | environ)
    device = torch.device("cuda", 0 if environ else rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=False)
    init_default_group(store, rank, size, device, 60.0)
    answer.send(function(rank, device))
    time.sleep(1000)  # its groups must not close while others use them


def exchange_on_gpu(rank: int, device: torch.device) -> float:
    sent, received = (
        torch.full((4_000_000,), float(rank), device=device),
        torch.empty(4_000_000, device=device),
    )
    assert dist.group.WORLD is not None
    WorkWaiter(in_thread=False).wait(
        start_p2p([(1 - rank, sent)], [(1 - rank, received)], dist.group.WORLD)
    )
    return received.unique().item()


def test_two_workers_on_one_gpu_exchange_through_the_cpu() -> None:
    assert run_in_processes(exchange_on_gpu, 2, {"LOCKSTEP_DEVICE": "cuda:0"}) == [1.0, 0.0]


def test_two_ranks_send_and_receive_16_mb_at_once_through_nccl(pair: dict[str, str]) -> None:
    assert run_in_processes(exchange_on_gpu, 2, pair) == [1.0, 0.0]


def leave_a_hanging_collective(rank: int, device: torch.device) -> float:
    """Rank 1 takes no part in an all-reduce. Return how long rank 0 is blocked after the abort."""
    subgroup = new_subgroup([0, 1])
    tensor = torch.ones(1_000_000, device=device)
    dist.all_reduce(tensor, group=subgroup)  # NCCL connects in its first collective, on the CPU
    torch.cuda.synchronize()
    if rank:
        time.sleep(1000)
    dist.all_reduce(tensor, group=subgroup, async_op=True).wait()
    time.sleep(1.0)
    start_s = time.monotonic()
    backends = device_backends(device)
    aborts = start_aborts(backends)
    assert len(aborts) == 2
    torch.cuda.synchronize()
    blocked_s = time.monotonic() - start_s
    for thread in aborts.values():
        thread.join()
    groups = detach_groups()
    del backends
    while groups:
        groups.pop(0).shutdown()
    init_default_group(dist.HashStore(), 0, 1, device, 60.0)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    return blocked_s


def test_an_abort_wakes_a_collective_and_the_next_group_forms(pair: dict[str, str]) -> None:
    blocked_s, absent = run_in_processes(leave_a_hanging_collective, 2, pair, seconds=60.0)
    assert absent is None and blocked_s < 10.0
