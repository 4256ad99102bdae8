"""Objects are stored whole or not at all, through every fault between the process and the store."""

from __future__ import annotations

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.object_store import Proxy

from lockstep.errors import StoreError, UsageError
from lockstep.object_store.address import Address
from lockstep.object_store.bucket import RunBucket, evidence, summarize, without_secrets


def first_puts(fault: str, count: int) -> object:
    """Return the fault of the first `count` uploads."""
    numbers = itertools.count()
    return lambda method, path: fault if method == "PUT" and next(numbers) < count else ""


@pytest.mark.parametrize("fault", ["503", "slow", "torn", "cut", "lost"])
def test_an_upload_through_a_fault_is_whole(fault: str, proxy: Proxy, bucket: RunBucket) -> None:
    proxy.fault = first_puts(fault, 2)
    bucket.write("blobs/o/1", b"x" * 100_000)
    assert (
        len(proxy.faults) == (1 if fault == "slow" else 2)
        and bucket.read("blobs/o/1") == b"x" * 100_000
    )


def test_an_upload_that_always_arrives_torn_is_an_error(proxy: Proxy, bucket: RunBucket) -> None:
    proxy.fault = first_puts("torn", 100)
    with pytest.raises(StoreError, match="stored with other bytes"):
        bucket.write("blobs/o/1", b"x" * 100)


@pytest.mark.parametrize("fault", ["lost", "503", "slow", "cut"])
def test_a_conditional_put_knows_its_own_object(
    fault: str, proxy: Proxy, bucket: RunBucket
) -> None:
    proxy.fault = first_puts(fault, 1)
    assert bucket.create("snapshots/1", b"mine") == b"mine"
    assert bucket.create("snapshots/1", b"other") == b"mine"


def test_one_of_many_conditional_puts_wins(bucket: RunBucket) -> None:
    contents = [str(number).encode() for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert (
            len(set(pool.map(lambda content: bucket.create("snapshots/1", content), contents))) == 1
        )


def test_errors_name_the_cause_and_no_secret(
    proxy: Proxy, bucket: RunBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        StoreError,
        match=r"NoSuchBucket.*\(status 404, request id \w+\)\n.*AWS_REGION us-east-1\n.*create the bucket",
    ):
        RunBucket(Address("absent", "first")).list("snapshots")
    with pytest.raises(FileNotFoundError):
        bucket.read("absent")
    proxy.fault = lambda method, path: "503"
    with pytest.raises(StoreError, match=r"SlowDown: .* \(status 503\)\n") as caught:
        bucket.write("blobs/o/1", b"x")
    assert (
        "very-secret-value" not in str(caught.value)
        and "AKIATEST" not in str(caught.value)
        and caught.value.__cause__ is None
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match="check the network"):
        RunBucket(bucket.address).read("absent")


def test_a_status_without_a_known_code_has_a_hint(proxy: Proxy, bucket: RunBucket) -> None:
    proxy.fault = lambda method, path: "skewed"
    with pytest.raises(
        StoreError, match=r"TimeTooSkewed: .*\(status 403\)\n.*\n.*this machine's clock"
    ):
        bucket.write("blobs/o/1", b"x")


def test_no_key_user_or_signed_query_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token-of-session")
    url = "https://user:password@h/k?X-Amz-Credential=ASIAABCDEFGHIJKLMNOP&X-Amz-Signature=abc"
    text = f"GET {url} failed for AKIAABCDEFGHIJKLMNOP with token-of-session"
    assert without_secrets(text) == "GET https://***@h/k?*** failed for *** with ***"
    assert evidence(f"status code: 403 <RequestId>AB/+=1</RequestId> {url}") == {
        "status": "403",
        "request id": "AB/+=1",
    }
    assert not evidence("HTTP error: error sending request")


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        (
            "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 2s - HTTP error",
            "no credentials",
        ),
        (
            "x - Server returned 403: <?xml?>\n<Error><Code>AccessDenied</Code><Message>no very-secret-value</Message>",
            "AccessDenied: no ...",
        ),
        (
            "Error performing GET http://h/k in 1s - HTTP error: error sending request\n\nDebug source:\nvery-secret-value",
            "HTTP error: error",
        ),
    ],
)
def test_a_summary_has_the_reason_alone(
    text: str, summary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret-value")
    assert (
        summarize(text).startswith(summary.removesuffix("..."))
        and "secret" not in summarize(text)
        and "http:" not in summarize(text)
    )


def test_missing_credentials_are_an_error_that_says_so(
    bucket: RunBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StoreError):
        RunBucket(bucket.address).read("absent")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(UsageError, match=r"obstore is not installed[^\0]*lockstep-train\[store\]"):
        RunBucket(Address("runs", "first"))
