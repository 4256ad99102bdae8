"""Lockstep: train PyTorch models on many machines with the same bits, through failures.

    lockstep.Session         a distributed training loop in five lines
    lockstep.launch          start the workers of this script
    lockstep.ElasticRuntime  join the run, and form the next generation after a failure
    lockstep.ElasticLimits   how long it waits for workers, and when one hangs
    lockstep.World           rank, size and device of this worker
    lockstep.ReplicaGroup    all copies of the model: every replica commits a step, or all retry it
    lockstep.Checkpointer    save, verify and resume
    lockstep.Tracker         metrics.jsonl, TensorBoard, Weights & Biases
    lockstep.Layout          how many workers hold one copy of the model, and how
    lockstep.deferred_init   build a model whose weights take no memory before it is sharded
    lockstep.Best            the checkpoint with the best score; lockstep.EarlyStopping ends the
                             loop
    lockstep.Rollback        retry a step without the micro-batches that make it diverge
    lockstep.Mixture         data sets whose samples are taken in exact proportions, by stages
    lockstep.index_dataset   write the samples of a stream once, to find each by its number
    lockstep.UniformOrder    which samples belong to a step; BucketOrder: for sequences by length

Every error derives from lockstep.LockstepError. Other names are imported on first use, so
`import lockstep` does not import torch.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep.errors import *  # noqa: F403
from lockstep.errors import ERRORS_BY_NAME, LockstepError

if TYPE_CHECKING:
    from lockstep.cli.script import launch as launch
    from lockstep.data.indexed import index_dataset as index_dataset
    from lockstep.data.order import BucketOrder as BucketOrder
    from lockstep.data.order import UniformOrder as UniformOrder
    from lockstep.elastic.protocol.decisions import ElasticLimits as ElasticLimits
    from lockstep.elastic.runtime import ElasticRuntime as ElasticRuntime
    from lockstep.elastic.world import World as World
    from lockstep.layout import Layout as Layout
    from lockstep.parallel.deferred_init import deferred_init as deferred_init
    from lockstep.record.tracker import Tracker as Tracker
    from lockstep.session import Session as Session
    from lockstep.training.checkpointer import Checkpointer as Checkpointer
    from lockstep.training.replica_group import ReplicaGroup as ReplicaGroup
    from lockstep.training.rollback import Rollback as Rollback
    from lockstep.training.sample_order import Mixture as Mixture
    from lockstep.training.scores import Best as Best
    from lockstep.training.scores import EarlyStopping as EarlyStopping


def _set_cublas_workspace() -> None:
    """Set what cuBLAS reads at its first product; make_deterministic refuses an earlier product."""
    if "torch" not in sys.modules or not sys.modules["torch"].cuda.is_initialized():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _print_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """sys.excepthook: print the parts of a Lockstep error and exit with its code; print the user's
    frames of another error. python -X dev prints all frames of any."""
    if not sys.flags.dev_mode:
        if isinstance(error, LockstepError):
            print(error, file=sys.__stderr__)  # torch captures sys.stderr around this function
            sys.exit(error.exit_code)
        import_module("lockstep.runtime.exit_report").keep_user_frames(error)
    sys.__excepthook__(kind, error, error.__traceback__)


def _set_excepthook() -> None:
    if sys.excepthook is sys.__excepthook__:  # else the program has its own
        sys.excepthook = _print_error


_set_cublas_workspace()
_set_excepthook()
__version__ = "0.1.0"  # pyproject.toml reads it from here

_MODULES = {
    "Best": "lockstep.training.scores",
    "BucketOrder": "lockstep.data.order",
    "Checkpointer": "lockstep.training.checkpointer",
    "EarlyStopping": "lockstep.training.scores",
    "ElasticLimits": "lockstep.elastic.protocol.decisions",
    "ElasticRuntime": "lockstep.elastic.runtime",
    "Layout": "lockstep.layout",
    "Mixture": "lockstep.training.sample_order",
    "ReplicaGroup": "lockstep.training.replica_group",
    "Rollback": "lockstep.training.rollback",
    "Session": "lockstep.session",
    "Tracker": "lockstep.record.tracker",
    "UniformOrder": "lockstep.data.order",
    "World": "lockstep.elastic.world",
    "deferred_init": "lockstep.parallel.deferred_init",
    "index_dataset": "lockstep.data.indexed",
    "launch": "lockstep.cli.script",
}
# A comprehension: linters refuse a call here.
__all__ = [name for name in sorted([*_MODULES, *ERRORS_BY_NAME, "__version__"])]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
