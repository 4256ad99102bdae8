"""What a checkpoint holds: a model, its optimizers and the objects that change beside them."""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.checkpoint import state_dict, stateful
from lockstep.checkpoint.json_tree import JSON_SUFFIX, spec_of
from lockstep.checkpoint.optimizer_state import refuse_inner_optimizers
from lockstep.checkpoint.policy import show_steps
from lockstep.checkpoint.shards import ONLY_WRITER, ShardWriter, is_text, parameter_of
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import CheckpointError, DivergedError, UsageError
from lockstep.log import log
from lockstep.parallel.digest import digest_of
from lockstep.parallel.parallelize import LocalModel, unwrap_local_model
from lockstep.runtime.tensor_bytes import bytes_of
from lockstep.runtime.torch_private import hook_count
from lockstep.training import trained_parameters
from lockstep.training.attributes import Attributes
from lockstep.units import join_names

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    type,
)


class TrainedState:
    """The training state of this worker by name, as a checkpoint and a joiner receive it."""

    def __init__(
        self,
        runtime: ElasticRuntime,
        model: nn.Module | LocalModel,
        optimizer: Optimizers,
        state: Mapping[str, stateful.Stateful] | None,
        saved: Callable[[str], bool],
    ) -> None:
        self.runtime = runtime
        self.optimizers = state_dict.as_tuple(optimizer)
        self.state = None if isinstance(model, LocalModel) and state is None else dict(state or {})
        self.loaded = False  # a checkpoint, or the state of other workers
        module, self.local_model = unwrap_local_model(model)
        self.model: nn.Module | Mapping[str, torch.Tensor] = module
        self.saved = saved
        is_tracked = self.state is not None
        if local_model := self.local_model:
            elsewhere = local_model.placeholders
            self.model = {**local_model.local_params, **local_model.buffers, **elsewhere}
            self.saved = lambda name: name not in elsewhere and saved(name)
            is_tracked = is_tracked and local_model.layout.pipeline == 1
        self.attributes = Attributes(
            module if is_tracked else None, self.optimizers if is_tracked else (), self.state
        )
        self.trained = stateful.Trained(self.model, self.optimizers, self.state or {})
        self._form = ModelForm(self.model, module)
        self._refuse_unsupported(state or {})
        self._constants = {
            name: dict(stateful.plain_values(value.state_dict()))
            for name, value in self.trained.state.items()
        }
        # Ids of the parameters in each group, in the first step.
        self._groups: list[list[int]] = []
        self._started_steps = 0  # of this start

    @property
    def replica_size(self) -> int:
        """Workers per replica, which save together."""
        return self.local_model.layout.workers_per_replica if self.local_model else 1

    @property
    def writes(self) -> bool:
        """True when this worker writes checkpoints, or slices of them."""
        return self.runtime.world.rank < self.replica_size

    def _refuse_unsupported(self, state: Mapping[str, object]) -> None:
        """Refuse at construction, by name, what a save would refuse."""
        for optimizer in self.optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise UsageError(
                    f"not an optimizer of torch: {type(optimizer).__name__}",
                    "Checkpointer(optimizer=...)",
                    "pass one, or a sequence of them",
                )
            refuse_inner_optimizers(optimizer)
        stateful.refuse_unsupported_state(state)
        trained_parameters.refuse_misplaced_parameters(self.trained)
        self.state_dict()

    def refuse_unsaved_parameters(self) -> None:
        """UsageError for trained parameters and schedulers that no checkpoint would hold."""
        trained_parameters.refuse_unsaved(self.trained, is_stateful=self.state is not None)

    def refuse_nonfinite(self, step: int, saved_steps: list[int]) -> None:
        """DivergedError for a nonfinite state: retention would delete the last good
        checkpoints."""
        trained = {f"model.{name}" for name in self.trained.trained_names()}
        checked = {
            name: tensor
            for name, tensor in self.state_dict().items()
            if name in trained or name.startswith("optim.")
        }
        if wrong := state_dict.nonfinite_tensors(checked):
            raise DivergedError(
                f"not finite after step {step}: {join_names(wrong)}",
                f"{len(wrong)} tensors of the state to save; {show_steps(saved_steps)}",
                "nothing was saved or deleted: "
                "resume from an earlier step with a lower learning rate, or clip the gradients",
            )

    def begin_step(self, step: int) -> None:
        """Refuse, before the micro-batches of `step`, what a save would refuse. CheckpointError or
        UsageError: after the first update of a start the optimizers have their state."""
        groups = [[*map(id, group["params"])] for group in self.trained.param_groups()]
        self._groups = self._groups or groups
        if self._groups != groups:
            trained_parameters.refuse_new_groups(self.trained, self._groups, step)
        self._started_steps += 1
        if self._started_steps == 1:
            self._form.note_modules()
        if self._started_steps == 2:
            written = self.state_to_write()[0] if self.writes else self.state_dict()
            for name, tensor in written.items():
                spec_of(name, tensor)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return this worker's state by name. Tensors share memory with model and optimizers."""
        return self._tensors() | self.attributes.state_dict()

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the state of the model, the optimizers and the objects in `state`."""
        tensors = state_dict.get_state_dict(self.model, self.optimizers, self.saved)
        if self.state is not None:
            tensors |= self.trained.pack()
        if self.local_model:
            self._refuse_unsliced(tensors, self.local_model)
        return tensors

    def _refuse_unsliced(
        self, tensors: Mapping[str, torch.Tensor], local_model: LocalModel
    ) -> None:
        """UsageError, in shards, for tensors of which no worker knows the slices."""
        names = [
            name for name in tensors if name.startswith("state.") and not name.endswith(JSON_SUFFIX)
        ]
        if unknown := [name for name in names if name not in local_model.slices]:
            raise UsageError(
                "state with tensors is not supported in shards, "
                f"except copies of the model: {join_names(unknown)}",
                "session.state(...)",
                "average the model with torch.optim.swa_utils.AveragedModel, "
                "or train with whole replicas",
            )
        own = [
            name for name in tensors if name.startswith("optimizers.") and tensors[name].numel() > 1
        ]
        if own:
            raise UsageError(
                "tensors that an optimizer keeps besides its state "
                f"by parameter are not supported in shards: {join_names(own)}",
                f"layout {local_model.layout}",
                "keep them in optimizer.state[parameter], or train with whole replicas",
            )

    def common_state(self) -> dict[str, torch.Tensor]:
        """Return the tensors that belong to no parameter: the workers of a replica hold them
        alike."""
        slices = self.local_model.slices if self.local_model else {}
        return {
            name: tensor
            for name, tensor in self.state_dict().items()
            if parameter_of(name) not in slices
        }

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill model, optimizers and state. CheckpointError, without changes, for a misfit."""
        problems = [] if self.state is None else self.trained.problems(tensors)
        state_dict.set_state_dict(self.model, self.optimizers, tensors, self.saved, problems)
        self.attributes.load_state_dict(tensors, self.runtime.world.device)
        if self.state is not None:
            self.trained.load(tensors)
        self.loaded = True

    def optimizer_digest(self) -> int:
        """Return 64 bits over all state except model and attributes; equal on the same rank of
        replicas."""
        tensors = [
            (name, tensor)
            for name, tensor in sorted(self._tensors().items())
            if not name.startswith("model.")
        ]
        texts = b"".join(
            bytes(bytes_of(tensor)) for name, tensor in tensors if name.endswith(JSON_SUFFIX)
        )
        numbers = [tensor for name, tensor in tensors if not name.endswith(JSON_SUFFIX)]
        return digest_of(numbers) ^ int.from_bytes(hashlib.sha256(texts).digest()[:8])

    def describe(self) -> dict[str, Any]:
        """Return facts about the state: what is trained, and which values of the objects in `state`
        are those of their construction. CheckpointError when no start could load the model."""
        self._form.refuse_other_names()
        self._form.warn_of_other_modules()
        if self.state is None:
            return {}
        self.attributes.announce()
        constants: dict[str, list[str]] = {}
        for name, value in self.state.items():
            now = dict(stateful.plain_values(value.state_dict()))
            constants[name] = [
                path
                for path, constructed in self._constants[name].items()
                if now.get(path) == constructed
            ]
        trained = {"trained": self.trained.trained_names()}
        return trained | ({"constants": constants} if constants else {})

    def load_checked(
        self,
        tensors: Mapping[str, torch.Tensor],
        facts: Mapping[str, Any],
        constructed: Sequence[Mapping[str, Any]],
        overridden: Sequence[str],
    ) -> None:
        """Load a checkpoint with these facts. Warn of values that it has replaced; where the user
        has `overridden` values, the `constructed` options hold."""
        before = facts.get("constructed", [])
        if self.state is not None and not overridden:
            trained_parameters.warn_of_other_options(self.trained, tensors, before)
        self.load_state_dict(tensors)
        self._constants = trained_parameters.warn_of_other_constants(
            self.trained.state, self._constants, facts.get("constants", {}), overridden
        )
        if overridden:
            trained_parameters.apply_options(self.trained, constructed, before)

    def state_to_write(self) -> tuple[dict[str, torch.Tensor], ShardWriter]:
        """Return the tensors that this worker writes, and which of the writers it is."""
        tensors, runtime = self.state_dict(), self.runtime
        if self.local_model is None:
            return tensors, ONLY_WRITER
        local_slices = self.local_model.slices
        parameters = {name: parameter_of(name) for name in tensors}
        slices = {
            name: local_slices[parameter]
            for name, parameter in parameters.items()
            if parameter in local_slices
            and tuple(tensors[name].shape) == local_slices[parameter].local_shape
            and not is_text(name)
        }
        written = {
            name: tensor
            for name, tensor in tensors.items()
            if self._writes(
                parameters[name],
                is_common=name not in slices or slices[name].is_whole,
                is_empty=not tensor.numel(),
            )
        }
        writer = ShardWriter(
            runtime.world.rank,
            self.replica_size,
            slices,
            lambda: runtime.world.generation,
            runtime.generation_error,
        )
        return written, writer

    def _writes(self, parameter: str, *, is_common: bool, is_empty: bool) -> bool:
        """Whether this worker of the shards writes a tensor of a parameter; one of them does.
        is_common: the same on all shards, or on one"""
        local_model = self.local_model
        assert local_model is not None
        if local_model.is_tied_copy(parameter):
            return False
        coordinates = local_model.layout.coordinates(self.runtime.world.rank)
        if is_common:
            is_first_stage = parameter in local_model.slices or coordinates.stage == 0
            return coordinates.shard == coordinates.tensor == 0 and is_first_stage
        is_split = not local_model.tensor_slices[parameter].is_whole
        return not is_empty and (coordinates.tensor == 0 or is_split)


