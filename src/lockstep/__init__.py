"""Lockstep: train PyTorch models on many machines with the same bits, through failures.

    lockstep.Session         a distributed training loop in five lines
    lockstep.launch          start the workers of this script
    lockstep.ElasticRuntime  join the run, and form the next generation after a failure
    lockstep.World           rank, size and device of this worker
    lockstep.ReplicaGroup    all copies of the model: every replica commits a step, or all retry it
    lockstep.Checkpointer    save, verify and resume
    lockstep.Tracker         metrics.jsonl, TensorBoard, Weights & Biases
    lockstep.Layout          how many workers hold one copy of the model, and how
    lockstep.UniformOrder    which samples belong to a step; BucketOrder: for sequences by length

Every error derives from lockstep.LockstepError. Names are imported on first use, so
`import lockstep` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.cli.script import launch
    from lockstep.data.order import BucketOrder, UniformOrder
    from lockstep.elastic.runtime import ElasticRuntime
    from lockstep.elastic.world import World
    from lockstep.errors import (
        CheckpointError,
        ConfigError,
        DamagedFileError,
        DataError,
        DivergedError,
        FencedError,
        LockstepError,
        OutOfMemoryError,
        PeersLostError,
        RunFolderUnavailableError,
        SaveFailedError,
        UsageError,
    )
    from lockstep.layout import Layout
    from lockstep.record.tracker import Tracker
    from lockstep.session import Session
    from lockstep.training.checkpointer import Checkpointer
    from lockstep.training.replica_group import ReplicaGroup

__version__ = "0.1.0"  # pyproject.toml reads it from here

__all__ = [
    "BucketOrder",
    "CheckpointError",
    "Checkpointer",
    "ConfigError",
    "DamagedFileError",
    "DataError",
    "DivergedError",
    "ElasticRuntime",
    "FencedError",
    "Layout",
    "LockstepError",
    "OutOfMemoryError",
    "PeersLostError",
    "ReplicaGroup",
    "RunFolderUnavailableError",
    "SaveFailedError",
    "Session",
    "Tracker",
    "UniformOrder",
    "UsageError",
    "World",
    "__version__",
    "launch",
]

# Public name -> "module:name" where it is defined.
_DEFINED_IN = {
    "BucketOrder": "lockstep.data.order:BucketOrder",
    "Checkpointer": "lockstep.training.checkpointer:Checkpointer",
    "ElasticRuntime": "lockstep.elastic.runtime:ElasticRuntime",
    "Layout": "lockstep.layout:Layout",
    "ReplicaGroup": "lockstep.training.replica_group:ReplicaGroup",
    "Session": "lockstep.session:Session",
    "Tracker": "lockstep.record.tracker:Tracker",
    "UniformOrder": "lockstep.data.order:UniformOrder",
    "World": "lockstep.elastic.world:World",
    "launch": "lockstep.cli.script:launch",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, defined = _DEFINED_IN.get(name, f"lockstep.errors:{name}").partition(":")
    value = globals()[name] = getattr(import_module(module), defined)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
