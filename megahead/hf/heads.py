"""What an export becomes, decided before anything is written: its family, its head, its rows, its dtype."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megahead.config.model import ModelConfig
from megahead.config.objective import HeadName
from megahead.errors import CheckpointError, UserError
from megahead.hf.decoders import decoder_of
from megahead.hf.encoders import encoder_of
from megahead.hf.families import Family
from megahead.hf.trained import BACKBONE, EMBEDDING, HEAD, MASK_HEAD, TrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ExportTarget:
    """A trained model, and how it is exported."""

    model: TrainedModel
    head: Head

    family: Family
    """Names and classes of Hugging Face's."""

    vocab_size: int
    """Rows of the exported embedding and of the head."""

    dtype: str
    """Of the stored weights."""

    @staticmethod
    def of(model: TrainedModel, head: HeadName, dtype: str, *, keep_padding: bool) -> ExportTarget:
        """With a head of this name; UserError where the model cannot have it, or is none of transformers'."""
        made, shape = make_head(head, model, keep_padding=keep_padding), model.config.model
        family = family_of(shape, head_bias=made.bias_V is not None)
        vocab_size = shape.padded_vocab_size() if keep_padding else shape.vocab_size
        return ExportTarget(model.used(), made, family, vocab_size, dtype)

    def predicts_masked(self) -> bool:
        """Whether its head is one for masked tokens, and not for next ones."""
        return self.family.predicts == "MaskedLM"

    def has_head(self) -> bool:
        """Whether it predicts tokens, and is not the backbone alone."""
        return self.head.matrix is not None


def family_of(model: ModelConfig, *, head_bias: bool = False) -> Family:
    """The kind that `model` is exported as. FieldError for a causal BERT, which is none."""
    return encoder_of(model) if model.is_encoder() else decoder_of(model, head_bias=head_bias)


# The head an exported encoder gets: the transform, norm and bias of masked language models around the embedding.
#
# That head computes W norm(gelu(dense h)) + bias. A vanilla encoder has trained all of it. A headless one has none,
# but its outputs h = w * x + b come out of a layer norm, whose x has mean 0 and variance 1; so the head can hold `E h
# / T + log q`: dense = diag(1/w) with bias -b/w + B gives x + B, which GELU leaves as it is where B is large; the norm
# takes B off again and, with (w, b) / T as weight and bias, gives h / T; and the decoder's bias is log q.
#
# Norms add eps to a variance. Where v is that of the last norm's input, x has v / (v + eps), and the head's norm adds
# eps once more; with sqrt(1 + eps) in its weight h is off by a share of eps / 2v: 5e-6 where v is 1 and eps 1e-5.
#
# V vocabulary, D features.

PADDING_BIAS = -1e4
"""The bias of padding rows, where they are kept, so that they get no probability."""

_LINEAR_FROM = 6.0  # GELU(x) is x, within 1e-8 of it, from here on


def identity_transform(
    weight_D: Tensor, norm_bias_D: Tensor | None, eps: float, bias_V: Tensor, temperature: float
) -> dict[str, Tensor]:
    """Tensors of a head that gives `E h / T + bias_V` behind a last norm of this weight, bias and eps; by our names.

    The head's own norm has the same eps, and a bias where the last one has.
    CheckpointError if a weight is exactly 0.
    """
    weight_D = weight_D.double()
    zeros = int((weight_D == 0).sum())
    if zeros:
        raise CheckpointError(
            f"an encoder's head cannot be exported: {zeros} of the last norm's {len(weight_D)} weights are exactly 0; "
            "export with --head none."
        )
    lift = math.sqrt(len(weight_D)) + _LINEAR_FROM  # no normed feature is below -sqrt(D)
    shift_D = torch.zeros_like(weight_D) if norm_bias_D is None else norm_bias_D.double()
    transform = {
        "mask_head.dense.weight": torch.diag(1 / weight_D),
        "mask_head.dense.bias": lift - shift_D / weight_D,
        "mask_head.norm.weight": math.sqrt(1 + eps) * weight_D / temperature,
        "mask_head.bias": bias_V,
    }
    return transform if norm_bias_D is None else transform | {"mask_head.norm.bias": shift_D / temperature}


