"""The address of a run in an object store, and the folders of this host with copies of such
runs."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.files import scheme_of
from lockstep.runtime.variables import user_cache
from lockstep.runtime.worker_env import read_worker_env

BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
SEGMENT = re.compile(r"[\w=+.-]+", re.ASCII)
# Folder of the copies; default: lockstep in the user's cache folder.
COPIES = "LOCKSTEP_STORE_CACHE"
HINT = (
    "give s3://BUCKET/PREFIX with letters, digits and _ = + . - in the prefix; "
    "credentials come from AWS_* variables or the machine's role"
)


@dataclass(frozen=True)
class Address:
    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    @property
    def copies(self) -> Path:
        """The folder of this host for the copies of this run. Equal addresses at different
        endpoints are different runs."""
        cache = os.environ.get(COPIES) or user_cache()
        name = hashlib.sha256(f"{endpoint()} {self}".encode()).hexdigest()[:12]
        return Path(cache).resolve() / name

    @property
    def working_copy(self) -> Path:
        """The run folder that the workers of this host use."""
        return self.copies / (self.prefix.rpartition("/")[2] or self.bucket)


def endpoint() -> str:
    """Return the address of the store; "" for AWS. UsageError when it is malformed or has a
    password."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    text = next(filter(None, map(os.environ.get, names)), "")
    if text and not re.fullmatch(r"https?://[\w.:\[\]-]+(/[^@?#\s]*)?", text, re.ASCII):
        raise UsageError(
            "the endpoint of the object store is malformed",
            "AWS_ENDPOINT_URL",
            "give http://HOST:PORT or https://HOST",
        )
    return text


def parse_address(path: str | os.PathLike[str]) -> Address | None:
    """Return the address s3://BUCKET/PREFIX; None for a path on this host. UsageError for other
    schemes. The message does not repeat a malformed address: it may hold a password."""
    scheme = scheme_of(path)
    if not scheme:
        return None
    if scheme != "s3":
        raise UsageError(
            f"{scheme}:// is not supported as a run folder",
            "command line",
            "give s3://BUCKET/PREFIX, or a folder",
        )
    bucket, *segments = [part for part in str(path).partition(":")[2].split("/") if part] or [""]
    if not BUCKET.fullmatch(bucket):
        raise UsageError(
            "this is no address of a bucket: 3 to 63 lower-case letters, digits, dots and dashes",
            "command line, s3://",
            HINT,
        )
    if not all(SEGMENT.fullmatch(segment) and segment.strip(".") for segment in segments):
        raise UsageError(
            f"the prefix in bucket {bucket} has other characters, or . or ..",
            "command line, s3://",
            HINT,
        )
    return Address(bucket, "/".join(segments))


def local_folder(out: str | os.PathLike[str]) -> Path:
    """Return the folder that a Session uses for `out`. UsageError: a store, and Lockstep's command
    does not mirror the folder to it."""
    address = parse_address(out)
    if address is None:
        return Path(out)
    worker_env = read_worker_env(os.environ)
    if worker_env is None or Path(worker_env.folder) != address.working_copy:
        raise UsageError(
            f"{address} is mirrored by Lockstep's command only, "
            "which did not start this process for it",
            "Session(out, ...)",
            f"start it with lockstep run --out {address} FILE.py",
        )
    return address.working_copy
