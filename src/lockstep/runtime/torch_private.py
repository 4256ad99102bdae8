"""Every private name of torch that Lockstep uses, in one file.

Each entry gives the reason why no public name serves, as of torch 2.13; test_torch_private.py
checks each on any torch. torch._dynamo takes a second to import: functions import it when called.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from operator import attrgetter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _register_process_group, _unregister_all_process_groups
from torch._C._profiler import _ExperimentalConfig

# Shapes, and the kernels of a device, without data; no public form.
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

# Sees all operations; no public form.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_iter as tree_iter
from torch.utils._pytree import tree_map as tree_map

# -- tensors and modules ---------------------------------------------------------------------------

# Fused updates of lists of tensors, one kernel for all; only optimizers have a public form.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_

# Counter of in-place changes of a tensor; autograd's own check, without a public form.
version_of: Callable[[Tensor], int] = attrgetter("_version")

# A module's own parameters and buffers by name, live and with None; named_buffers() is a copy.
own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
non_persistent_buffers: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return model.modules() in the same order. That builds the names as well, 20 times as slow."""
    found: dict[int, nn.Module] = {}
    pending = [model]
    while pending:
        module = pending.pop()
        if id(module) not in found:
            found[id(module)] = module
            children = reversed(module._modules.values())
            pending += [child for child in children if child is not None]
    return list(found.values())


def unique_parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters that these modules hold themselves, each once."""
    held = (p for module in modules for p in module._parameters.values())
    return list({id(p): p for p in held if p is not None}.values())


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether functions are registered that see or change the gradient; no public way to
    ask."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether `module.compile` has been called; no public way to ask."""
    return module._compiled_call_impl is not None


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Return whether torch.compile has returned the module; its class is private."""
    return "_orig_mod" in module._modules


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether functions are registered that run with the module."""
    return hook_count(module) > 0


def hook_count(module: nn.Module) -> int:
    """Return how many functions are registered that run with the module; no public way to ask."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return sum(map(len, hooks))


# Attributes that a scheduler and a fused step of torch set on an optimizer.
OPTIMIZER_FLAGS = (
    "_opt_called",
    "_warned_capturable_if_run_uncaptured",
    "_need_device_dtype_check_for_fused",
    "_step_supports_amp_scaling",
    "_zero_grad_profile_name",
)


# -- operators -------------------------------------------------------------------------------------

aten = torch.ops.aten

# Name, arguments and is_mutable of an operator.
schema_of: Callable[[Any], Any] = attrgetter("_schema")

# The kernels of F.scaled_dot_product_attention; a checkpoint policy sees these, not the function.
ATTENTION_OPS = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)


def softmax_backward(grad: Tensor, output: Tensor) -> Tensor:
    """Gradient of a softmax over the last dimension, fused; autograd alone calls it publicly."""
    return cast(Tensor, aten._softmax_backward_data(grad, output, -1, output.dtype))


def pack_linear_weight(weight: Tensor, rows: int) -> Tensor:
    """Pack a weight for oneDNN, as torch.compile packs frozen weights; publicly only float32."""
    return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight, rows))


def packed_linear(states: Tensor, packed_weight: Tensor) -> Tensor:
    """Linear layer with a weight of `pack_linear_weight`."""
    return cast(
        Tensor, torch.ops.mkldnn._linear_pointwise(states, packed_weight, None, "none", [], "")
    )


# -- CUDA ------------------------------------------------------------------------------------------


def is_in_bad_fork() -> bool:
    """Return whether this process was forked from one that had initialized CUDA; an error
    publicly."""
    return cast(bool, torch.cuda._is_in_bad_fork())


# -- process groups --------------------------------------------------------------------------------


def backend_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of the group's CPU backend; there is no public way to read it."""
    return group._get_backend(torch.device("cpu")).options._timeout


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup | None) -> None:
    """Set the timeout of collectives of a formed group; publicly only while it is formed."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def device_backends(device: torch.device) -> list[Any]:
    """Return the backend for tensors on `device` of each group; publicly a group has no
    backends."""
    return [group._get_backend(device) for group in list(dist.distributed_c10d._world.pg_names)]


def detach_groups() -> list[dist.ProcessGroup]:
    """Make torch forget all groups, and return them, still open, the newest first.
    destroy_process_group forgets them only when all are closed, which may block; until then no
    other default group can form."""
    world = dist.distributed_c10d._world
    groups = sorted(world.pg_names, key=lambda group: world.pg_names[group], reverse=True)
    dist.distributed_c10d._update_default_pg(None)
    world.pg_map.clear()
    world.pg_names.clear()
    world.pg_group_ranks.clear()
    world.pg_backend_config.clear()
    world.pg_to_tag.clear()
    world.tags_to_pg.clear()
    world.pg_coalesce_state.clear()
    _unregister_all_process_groups()
    return groups


def reset_group_count() -> None:
    """Restart the numbers of groups, part of their keys in the store, equal on all ranks then."""
    dist.distributed_c10d._world.group_count = 0


def mesh_without_backend(device_type: str, rank: int, size: int, name: str) -> DeviceMesh:
    """Return a mesh of one dimension, "shard", whose group defines ranks and cannot send.
    A public DeviceMesh forms groups with a backend, which could not change between generations."""
    mesh = DeviceMesh(
        device_type, list(range(size)), mesh_dim_names=("shard",), _init_backend=False, _rank=rank
    )
    # The store is optional.
    mesh._pg_registry[name] = dist.ProcessGroup(rank, size)  # type: ignore[call-arg]
    mesh._dim_group_names = [cast(Any, name)]
    _register_process_group(cast(Any, name), mesh._pg_registry[name])  # which holds it weakly
    return mesh


def init_fsdp(model: nn.Module) -> None:
    """Do FSDP's lazy initialization now; publicly it runs with the first forward pass."""
    cast(Any, model)._get_fsdp_state()._lazy_init()