def trained_transform(stored: Mapping[str, Tensor], vocab_size: int, temperature: float) -> dict[str, Tensor]:
    """The tensors that a vanilla encoder trained, with its temperature in the norm; `stored`: by our names."""
    bias_V = stored["mask_head.bias"].clone()
    bias_V[vocab_size:] = PADDING_BIAS
    scaled = {name: stored[name] / temperature for name in stored if name.startswith("mask_head.norm.")}
    return {**stored, **scaled, "mask_head.bias": bias_V}


# The output matrix an exported model gets, for each kind of head.
#
# A head without a bias is all that a Hugging Face GPT-NeoX has, so the training-free head `E h / T + log q` folds its
# bias into matrix and final norm. That norm gives h = w * x + b with mean(x) = 0 over D features, hence (1/w).h =
# sum(b/w) = S, the same for every token. With the exported norm bias moved by delta = +w or -w (the sign of S), the
# output h' = h + delta has (1/w).h' = S' = S + D or S - D, never near 0; with u = (1/w) / S', u.h' = 1, and `W = E / T
# + (log q - E delta / T) (outer) u` gives W h' = E h / T + log q exactly. Any other head whose padding rows are kept
# has a bias in the same way, 0 but for those rows: without one they would take a share of the probability.
#
# Behind an RMS norm nothing can be folded in; a Llama whose head needs a bias is exported as a class that has one
# (`megahead/hf/decoders.py`), and one with norms of queries and keys, which no such class has, cannot have that
# head.
#
# V vocabulary, D features; lower-case v: rows of one chunk.


@dataclass(frozen=True)
class FoldedBias:
    """A bias over the vocabulary, to be folded into the matrix and the final norm's bias; float64."""

    bias_V: Tensor
    delta_D: Tensor
    """Added to the norm's bias."""

    unit_D: Tensor
    """u: its product with every output of the norm is 1."""

    def fold(self, rows_vD: Tensor, first: int) -> Tensor:
        """[v, D]: rows `first` on of `E / T`, with their bias folded in; float64."""
        rows_vD = rows_vD.double()
        bias_v = self.bias_V[first : first + len(rows_vD)]
        return rows_vD + torch.outer(bias_v - rows_vD @ self.delta_D, self.unit_D)


def fold_bias(norm_weight_D: Tensor, norm_bias_D: Tensor, bias_V: Tensor) -> FoldedBias:
    """How `bias_V` is folded behind a layer norm of this weight and bias; CheckpointError if a weight is exactly 0."""
    weight_D, norm_bias_D = norm_weight_D.double(), norm_bias_D.double()
    zeros = int((weight_D == 0).sum())
    if zeros:
        raise CheckpointError(
            f"a head's bias cannot be folded into the model: {zeros} of the final norm's {len(weight_D)} weights are "
            "exactly 0; export with --head tied or none, without --keep-padding."
        )
    constant = (norm_bias_D / weight_D).sum()
    sign = 1.0 if constant >= 0 else -1.0
    unit_D = 1 / weight_D / (constant + sign * len(weight_D))
    return FoldedBias(bias_V.double(), sign * weight_D, unit_D)


@dataclass(frozen=True)
class Head:
    """How the exported output matrix is made, row by row, of a stored parameter."""

    name: HeadName

    matrix: str | None = None
    """The parameter its rows come from; None: the export has no head."""

    temperature: float = 1.0
    folded: FoldedBias | None = None

    bias_V: Tensor | None = None
    """Over the padded vocabulary, stored as it is beside the matrix."""

    transform: Mapping[str, Tensor] | None = None
    """An encoder's layers between outputs and matrix, temperature included, and the bias; by our names."""

    def is_embedding(self) -> bool:
        """Whether the output matrix equals the input embedding, so that it need not be stored.

        Beside a bias it is stored: vLLM ignores all stored parts of a tied head, the bias included, and would predict
        without it; for an untied one it refuses a bias that it has no place for.
        """
        plain = self.temperature == 1.0 and self.folded is None and self.bias_V is None
        return self.matrix == EMBEDDING and (self.transform is not None or plain)

    def rows(self, stored_vD: Tensor, first: int) -> Tensor:
        """[v, D]: the exported rows, from the stored ones `first` on."""
        if self.transform is not None:
            return stored_vD
        rows_vD = stored_vD if self.temperature == 1.0 else stored_vD.double() / self.temperature
        return rows_vD if self.folded is None else self.folded.fold(rows_vD, first)

    def shape(self, model: ModelConfig) -> ModelConfig:
        """`model` as what is exported has it: a transform that gives its input back needs a bias."""
        biased = self.transform is not None and f"{MASK_HEAD}dense.bias" in self.transform
        return model.model_copy(update={"transform_bias": model.transform_bias or biased})

    def norm_bias(self, stored_D: Tensor) -> Tensor:
        """[D]: the exported bias of the final norm."""
        return stored_D if self.folded is None else stored_D.double() + self.folded.delta_D


