"""Decides how a model is exported, before anything is written: family, head, rows and dtype."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megahead.config.model import ModelConfig
from megahead.config.objective import HeadName
from megahead.errors import CheckpointError, FieldError, UserError
from megahead.hf.decoders import DECODERS, LLAMA_WITH_HEAD_BIAS, model_type_of
from megahead.hf.encoders import ENCODERS
from megahead.hf.families import Family
from megahead.hf.trained import BACKBONE, EMBEDDING, HEAD, MASK_HEAD, TrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_family(model: ModelConfig, *, head_bias: bool = False) -> Family:
    """Returns the family that `model` is exported as: a Llama as Llama, Qwen 2 or Qwen 3 by its settings, with a head
    bias as ERNIE 4.5; a BERT without token types as DistilBERT, a causal ModernBERT as ModernBERT decoder. FieldError
    for a causal BERT or RoBERTa, which transformers lacks."""
    if model.family == "llama":
        return LLAMA_WITH_HEAD_BIAS if head_bias else DECODERS[model_type_of(model)]
    if model.family == "modernbert":
        return ENCODERS["modernbert-decoder" if model.is_causal else "modernbert"]
    if model.is_encoder() and model.is_causal:
        rule, hint = f"be false in a {model.family} that is exported", "a modernbert is exported either way"
        raise FieldError("model.is_causal", rule, got="true", hint=hint)
    bert = "bert" if model.token_types else "distilbert"
    model_types = {"bert": bert, "gemma3": "gemma3_text", "xlm_roberta": "xlm-roberta"}
    return (DECODERS | ENCODERS)[model_types.get(model.family, model.family)]


@dataclass(frozen=True)
class ExportTarget:
    """A trained model, and the form in which it is exported."""

    model: TrainedModel
    head: Head
    family: Family

    vocab_size: int
    """Rows of the exported embedding and of the head."""

    dtype: str
    """Dtype of the stored weights."""

    @staticmethod
    def from_model(model: TrainedModel, head: HeadName, dtype: str, *, keep_padding: bool) -> ExportTarget:
        """Returns the target with a head of this name; UserError if the model cannot have it, or no class of
        transformers can. Without the mask decoder, if there is one: MAE-LM's last layers, which alone read mask tokens
        and serve training only."""
        built_head, model_config = build_head(head, model, keep_padding=keep_padding), model.config.model
        family = export_family(model_config, head_bias=built_head.bias_V is not None)
        vocab_size = model_config.padded_vocab_size() if keep_padding else model_config.vocab_size
        return ExportTarget(model.without_mask_decoder(), built_head, family, vocab_size, dtype)

    def is_masked_lm(self) -> bool:
        """Whether the head predicts masked tokens, not next tokens."""
        return self.family.head_type == "MaskedLM"

    def has_head(self) -> bool:
        """Whether a head is exported, not the backbone alone."""
        return self.head.matrix is not None


# The head of an exported encoder: the transform, norm and bias of masked language models around the embedding.
#
# That head computes W norm(gelu(dense h)) + bias. A vanilla encoder has trained all of it. A headless one has none,
# but its outputs h = w * x + b are those of a layer norm, whose x has mean 0 and variance 1; so the head can compute
# `E h / T + log q`: dense = diag(1/w) with bias -b/w + B gives x + B, on which GELU is the identity if B is large; the
# norm removes B and, with (w, b) / T as weight and bias, gives h / T; and the decoder's bias is log q.
#
# Norms add eps to a variance. If v is the variance of the last norm's input, x has variance v / (v + eps), and the
# head's norm adds eps once more; with sqrt(1 + eps) in its weight the relative error of h is eps / 2v: 5e-6 for v = 1
# and eps = 1e-5.
#
# E embedding, h output, T temperature, q distribution of targets; V vocabulary, D features.

PADDING_BIAS = -1e4
"""The bias of exported padding rows, so that they get no probability."""

_GELU_LINEAR_FROM = 6.0  # above it GELU(x) is x, within 1e-8


def identity_transform(
    weight_D: Tensor, norm_bias_D: Tensor | None, eps: float, bias_V: Tensor, temperature: float
) -> dict[str, Tensor]:
    """Returns the parameters of a head that computes `E h / T + bias_V` after a last norm of this weight, bias and eps.

    The head's norm has the same eps, and a bias if the last norm has one. CheckpointError if a weight is exactly 0.
    """
    weight_D = weight_D.double()
    _require_inverse(weight_D, "an encoder's head", "exported", "last", "none")
    offset = math.sqrt(len(weight_D)) + _GELU_LINEAR_FROM  # B: no normed feature is below -sqrt(D)
    shift_D = torch.zeros_like(weight_D) if norm_bias_D is None else norm_bias_D.double()
    transform = {
        "mask_head.dense.weight": torch.diag(1 / weight_D),
        "mask_head.dense.bias": offset - shift_D / weight_D,
        "mask_head.norm.weight": math.sqrt(1 + eps) * weight_D / temperature,
        "mask_head.bias": bias_V,
    }
    return transform if norm_bias_D is None else transform | {"mask_head.norm.bias": shift_D / temperature}


def _require_inverse(weight_D: Tensor, subject: str, action: str, norm: str, alternative: str) -> None:
    if zeros := int((weight_D == 0).sum()):
        raise CheckpointError(
            f"{subject} cannot be {action}: {zeros} of the {norm} norm's {len(weight_D)} weights are exactly 0; export "
            f"with --head {alternative}."
        )


# The output matrix of an exported model, for each kind of head.
#
# A Hugging Face GPT-NeoX has a head without a bias, so the bias of the training-free head `E h / T + log q` is folded
# into matrix and final norm. That norm gives h = w * x + b with mean(x) = 0 over D features, hence (1/w).h =
# sum(b/w) = S, the same for every token. With the exported norm bias moved by delta = +w or -w (the sign of S), the
# output h' = h + delta has (1/w).h' = S' = S + D or S - D, never near 0; with u = (1/w) / S', u.h' = 1, and `W = E / T
# + (log q - E delta / T) (outer) u` gives W h' = E h / T + log q exactly. Any other head with exported padding rows has
# a folded bias too, 0 except for those rows: without one they would have a share of the probability.
#
# After an RMS norm nothing can be folded in. A Llama with a head bias is exported as a class that has one
# (`megahead/hf/decoders.py`). One with norms of queries and keys cannot have that head: no class has both.
#
# V vocabulary, D features; v rows of one chunk.


@dataclass(frozen=True)
class FoldedBias:
    """A bias over the vocabulary that is folded into the matrix and the final norm's bias; float64."""

    bias_V: Tensor
    delta_D: Tensor
    """Added to the norm's bias."""

    unit_D: Tensor
    """u: its product with every output of the norm is 1."""

    def fold(self, rows_vD: Tensor, first: int) -> Tensor:
        """[v, D]: rows of `E / T`, of which the first has index `first`, with their bias folded in; float64."""
        rows_vD = rows_vD.double()
        bias_v = self.bias_V[first : first + len(rows_vD)]
        return rows_vD + torch.outer(bias_v - rows_vD @ self.delta_D, self.unit_D)


