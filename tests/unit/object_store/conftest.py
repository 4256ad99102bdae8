"""The store of the tests of this folder."""

from support.store_fixtures import bucket, proxy, server

__all__ = ["bucket", "proxy", "server"]
