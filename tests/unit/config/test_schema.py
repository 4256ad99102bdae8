"""The keys of a run and their values."""

from __future__ import annotations

import pytest

from lockstep.config.resolve import resolve
from lockstep.config.schema import RunConfig, config_fields, parse_value
from lockstep.errors import ConfigError


def test_every_key_has_documentation() -> None:
    assert (
        all(len(field.doc) > 8 for field in config_fields().values()) and len(config_fields()) > 40
    )
    assert {"seed", "model.dim", "batch.micro_batches", "compute.num_threads"} <= {
        key for key, field in config_fields().items() if field.bits
    }
    assert not {"steps", "checkpoint.keep", "track.wandb"} & {
        key for key, field in config_fields().items() if field.bits
    }
    assert RunConfig() == resolve().run


def test_a_list_is_parsed_with_commas_and_as_an_array() -> None:
    for text, read in (
        ("a,b", ("a", "b")),
        ('["a", "b,c"]', ("a", "b,c")),
        ("[ab]*.txt", ("[ab]*.txt",)),
        ("", ()),
    ):
        assert parse_value("data.train", text, "a test") == read
    for text in ("a,,b", '["a"'):
        with pytest.raises(ConfigError, match=r"data\.train"):
            parse_value("data.train", text, "a test")
