"""Addresses of runs, and the folders of their copies."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.checkpoint.store import CheckpointStore
from lockstep.errors import UsageError
from lockstep.object_store.address import Address, endpoint, local_folder, parse_address
from lockstep.session import Session


@pytest.mark.parametrize("text", ["s3://runs/team/first", "S3://runs//team/first/"])
def test_a_path_and_a_text_have_the_same_address(text: str) -> None:
    assert parse_address(text) == parse_address(Path(text)) == Address("runs", "team/first")
    assert str(parse_address(text)) == "s3://runs/team/first"


@pytest.mark.parametrize("path", ["runs/first", "/data/s3/run", "./s3", "C:/runs", "s3"])
def test_folders_are_no_addresses(path: str) -> None:
    assert parse_address(path) is None
    assert local_folder(path) == Path(path)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "gs://runs/a",
            "az://runs/a",
            "https://host/runs",
            "file:///tmp/run",
            "s3://",
            "s3://Runs/a",
            "s3://r/a",
            "s3://runs/../a",
        ),
        *(
            "s3://runs/a b",
            "s3://runs/a?x=1",
            "s3://runs/a#b",
            "s3://runs/a%2fb",
            "s3://key:very-secret-value@runs/a",
        ),
    ],
)
def test_other_addresses_are_refused_without_a_secret(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_address(text)
    assert caught.value.where and caught.value.hint and "very-secret-value" not in str(caught.value)
    if not text.startswith("s3:"):
        assert text.partition(":")[0] in caught.value.what


@pytest.mark.parametrize(
    "text", ["127.0.0.1:9000", "http://user:very-secret-value@host", "ftp://host", "http://"]
)
def test_a_malformed_endpoint_is_refused_without_a_secret(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", text)
    with pytest.raises(UsageError, match="AWS_ENDPOINT_URL") as caught:
        endpoint()
    assert "very-secret-value" not in str(caught.value)


def test_copies_of_equal_addresses_at_two_endpoints_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = set()
    for url in ("", "http://a:1", "http://b:1"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        copies.add(Address("runs", "first").working_copy)
    assert len(copies) == 3 and {copy.name for copy in copies} == {"first"}


def test_a_loop_that_nothing_mirrors_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="lockstep run --out s3://runs/first"):
        Session("s3://runs/first", micro_batches=2)
    with pytest.raises(UsageError, match="s3"):
        CheckpointStore(Path("s3://runs/first"))
    assert not list(tmp_path.iterdir())
