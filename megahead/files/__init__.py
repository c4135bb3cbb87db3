"""Files and folders that appear whole or not at all, and are on disk when a call returns.

*Staged*: written under a temporary name (`.partial`) beside the final one, flushed to disk (fsync), then renamed.
"""

from megahead.files.durable import fsync, sha256_of, write_durably
from megahead.files.errors import InUseError, WriteError, is_full
from megahead.files.staged_file import StagedFile, staged, write_atomically
from megahead.files.staged_folder import staged_folder

__all__ = [
    "InUseError",
    "StagedFile",
    "WriteError",
    "fsync",
    "is_full",
    "sha256_of",
    "staged",
    "staged_folder",
    "write_atomically",
    "write_durably",
]
