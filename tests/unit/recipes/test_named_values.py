"""Keys of a run file that are arguments of the Session, by their name."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature

from lockstep.config.schema import FsdpOptions, LayoutOptions, ParallelOptions, RunConfig
from lockstep.recipes.run import (
    PREPARE_SECTIONS,
    SESSION_ARGUMENTS,
    SESSION_SECTIONS,
    named_values,
)
from lockstep.session import Session

RUN = replace(
    RunConfig(),
    layout=LayoutOptions(shard=2, pipeline_chunks=3),
    parallel=ParallelOptions(wire="int8", bucket_bytes=7),
    fsdp=FsdpOptions(prefetch_units=0),
)


def test_session_gets_the_keys_that_are_its_arguments_and_no_others() -> None:
    assert named_values(RUN, SESSION_SECTIONS, SESSION_ARGUMENTS) == {
        "micro_batches": 8,
        "keep": 3,
        "verify_every": 1,
        "rehearse": True,
        "shard": 2,
        "tensor": 1,
        "pipeline": 1,
        "balance": "auto",
        "wire": "int8",
        "bucket_bytes": 7,
    }


def test_prepare_gets_the_keys_that_are_its_arguments_and_no_others() -> None:
    assert named_values(RUN, PREPARE_SECTIONS, signature(Session.prepare).parameters) == {
        "precision": "auto",
        "compile": False,
        "prefetch_units": 0,
        "reshard_after_forward": True,
        "pipeline_chunks": 3,
        "activation_checkpoint": "none",
    }
