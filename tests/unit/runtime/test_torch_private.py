"""Each private name of torch exists and behaves as it is used, and no other file of src has one."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from lockstep.runtime import torch_private as private
from lockstep.runtime.torch_private import TorchDispatchMode

SRC = Path(__file__).parents[3] / "src"
PRIVATE_ATTRIBUTES = {  # of torch's objects; a name that starts at a torch module needs no entry
    "_version", "_buffers", "_parameters", "_non_persistent_buffers_set", "_get_backend", "_timeout",
    "_get_fsdp_state", "_lazy_init", "_pg_registry", "_dim_group_names", "_get_sequence_number_for_group",
    "_local_tensor", "_unsharded_param",
    "_backward_hooks", "_post_accumulate_grad_hooks", "_forward_hooks", "_forward_pre_hooks", "_backward_pre_hooks",
}  # fmt: skip


# -- where private names are ------------------------------------------------------------------------------------------


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def private_names(source: str) -> Iterator[str]:
    """Yield the private names of torch in a Python file as `line: name`."""
    tree = ast.parse(source)
    modules = {"torch"}  # local names of torch, its modules and what is taken from them
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = [(alias.name, alias.asname) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported = [
                (f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names
            ]
        else:
            continue
        for path, local in imported:
            if path.split(".")[0] == "torch":
                modules.add(local or "torch")
                if any(map(is_private, path.split("."))):
                    yield f"{node.lineno}: {path}"
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Attribute)
            and ast.unparse(node.value).split(".")[0] in modules
        ):
            modules |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = ast.unparse(node.value).split(".")[0]
            if root in modules or (node.attr in PRIVATE_ATTRIBUTES and root != "self"):
                yield f"{node.lineno}: {ast.unparse(node)}"


def test_no_other_file_of_src_has_a_private_name_of_torch() -> None:
    files = [path for path in SRC.rglob("*.py") if path.name != "torch_private.py"]
    hits = [
        f"{path.relative_to(SRC)}:{name}"
        for path in files
        for name in private_names(path.read_text())
    ]
    assert not hits, "move these to lockstep/runtime/torch_private.py:\n" + "\n".join(hits)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from torch._C import thing", "torch._C.thing"),
        ("from torch import _dynamo", "torch._dynamo"),
        ("import torch._inductor.config", "torch._inductor.config"),
        (
            "import torch.distributed as dist\ndist.distributed_c10d._world",
            "dist.distributed_c10d._world",
        ),
        ("import torch\naten = torch.ops.aten\naten._softmax", "aten._softmax"),
        ("def f(module): return module._buffers", "module._buffers"),
    ],
)
def test_a_private_name_is_found(source: str, name: str) -> None:
    assert [hit.partition(": ")[2] for hit in private_names(source)] == [name]


def test_modules_and_parameters_are_found_in_torchs_order() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.Sequential()), "b": shared})
    model["c"] = nn.Sequential(nn.BatchNorm1d(2), nn.TransformerEncoderLayer(4, 2, 8))
    model["c"].register_module("nothing", None)
    model["a"][0].weight = model["c"][0].weight  # shared by two modules
    assert list(map(id, private.modules_of(model))) == list(map(id, model.modules()))
    parameters = list(map(id, private.unique_parameters(private.modules_of(model))))
    assert parameters == list(map(id, model.parameters()))


def test_names_of_other_libraries_and_strings_are_allowed() -> None:
    assert list(private_names('import os\nos._exit(1)\nPRELOAD = ["torch._dynamo"]')) == []


def test_importing_the_file_does_not_import_dynamo() -> None:
    code = "import sys, lockstep.runtime.torch_private; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- tensors and modules ----------------------------------------------------------------------------------------------


def test_foreach_operations_change_their_first_operand() -> None:
    sums = [torch.ones(2), torch.ones(3)]
    private.foreach_add_(sums, [torch.ones(2), torch.full((3,), 2.0)])
    private.foreach_mul_(sums, torch.tensor(2.0))
    assert [tensor.tolist() for tensor in sums] == [[4.0] * 2, [6.0] * 3]
    private.foreach_copy_(sums, [torch.zeros(2), torch.ones(3)])
    assert [tensor.tolist() for tensor in sums] == [[0.0] * 2, [1.0] * 3]


def test_what_torch_sets_on_an_optimizer_while_it_trains_is_listed() -> None:
    for fused in (False, True):
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=fused)
        before = dict(vars(optimizer))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        weight.grad = torch.ones(2)
        optimizer.step()
        scheduler.step()
        changed = {
            name
            for name, value in vars(optimizer).items()
            if name not in before or before[name] is not value
        }
        assert changed - {"step"} <= set(private.OPTIMIZER_FLAGS)


def test_version_of_counts_changes_in_place() -> None:
    tensor = torch.zeros(2)
    before = private.version_of(tensor)
    tensor.add_(1)
    assert private.version_of(tensor) == before + 1


def test_own_parameters_and_buffers_are_live_and_without_children() -> None:
    norm = nn.BatchNorm1d(2, affine=False)
    norm.register_buffer("scratch", torch.zeros(1), persistent=False)
    norm.child = nn.Linear(1, 1)
    assert private.own_parameters(norm) == {"weight": None, "bias": None}
    assert list(private.own_buffers(norm)) == [
        "running_mean",
        "running_var",
        "num_batches_tracked",
        "scratch",
    ]
    assert private.non_persistent_buffers(norm) == {"scratch"}
    private.own_buffers(norm)["scratch"] = torch.ones(1)
    assert norm.scratch.item() == 1.0


# -- operators --------------------------------------------------------------------------------------------------------


def test_a_schema_names_an_operator_and_its_writes() -> None:
    fill, empty = (
        private.schema_of(op)
        for op in (private.aten.fill_.Scalar, private.aten.empty.memory_format)
    )
    assert (fill.name, fill.is_mutable, empty.is_mutable) == ("aten::fill_", True, False)
    assert "device" in [argument.name for argument in empty.arguments]


def test_trees_are_mapped_and_iterated() -> None:
    tree = (1, {"a": [2, 3]})
    assert list(private.tree_iter(tree)) == [1, 2, 3] and private.tree_map(
        lambda leaf: -leaf, tree
    ) == (-1, {"a": [-2, -3]})


def test_attention_on_a_cpu_calls_one_of_the_attention_ops() -> None:
    query = torch.randn(1, 2, 4, 8, requires_grad=True)
    called = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            called.append(function)
            return function(*args, **(kwargs or {}))

    with Recorder():
        nn.functional.scaled_dot_product_attention(query, query, query)
    assert private.ATTENTION_OPS[0] in called


def test_softmax_backward_equals_autograd() -> None:
    scores, grad = torch.randn(3, 5, requires_grad=True), torch.randn(3, 5)
    output = scores.softmax(dim=-1)
    output.backward(grad)
    assert torch.equal(private.softmax_backward(grad, output.detach()), scores.grad)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="built without oneDNN")
def test_a_packed_linear_layer_computes_the_product() -> None:
    weight, states = torch.randn(6, 4), torch.randn(2, 3, 4)
    product = private.packed_linear(states, private.pack_linear_weight(weight, 8))
    torch.testing.assert_close(product, states @ weight.t())


def test_a_process_that_was_not_forked_can_use_cuda() -> None:
    assert not private.is_in_bad_fork()


# -- process groups ---------------------------------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7)
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_timeout_of_a_formed_group_is_read_and_set(group: dist.ProcessGroup) -> None:
    assert private.backend_timeout(group) == timedelta(seconds=7)
    private.set_group_timeout(timedelta(seconds=9), group)
    assert private.backend_timeout(group) == timedelta(seconds=9)


def test_new_groups_are_counted_and_the_count_is_reset(group: dist.ProcessGroup) -> None:
    before = dist.distributed_c10d._world.group_count
    dist.new_group([0])
    assert dist.distributed_c10d._world.group_count == before + 1
    private.reset_group_count()
    assert dist.distributed_c10d._world.group_count == 0


def test_collectives_of_a_group_are_counted(group: dist.ProcessGroup) -> None:
    before = private.collectives_of(group)
    dist.all_reduce(torch.ones(2), group=group)
    assert private.collectives_of(group) == before + 1


def test_detached_groups_are_open_and_a_new_default_group_can_form(
    group: dist.ProcessGroup,
) -> None:
    subgroup = dist.new_group([0])
    backends = private.device_backends(torch.device("cpu"))
    assert backends == [member._get_backend(torch.device("cpu")) for member in (group, subgroup)]
    detached = private.detach_groups()
    assert (
        set(detached) == {group, subgroup}
        and not dist.is_initialized()
        and not private.device_backends(torch.device("cpu"))
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    while detached:
        detached.pop().shutdown()
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=dist.new_group([0]))
    assert tensor.item() == 1


def test_fsdp_shards_over_a_mesh_without_backend(group: dist.ProcessGroup) -> None:
    mesh = private.mesh_without_backend("cpu", 1, 2, "test-shard")
    assert (mesh.size(), mesh.get_coordinate()) == (2, (1,))
    with torch.device("meta"):
        model = nn.Linear(3, 4, bias=False)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    private.init_fsdp(model)
    assert model.weight.to_local().shape == (2, 3)
    assert private.fsdp_shard_rows(model, 2) == [(6, 3)]
    assert [id(p) for p in private.fsdp_parameters(model)] == [id(model.weight)]
    assert private.slice_of_dtensor(model.weight).data_ptr() == model.weight.to_local().data_ptr()
    model.requires_grad_(False)
    assert private.fsdp_shard_rows(model, 2) == []


# -- compilation and profiling ----------------------------------------------------------------------------------------


def test_compilation_is_counted_and_reported() -> None:
    import torch._dynamo

    torch._dynamo.reset()
    phases = []
    private.on_compile(lambda _: phases.append("start"), lambda _: phases.append("end"))
    private.compile_counters().clear()
    try:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        assert phases == ["start", "end"]
        assert private.compile_counters()["stats"]["unique_graphs"] == 1
        assert private.graph_breaks() == []
    finally:
        torch._dynamo.callback.callback_handler.clear()


def test_a_graph_break_has_the_line_of_the_model() -> None:
    import torch._dynamo

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.relu(x)
        if y.sum() > 0:
            y = y * 2
        return y

    torch._dynamo.reset()
    torch.compile(forward, backend="eager")(torch.ones(2))
    [(line, reason)] = private.graph_breaks()
    number = forward.__code__.co_firstlineno + 2
    assert line == f"{__file__}:{number}: if y.sum() > 0:" and reason
    torch._dynamo.reset()


def test_the_recompile_limit_bounds_the_graphs_of_a_function() -> None:
    import torch._dynamo

    before = torch._dynamo.config.recompile_limit
    try:
        private.set_recompile_limit(3)
        assert torch._dynamo.config.recompile_limit == 3
    finally:
        private.set_recompile_limit(before)


def test_inductor_freezing_ends_with_its_context() -> None:
    import torch._inductor.config as inductor

    before = inductor.freezing
    with private.inductor_freezing(True):
        assert inductor.freezing is True
    assert inductor.freezing is before


def test_the_profiler_accepts_the_option_for_all_threads() -> None:
    with profile(
        activities=[ProfilerActivity.CPU], experimental_config=private.profile_all_threads()
    ) as recorded:
        torch.ones(2) + 1
    assert any(event.name == "aten::add" for event in recorded.events())


def test_gradient_hooks_of_a_parameter_are_seen() -> None:
    plain, hooked, accumulated = (nn.Parameter(torch.ones(2)) for _ in range(3))
    hooked.register_hook(lambda gradient: gradient)
    accumulated.register_post_accumulate_grad_hook(lambda parameter: None)
    assert [private.has_gradient_hooks(p) for p in (plain, hooked, accumulated)] == [
        False,
        True,
        True,
    ]


def test_compiled_modules_are_seen() -> None:
    plain, in_place = nn.Linear(1, 1), nn.Linear(1, 1)
    in_place.compile()
    wrapped = torch.compile(nn.Linear(1, 1))
    assert [private.is_compiled_in_place(m) for m in (plain, in_place, wrapped)] == [
        False,
        True,
        False,
    ]
    assert [private.is_compiled_wrapper(m) for m in (plain, in_place, wrapped)] == [
        False,
        False,
        True,
    ]


def test_forward_hooks_of_modules_are_found() -> None:
    registrations = (
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    )
    for registration in registrations:
        module = nn.Sequential(nn.Linear(1, 1))
        assert not private.has_forward_hooks(module)
        getattr(module, registration)(lambda *_: None)
        assert private.has_forward_hooks(module), registration
        assert private.hook_count(module) == 1
