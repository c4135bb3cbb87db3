"""The array in a `.npy` of numpy that a setting names, or one sentence on what the file is instead."""

from __future__ import annotations

from typing import Any
from zipfile import BadZipFile

import numpy as np

from megahead.errors import ConfigError
from megahead.far import near_file

Array = np.ndarray[Any, Any]


def open_array(field: str, rule: str, path: str) -> Array:
    """The array in the file that the setting `field` names; a URL's is fetched first. ConfigError with this rule for
    any other file."""
    try:
        found = np.load(near_file(path), allow_pickle=False)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise ConfigError(field, rule, got=f"{path} ({error})") from None
    if not isinstance(found, np.ndarray):
        raise ConfigError(field, rule, got=f"{path}, which has several arrays")
    return found
