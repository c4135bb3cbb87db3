"""What Hugging Face calls the parts of an encoder, with its head or alone."""

from __future__ import annotations

from dataclasses import dataclass

from megahead.convert.renames import Renames
from megahead.errors import FieldError


@dataclass(frozen=True)
class EncoderNames:
    """Parameter names of one kind of model: with a head, or alone and without `prefix`."""

    kind: str
    """For people."""

    prefix: str
    """Begins the backbone's names in a model with a head."""

    table: Renames
    ignored: tuple[str, ...]
    """Parts of names of what is no parameter of ours: poolers, buffers, the head's copy of a tied weight."""

    heads: tuple[str, ...]
    """What the head's names begin with."""

    def ours(self, theirs: str) -> tuple[str, ...]:
        """Our names of what a stored tensor of theirs holds, in a model with a head or without; none for what we leave
        out.

        Raises FieldError for a name that this kind of model does not have.
        """
        if any(part in theirs for part in self.ignored):
            return ()
        name = theirs.replace(".gamma", ".weight").replace(".beta", ".bias")  # as TensorFlow called them
        if not name.startswith((self.prefix, *self.heads)):
            name = self.prefix + name
        ours = self.table.ours(name)
        if not ours:
            raise FieldError("model", f"hold tensors of a {self.kind} model only", got=f"one that has {theirs}")
        return ours