def make_head(name: HeadName, model: TrainedModel, *, keep_padding: bool = False) -> Head:
    """The head `name` of a trained model, over the padding rows too with `keep_padding`.

    Raises UserError where the model cannot have it, or no class of transformers.
    """
    objective, reason = model.config.objective, model.config.no_head_reason()
    require_head(name, model)
    if name == "none":
        return Head(name)
    if reason is not None:
        raise _impossible(name, "a model that a class of transformers can be", f"this one {reason}", "none")
    matrix = HEAD if objective.head() == "trained" else EMBEDDING
    shape, plain, bias_V = model.config.model, Head(name, matrix, model.temperature()), model.bias(name)
    padded = keep_padding and shape.padded_vocab_size() > shape.vocab_size
    if bias_V is None and not padded and not shape.is_encoder():
        return plain
    padding = torch.full((shape.padded_vocab_size() - shape.vocab_size,), PADDING_BIAS)
    bias_V = torch.cat([torch.zeros(shape.vocab_size) if bias_V is None else bias_V, padding])
    if shape.is_encoder():
        return replace(plain, transform=_transform(model, bias_V, plain.temperature))
    if not shape.has_rms_norm():
        norm_D, norm_bias_D = (model.weight(f"backbone.final_norm.{part}") for part in ("weight", "bias"))
        return replace(plain, folded=fold_bias(norm_D, norm_bias_D, bias_V))
    if shape.qk_norm:
        wanted = name if name == "pmi" or not padded else f"{name} --keep-padding"
        given = "no class of transformers has one beside norms of queries and keys (Qwen 3)"
        others = "none" if objective.output_bias else "tied or none without --keep-padding, or train a head"
        raise _impossible(wanted, "a bias in the head", given, others)
    return replace(plain, bias_V=bias_V)


def require_head(name: HeadName, model: TrainedModel) -> None:
    """UserError unless a model that was trained so has scores by the head `name`."""
    headless, own = model.config.objective.name == "headless", model.config.objective.head()
    if name == "trained" and headless and own != "trained":
        raise _impossible(name, "a run that trained a head", "this one was headless", "pmi, tied or none")
    if name == "tied" and own == "trained":
        raise _impossible(name, "a run that scored by its embedding", "this one trained a head", "trained or none")
    if name == "pmi" and not headless:
        raise _impossible(name, "a headless model", "this one is vanilla", "trained or none")
    if name == "pmi" and own != "pmi":
        raise _impossible(name, "a model whose scores lack a bias", "this one's do not", f"{own} or none")


def best_head(model: TrainedModel) -> HeadName:
    """The head of an export that predicts best without training: one of its own, the embedding as it is, or with its
    bias; `none` where no export can have one.

    A tied matrix that was trained as a softmax is called `trained`.
    """
    objective = model.config.objective
    if model.config.no_head_reason() is not None:
        return "none"
    return "trained" if objective.name == "vanilla" else objective.head()


def _transform(model: TrainedModel, bias_V: Tensor, temperature: float) -> dict[str, Tensor]:
    """An encoder's: its own where it has one, else one that changes nothing and adds `bias_V`."""
    shape = model.config.model
    stored = {key: model.weight(key) for key in model.shapes if key.startswith(MASK_HEAD)}
    if stored:
        return trained_transform(stored, shape.vocab_size, temperature)
    final = f"{BACKBONE}final_norm"
    last = final if f"{final}.weight" in model.shapes else f"{BACKBONE}blocks.{shape.num_layers - 1}.mlp_norm"
    norm_bias_D = model.weight(f"{last}.bias") if shape.has_norm_bias() else None
    return identity_transform(model.weight(f"{last}.weight"), norm_bias_D, shape.norm_eps, bias_V, temperature)


def _impossible(name: str, needed: str, given: str, others: str) -> UserError:
    return UserError(f"`--head {name}` needs {needed}, but {given}; use {others}.")