def fsdp_shard_rows(unit: object, shards: int) -> list[tuple[int, int]]:
    """Return (elements, elements of a row) of each trained parameter in a shard's part of what FSDP
    reduces for a unit, with the rows that fill it up; its order and shapes are not public."""
    group = cast(Any, unit)._get_fsdp_state()._fsdp_param_group
    shapes = [
        p._orig_size for p in (group.fsdp_params if group else ()) if p.sharded_param.requires_grad
    ]
    rows = [(-(-shape[0] // shards), math.prod(shape[1:])) for shape in shapes]
    return [(count * row, row) for count, row in rows]


def fsdp_parameters(unit: object) -> list[nn.Parameter]:
    """Return the parameters that FSDP sets in a unit's modules, sharded and gathered; not
    public."""
    group = cast(Any, unit)._get_fsdp_state()._fsdp_param_group
    params = group.fsdp_params if group else ()
    gathered = [p._unsharded_param for p in params if hasattr(p, "_unsharded_param")]
    return [*(p.sharded_param for p in params), *gathered]


# The slice of a sharded tensor; publicly a new view of it, with a node of autograd.
slice_of_dtensor: Callable[[Any], Tensor] = attrgetter("_local_tensor")


def collectives_of(group: Any) -> int:
    """Return how many collectives this process has started on the group; no public counter."""
    return int(group._get_sequence_number_for_group())


# -- compilation and profiling ---------------------------------------------------------------------


def on_compile(start: Callable[[object], None], end: Callable[[object], None]) -> None:
    """Call `start` and `end` whenever torch.compile starts and ends its work; no public hook."""
    import torch._dynamo.callback

    torch._dynamo.callback.on_compile_start(start)
    torch._dynamo.callback.on_compile_end(end)


def compile_counters() -> Mapping[str, Mapping[str, int]]:
    """Return torch.compile's counters: ["stats"]["unique_graphs"]."""
    import torch._dynamo.utils

    return torch._dynamo.utils.counters


def graph_breaks() -> list[tuple[str, str]]:
    """Return (FILE:LINE and its code, reason) of each graph break. Its counter has no branches."""
    import torch._dynamo.utils

    breaks = []
    for found in torch._dynamo.utils.graph_break_reasons:
        stack = found.user_stack
        own = [frame for frame in stack if not frame.filename.startswith(torch.__path__[0])]
        frame = (own or stack)[-1]
        breaks.append((f"{frame.filename}:{frame.lineno}: {frame.line}", found.reason))
    return breaks


def set_recompile_limit(limit: int) -> None:
    """Set how many shapes torch.compile specializes for; an argument of it only from torch 2.13."""
    import torch._dynamo

    torch._dynamo.config.cache_size_limit = limit


def inductor_freezing(enabled: bool) -> AbstractContextManager[None]:
    """Compile weights as constants while entered; torch.compile's `options` miss dynamo's part."""
    import torch._inductor.config

    return cast(AbstractContextManager[None], torch._inductor.config.patch(freezing=enabled))


def dump_memory_snapshot(path: str) -> None:
    """Write what torch has allocated on the GPU, for https://docs.pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)


def profile_all_threads() -> _ExperimentalConfig:
    """Return the profiler option to record threads that start later too; no public name."""
    return _ExperimentalConfig(profile_all_threads=True)