def fold_bias(
    norm_weight_D: Tensor, norm_bias_D: Tensor, bias_V: Tensor, head_without_bias: HeadName = "tied"
) -> FoldedBias:
    """Folds `bias_V` after a layer norm of this weight and bias; CheckpointError, suggesting `head_without_bias`, if a
    weight is exactly 0."""
    weight_D, norm_bias_D = norm_weight_D.double(), norm_bias_D.double()
    alternative = f"{head_without_bias} or none, without --keep-padding"
    _require_inverse(weight_D, "a head's bias", "folded into the model", "final", alternative)
    constant = (norm_bias_D / weight_D).sum()
    sign = 1.0 if constant >= 0 else -1.0
    unit_D = 1 / weight_D / (constant + sign * len(weight_D))
    return FoldedBias(bias_V.double(), sign * weight_D, unit_D)


@dataclass(frozen=True)
class Head:
    """How the exported output matrix is computed, row by row, from a stored parameter."""

    name: HeadName

    matrix: str | None = None
    """The parameter that its rows come from; None: the export has no head."""

    temperature: float = 1.0
    folded_bias: FoldedBias | None = None

    bias_V: Tensor | None = None
    """Bias over the padded vocabulary, stored beside the matrix."""

    transform: Mapping[str, Tensor] | None = None
    """Parameters of an encoder's head except for the matrix, temperature included, by name."""

    def is_tied(self) -> bool:
        """Whether the output matrix equals the input embedding, so that it need not be stored.

        A matrix with a bias is stored: vLLM ignores all stored parameters of a tied head, so would predict without its
        bias, but refuses an untied head with a bias that its class lacks.
        """
        is_unchanged = self.temperature == 1.0 and self.folded_bias is None and self.bias_V is None
        return self.matrix == EMBEDDING and (self.transform is not None or is_unchanged)

    def exported_rows(self, stored_vD: Tensor, first: int) -> Tensor:
        """[v, D]: the exported rows of stored ones, of which the first has index `first`."""
        if self.transform is not None:
            return stored_vD
        rows_vD = stored_vD if self.temperature == 1.0 else stored_vD.double() / self.temperature
        return rows_vD if self.folded_bias is None else self.folded_bias.fold(rows_vD, first)

    def exported_config(self, model: ModelConfig) -> ModelConfig:
        """Returns `model` with the exported head's setting: an identity transform needs a bias."""
        has_bias = self.transform is not None and f"{MASK_HEAD}dense.bias" in self.transform
        return model.model_copy(update={"transform_bias": model.transform_bias or has_bias})

    def exported_norm_bias(self, stored_D: Tensor) -> Tensor:
        """[D]: the exported bias of the final norm."""
        return stored_D if self.folded_bias is None else stored_D.double() + self.folded_bias.delta_D


