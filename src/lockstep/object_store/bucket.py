"""A storage of objects below the prefix of a run: verified reads and writes of whole objects.
Errors name no credential."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from lockstep.errors import StoreError, missing_package
from lockstep.object_store.address import Address, endpoint

CLIENT = {"connect_timeout": "5s", "timeout": "60s"}  # of a request: a blob of 8 MiB at 140 kB/s
RETRIES: Any = {"max_retries": 4}  # by obstore, of a 5xx reply and a lost connection
# For callers that try again by themselves.
QUICK_CLIENT: Any = {"connect_timeout": "2s", "timeout": "10s"}
QUICK_RETRIES: Any = {"max_retries": 1}
TRIES = 3  # of an upload that arrives with other bytes
SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_TOKEN")
# Access keys of roles, users in URLs, and query strings, which may be signed.
SECRET_PARTS = r"\b(AKIA|ASIA)[A-Z0-9]{16}\b|(?<=//)[^/\s@]+(?=@)|(?<=\?)[^\s?]*=\S*"
EVIDENCE = {  # what a store has replied -> where it is in an error text of obstore
    "status": r"status code: (\d+)",
    "request id": r"<RequestId>([\w/+=-]{1,128})</RequestId>",
}
METADATA_SERVICE = "169.254."  # asked for a role when the environment has no credentials
HINTS = {  # by a word of the reason
    "NoSuchBucket": "create the bucket, or check its name, AWS_ENDPOINT_URL and AWS_REGION",
    "no credentials": (
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give this machine a role"
    ),
    "AccessDenied": (
        "the policy must allow s3:ListBucket, "
        "GetObject, PutObject and DeleteObject below this prefix"
    ),
    "AccessKeyId|Signature|403": (
        "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, and this machine's clock"
    ),
    "301|Redirect|Malformed": "set AWS_REGION to the region of the bucket",
    "": "check the network, AWS_ENDPOINT_URL and AWS_REGION",
}


class RunBucket:
    """The objects of one run, by names below its prefix, or below a folder in it. Use it from any
    thread. Every method raises StoreError when the store does not answer or refuses; without
    `waits`, after 10 s."""

    is_shared_disk = False
    pause_s = 0.5  # the store charges for each read

    def __init__(self, address: Address, folder: str = "", *, waits: bool = True) -> None:
        try:
            from obstore.exceptions import AlreadyExistsError, BaseError
            from obstore.store import S3Store
        except ModuleNotFoundError as error:
            problem = f"is not installed ({error})"
            raise missing_package("obstore", "store", f"--out {address}", problem) from None
        self.address = address
        self.where = "/".join(filter(None, [str(address), folder]))
        self._errors = BaseError
        self._exists_error = AlreadyExistsError
        client: Any = {
            **(CLIENT if waits else QUICK_CLIENT),
            "allow_http": endpoint().startswith("http://"),
        }
        config: Any = {"endpoint": endpoint()} if endpoint() else {}
        with self._explained(f"{address} cannot be opened"):
            self._store: Any = S3Store(
                address.bucket,
                prefix="/".join(filter(None, [address.prefix, folder])) or None,
                config=config,
                client_options=client,
                retry_config=RETRIES if waits else QUICK_RETRIES,
            )

    def write(self, name: str, content: bytes) -> None:
        """Store an object. StoreError, unless the store reports the MD5 of `content` or returns
        it."""
        md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
        with self._explained(f"{name} was not uploaded"):
            for _ in range(TRIES):
                tag = self._store.put(name, content, use_multipart=False)["e_tag"] or ""
                # The tag of an object under server-side encryption may be no MD5.
                if tag.strip('"') == md5 or bytes(self._store.get(name).bytes()) == content:
                    return
        raise StoreError(
            f"{name} was stored with other bytes, {TRIES} times",
            self.where,
            "no snapshot lists it; look for a faulty proxy",
        )

    def create(self, name: str, content: bytes) -> bytes:
        """Store an object unless it exists; return what the store holds. A lost reply is no
        error."""
        with self._explained(f"{name} was not stored"):
            try:
                self._store.put(name, content, mode="create", use_multipart=False)
            except self._exists_error:
                pass
            except self._errors:  # maybe after the store has accepted it
                with suppress(FileNotFoundError):
                    return bytes(self._store.get(name).bytes())
                raise
            return bytes(self._store.get(name).bytes())

    def read(self, name: str) -> bytes:
        """Return the content of an object. FileNotFoundError when there is none."""
        with self._explained(f"{name} was not read", may_be_missing=True):
            return bytes(self._store.get(name).bytes())

    def exists(self, name: str) -> bool:
        with suppress(FileNotFoundError):
            return bool(self.modified_s(name))
        return False

    def modified_s(self, name: str) -> float:
        """Return when an object was stored: seconds since 1970, by the clock of the store.
        FileNotFoundError when there is none."""
        with self._explained(f"{name} was not found", may_be_missing=True):
            return float(self._store.head(name)["last_modified"].timestamp())

    def list(self, folder: str) -> Sequence[str]:
        """Return the names of the objects below `folder`, in order."""
        return sorted(self.sizes(folder))

    def sizes(self, folder: str) -> dict[str, int]:
        """Return name -> bytes of the objects below `folder`: one request for 1000 objects."""
        with self._explained(f"{folder} was not listed"):
            batches = self._store.list(f"{folder}/")
            return {item["path"]: item["size"] for batch in batches for item in batch}

    def names(self, folder: str = "") -> Sequence[str]:
        """Return the names of folders and objects directly in `folder`, in order."""
        with self._explained("the prefix was not listed"):
            listed = self._store.list_with_delimiter(folder or None)
            paths = [*listed["common_prefixes"], *(item["path"] for item in listed["objects"])]
            return sorted(path.rpartition("/")[2] for path in paths)

    def remove(self, *names: str) -> None:
        with self._explained(f"{len(names)} objects were not deleted"):
            if names:
                self._store.delete(list(names))

    @contextmanager
    def _explained(self, what: str, *, may_be_missing: bool = False) -> Iterator[None]:
        """Turn the errors of obstore inside into StoreError, except for an object that may be
        missing."""
        try:
            yield
        except (self._errors, OSError, ValueError) as error:
            reason = summarize(str(error))
            if (
                may_be_missing
                and isinstance(error, FileNotFoundError)
                and "NoSuchBucket" not in reason
            ):
                raise
            replied = evidence(str(error))
            place = without_secrets(endpoint()) or "AWS"
            known = f"{reason} {replied.get('status', '')}"
            shown = ", ".join(f"{name} {value}" for name, value in replied.items())
            raise StoreError(
                f"{what}: {reason}" + f" ({shown})" * bool(shown),
                f"{self.where} at {place}, AWS_REGION {os.environ.get('AWS_REGION') or 'not set'}",
                next(hint for words, hint in HINTS.items() if re.search(words, known)),
            ) from None


def summarize(text: str) -> str:
    """Return the reason in an error text of obstore, without its debug output, URLs and secrets."""
    if METADATA_SERVICE in text:
        return "no credentials in the environment, and no role of this machine"
    code, message = (
        re.search(r"<Code>(\w+)</Code>", text),
        re.search(r"<Message>([^<]*)</Message>", text),
    )
    first = text.partition("\n")[0].rpartition(" - ")[2].partition("<?xml")[0].strip(" :")
    reason = f"{code[1]}: {message[1]}" if code and message else first or "no reason given"
    return without_secrets(reason)


def evidence(text: str) -> dict[str, str]:
    """Return what the operator of a store needs to find the request of an error text of obstore."""
    found = {name: re.search(pattern, text) for name, pattern in EVIDENCE.items()}
    return {name: match[1] for name, match in found.items() if match}


def without_secrets(text: str) -> str:
    text = re.sub(SECRET_PARTS, "***", text)
    for value in filter(None, map(os.environ.get, SECRETS)):
        text = text.replace(value, "***") if len(value) > 7 else text
    return text
