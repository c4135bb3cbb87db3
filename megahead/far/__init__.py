"""Files in an object store, or behind any other URL that fsspec knows (`s3://`, `gs://`, `az://`, `file://`).

*Far*: named by a URL; *near*: a path on this machine. Nothing that comes from far is used before its length and, where
one is known, its checksum agree; nothing sent there counts before it was read back. Credentials come from where the
package of that store takes them (environment, its own files), never from a URL. Imports no torch.
"""

from megahead.far.address import is_below, is_far, joined, parted, refuse_secrets
from megahead.far.cache import fetch_into, folder_for, near_file
from megahead.far.errors import DamagedError, FarError
from megahead.far.receiving import Expected, receive
from megahead.far.store import PATIENCE, Store

__all__ = [
    "PATIENCE",
    "DamagedError",
    "Expected",
    "FarError",
    "Store",
    "fetch_into",
    "folder_for",
    "is_below",
    "is_far",
    "joined",
    "near_file",
    "parted",
    "receive",
    "refuse_secrets",
]