def build_head(name: HeadName, model: TrainedModel, *, keep_padding: bool = False) -> Head:
    """Returns the head `name` of a trained model, with `keep_padding` over the padding rows too.

    Raises UserError if the model cannot have it, or no class of transformers can.
    """
    objective, reason = model.config.objective, model.config.no_head_reason()
    require_head(name, model)
    if name == "none":
        return Head(name)
    if reason is not None:
        raise _head_error(name, "a model that a class of transformers can be", f"this one {reason}", "none")
    matrix, head_without_bias = HEAD if objective.trains_head() else EMBEDDING, objective.head_without_bias()
    model_config, head, bias_V = model.config.model, Head(name, matrix, model.temperature()), model.head_bias(name)
    num_padding_rows = model_config.padded_vocab_size() - model_config.vocab_size
    has_padding = keep_padding and num_padding_rows > 0
    if bias_V is None and not has_padding and not model_config.is_encoder():
        return head
    padding = torch.full((num_padding_rows,), PADDING_BIAS)
    bias_V = torch.cat([torch.zeros(model_config.vocab_size) if bias_V is None else bias_V, padding])
    if model_config.is_encoder():
        return replace(head, transform=_encoder_transform(model, bias_V, head.temperature))
    if not model_config.has_rms_norm():
        norm_D, norm_bias_D = (model.weight(f"backbone.final_norm.{part}") for part in ("weight", "bias"))
        return replace(head, folded_bias=fold_bias(norm_D, norm_bias_D, bias_V, head_without_bias))
    if not model_config.transformers_can_bias_head():
        option = name if name == "pmi" or not has_padding else f"{name} --keep-padding"
        reason = "no class of transformers has one beside norms of queries and keys (Qwen 3, Gemma 3)"
        alternatives = "none"
        if not objective.output_bias:
            alternatives = f"convert to-hf --head {head_without_bias} or none without --keep-padding, or train a head"
        raise _head_error(option, "a bias in the head", reason, alternatives)
    return replace(head, bias_V=bias_V)


def require_head(name: HeadName, model: TrainedModel) -> None:
    """Raises UserError if the model's objective rules out the head `name`."""
    objective = model.config.objective
    is_headless, trains_head, objective_head = objective.name == "headless", objective.trains_head(), objective.head()
    if name == "trained" and is_headless and not trains_head:
        raise _head_error(name, "a run that trained a head", "this one was headless", "pmi, tied or none")
    if name == "tied" and trains_head:
        alternatives = f"{objective_head} or none"
        raise _head_error(name, "a run that scored by its embedding", "this one trained a head", alternatives)
    if name == "pmi" and not is_headless:
        raise _head_error(name, "a headless model", "this one is vanilla", "trained or none")
    if name == "pmi" and objective_head != "pmi":
        raise _head_error(name, "a model whose scores lack a bias", "this one's do not", f"{objective_head} or none")


def best_head(model: TrainedModel) -> HeadName:
    """Returns the head of an export that predicts best without further training: `trained` (also for a
    vanilla run's tied matrix), `tied` or `pmi`; `none` if the run has a `no_head_reason`."""
    objective = model.config.objective
    if model.config.no_head_reason() is not None:
        return "none"
    return "trained" if objective.name == "vanilla" else objective.head()


def _encoder_transform(model: TrainedModel, bias_V: Tensor, temperature: float) -> dict[str, Tensor]:
    """Returns the trained transform of an encoder, its temperature in the norm, else an identity that adds `bias_V`."""
    model_config = model.config.model
    stored = {name: model.weight(name) for name in model.shapes if name.startswith(MASK_HEAD)}
    if stored:
        padded_V = stored["mask_head.bias"].clone()
        padded_V[model_config.vocab_size :] = PADDING_BIAS
        scaled = {name: stored[name] / temperature for name in stored if name.startswith("mask_head.norm.")}
        return {**stored, **scaled, "mask_head.bias": padded_V}
    norm = f"{BACKBONE}final_norm"
    if f"{norm}.weight" not in model.shapes:
        norm = f"{BACKBONE}blocks.{model_config.num_layers - 1}.mlp_norm"
    norm_bias_D = model.weight(f"{norm}.bias") if model_config.has_norm_bias() else None
    return identity_transform(model.weight(f"{norm}.weight"), norm_bias_D, model_config.norm_eps, bias_V, temperature)


def _head_error(name: str, requirement: str, reason: str, alternatives: str) -> UserError:
    return UserError(f"`--head {name}` needs {requirement}, but {reason}; use {alternatives}.")
