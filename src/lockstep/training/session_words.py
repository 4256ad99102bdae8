"""Errors of the parts of a Session, in the words of a Session's user."""

from __future__ import annotations

import re

from lockstep.errors import CheckpointError, DivergedError, LockstepError, UsageError

# Text in messages of the parts -> what a user of Session wrote instead, in order.
SESSION_WORDS = {
    "that replicas.micro_batches(step) gives": "that loader(step) gives",
    "replicas.micro_batches(step)": "loader(step) or session.micro_batches(step)",
    "the loop over micro_batches(step)": "the loop over loader(step)",
    "call backward(loss) of the replicas": "call session.backward(loss)",
    "that the Checkpointer knows": "that session.prepare has received",
    "pass the optimizer of these parameters to Checkpointer(...)": "pass their optimizer: session.prepare(model, optimizer)",
    "pass all optimizers as the fourth argument: Checkpointer(folder, runtime, model, [first, second])": (
        "pass all optimizers: session.prepare(model, first, second)"
    ),
    "the Checkpointer does not know it": "session.state has not received it",
    'Checkpointer(..., state={"scheduler": scheduler})': "session.state(scheduler=scheduler)",
    "Checkpointer(state=...)": "session.state(name=object)",
    "ReplicaGroup(": "Session(",
    "set batch.micro_batches=": "set micro_batches in Session(...) to ",
}

# Errors of torch for a sharded parameter outside of the model's passes.
OF_SLICES = "mixed torch.Tensor and DTensor|No backend type associated|FSDP does not support deepcopy|a sharding strategy registered"


def in_session_words(error: BaseException | None) -> LockstepError | None:
    """Return the error with other words; None when there is nothing to replace."""
    if isinstance(error, RuntimeError | AssertionError) and (
        found := re.search(OF_SLICES, str(error))
    ):
        what = f"an operation needs whole weights or gradients, and this worker has slices of them ({found[0]})"
        hint = "clip with session.clip_grad_norm_, compare outputs in session.evaluate, or train with whole replicas (docs/parallelism.md)"
        return UsageError(what, "the training loop, in shards", hint)
    if not isinstance(error, LockstepError) or type(error) not in (
        UsageError,
        CheckpointError,
        DivergedError,
    ):
        return None
    parts = [error.what, error.where, error.hint]
    for text, replacement in SESSION_WORDS.items():
        parts = [part.replace(text, replacement) for part in parts]
    parts = [re.sub(r"(?<![\w.])backward\(loss", "session.backward(loss", part) for part in parts]
    return type(error)(*parts) if parts != [error.what, error.where, error.hint] else None
