"""The base class of all settings: frozen, no unknown keys, each field described by the text below it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from megahead.errors import ConfigError, FieldError
from megahead.far.address import refuse_secrets


class Settings(BaseModel):
    """A section of settings. Values derived from them are methods; they are never stored."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _text_is_text(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses zero bytes, at which the system would cut a path off, and secrets, which would be written down."""
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str):
                _check_text(str(info.field_name), text)
        return value


def not_a_setting(parents: Sequence[str], key: str, known: Sequence[str]) -> str:
    """The sentence for an unknown `key` in the section `parents`, where these are `known`."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    fix = f"did you mean `{'.'.join([*parents, near[0]])}`?" if near else f"known here: {', '.join(known)}."
    return f"`{'.'.join([*parents, key])}` is not a setting; {fix}"


def _check_text(field: str, text: str) -> None:
    if "\0" in text:
        raise ConfigError(field, "have no zero byte", got=repr(text))
    try:
        refuse_secrets(field, text)
    except FieldError as error:
        raise ConfigError(error.field, error.rule, got=error.got, hint=error.hint) from None
