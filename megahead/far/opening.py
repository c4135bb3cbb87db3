"""Opens a URL with fsspec, or says which package is missing."""

from __future__ import annotations

from typing import Any

from megahead.far.address import is_far
from megahead.far.errors import FarError, told

_WITHOUT_FOLDERS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss")
"""Object stores, which have buckets and names: to make a folder there could make a bucket."""

_DISKS = ("file", "local")

_EXTRA = ("s3", "s3a")
"""What comes with `megahead[far]`."""


def open_url(url: str) -> tuple[Any, str]:
    """The file system that fsspec has for a URL, and the URL's path in it; FarError if it has none. Asks nobody yet."""
    import fsspec

    scheme = url.partition("://")[0].lower()
    _refuse_unclear(url, scheme)
    try:
        files, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        raise FarError(f"`{url}` needs a package that is missing ({told(error)}); {_install(scheme)}.") from None
    except ValueError as error:
        raise FarError(f"`{url}` must be of a kind that fsspec knows, but is not ({told(error)}).") from None
    except Exception as error:
        raise FarError(f"`{url}` must be an address that can be opened, but cannot ({told(error)}).") from None
    return files, root.rstrip("/")


def _refuse_unclear(url: str, scheme: str) -> None:
    """FarError for what is no address, or may mean another place than it seems to."""
    if not is_far(url):
        raise FarError(f"`{url}` must be an address such as s3://BUCKET/FOLDER, but is a path.")
    if "::" in url:
        raise FarError(f"`{url}` must be one address, but is a chain of them (`::`); give the last one alone.")
    if scheme in _DISKS and not url.partition("://")[2].startswith("/"):
        raise FarError(
            f"`{url}` must have its whole path, but begins in the folder of each process; write {scheme}:///."
        )
    if not has_folders(url) and "//" in url.partition("://")[2]:  # what is written there is not found by listing it
        raise FarError(f"`{url}` must have single slashes, but has two that follow each other; leave one out.")


def has_folders(url: str) -> bool:
    """Whether the folder of a file must be made before the file is written."""
    return url.partition("://")[0].lower() not in _WITHOUT_FOLDERS


def is_disk(files: Any) -> bool:
    """Whether a file system of fsspec's is one of this machine, which renames."""
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(files, LocalFileSystem)


def _install(scheme: str) -> str:
    """A command; packages of fsspec's family must be of its own version, which `datasets` limits."""
    import fsspec
    from fsspec.registry import known_implementations

    if scheme in _EXTRA:
        return "pip install -e '.[far]'"
    module = known_implementations.get(scheme, {}).get("class", "").split(".")[0]
    if module == "gcsfs":
        return f"pip install 'gcsfs=={fsspec.__version__}'"
    return f"pip install {module}" if module and module != "fsspec" else "install it"
