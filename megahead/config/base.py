"""The base class of all settings: frozen, no unknown keys, each field described by the text below it."""

from __future__ import annotations

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
        if isinstance(value, str) and "\0" in value:
            raise ConfigError(str(info.field_name), "have no zero byte", got=repr(value))
        if isinstance(value, str):
            try:
                refuse_secrets(str(info.field_name), value)
            except FieldError as error:
                raise ConfigError(error.field, error.rule, got=error.got, hint=error.hint) from None
        return value