class ModulePart(NamedTuple):
    """Class, hooks and functions of a module: the rest are tensors and numbers."""

    kind: type
    hooks: int
    functions: Mapping[str, Callable[..., Any]]  # attributes: an activation, another forward

    @classmethod
    def of(cls, module: nn.Module) -> ModulePart:
        functions = {
            name: value for name, value in vars(module).items() if isinstance(value, FUNCTIONS)
        }
        return cls(type(module), hook_count(module), functions)


class ModelForm:
    """Compares `model` with what it was at the start.

    module  whose modules and hooks are compared, too
    """

    def __init__(self, model: nn.Module | Mapping[str, torch.Tensor], module: nn.Module) -> None:
        self.model = model
        self.module = module
        self.names = set(state_dict.named_tensors(model))
        self.parts: dict[str, ModulePart] | None = None  # of the module, before the first step
        self._warned = False

    def note_modules(self) -> None:
        """Take the modules as they are before the first step."""
        self.parts = self._parts()

    def refuse_other_names(self) -> None:
        """CheckpointError: the model has other tensors than at the start, and no start could load
        them."""
        names = set(state_dict.named_tensors(self.model))
        if names == self.names:
            return
        changes = {"new": sorted(names - self.names), "gone": sorted(self.names - names)}
        listed = "; ".join(
            f"{kind}: {join_names(changed)}" for kind, changed in changes.items() if changed
        )
        raise CheckpointError(
            f"the model's parameters and buffers changed during the run: {listed}",
            "checkpoints before the change are whole",
            "make all of them before session.prepare",
        )

    def warn_of_other_modules(self) -> None:
        """Warn once when modules or their hooks are others than before the first step."""
        if self.parts is None or self._warned:
            return
        now, before = self._parts(), self.parts
        changed = sorted(
            name for name in now.keys() | before.keys() if now.get(name) != before.get(name)
        )
        if changed:
            self._warned = True
            log.warning(
                "modules, hooks or functions of the model changed during the run: %s. "
                "A resume, and a worker that joins, build it without the change: "
                "let it follow from the step, `model.gate = step >= 300`, read in forward()",
                join_names([name or "the model" for name in changed]),
            )

    def _parts(self) -> dict[str, ModulePart]:
        return {name: ModulePart.of(module) for name, module in self.module.named_modules()}
