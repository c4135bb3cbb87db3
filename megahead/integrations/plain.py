"""A trained body as a plain model of transformers: `none`, `tied` or `pmi`, whichever head its class has a place for.

Families that our own exports know go out as these do: exact, compared, and with every head docs/models.md names. Of any
other the output matrix becomes the input embedding and its bias, where there is one, log q; that too is compared.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from megahead.config import HeadName
from megahead.convert import export, from_hf
from megahead.convert.exporting import PARITY_FILE
from megahead.distributed import require_finite
from megahead.errors import FieldError, UserError
from megahead.files import staged_folder
from megahead.objectives import log_unigram

_TOLERANCE = 1e-4  # of the largest score
_HEADS = ("none", "tied", "pmi")


def save_plain(
    kind: type[PreTrainedModel],
    body: PreTrainedModel,
    weights: Mapping[str, Tensor],
    counts_V: Tensor,
    folder: Path,
    head: HeadName,
    tokenizer: Any,
) -> None:
    """Writes `folder`, of `kind` and with the body's `weights`; UserError where it cannot have `head`.

    counts_V: of the targets it was trained on. tokenizer: of transformers, or None.
    """
    if head not in _HEADS:
        raise FieldError("head", f"be one of {', '.join(_HEADS)}", got=head)
    require_finite(weights.items(), "model")
    with TemporaryDirectory() as place:
        alone = Path(place, "body", folder.name)
        body.save_pretrained(alone, state_dict=dict(weights))
        if tokenizer is not None:
            tokenizer.save_pretrained(alone)
        try:
            run = from_hf(alone, Path(place, "run"), target_counts_V=counts_V)
        except UserError as error:
            if head != "none" and not isinstance(error, FieldError):
                raise
            run = None  # not one of ours, by family or by a setting; or an encoder without a tokenizer
        if run is not None:
            with staged_folder(folder, replaceable=PARITY_FILE) as staged:
                export(run, staged, head, dtype=str(body.dtype).removeprefix("torch."))
            return
    with staged_folder(folder) as staged:
        if head == "none":
            body.save_pretrained(staged, state_dict=dict(weights))
        else:
            _with_head(kind, body.config, weights, counts_V, head).save_pretrained(staged)
        if tokenizer is not None:
            tokenizer.save_pretrained(staged)


@torch.no_grad()
def _with_head(
    kind: type[PreTrainedModel], config: PreTrainedConfig, weights: Mapping[str, Tensor], counts_V: Tensor, head: str
) -> PreTrainedModel:
    """The whole model, on the CPU, whose output matrix is the input embedding."""
    config = copy.deepcopy(config)
    config.tie_word_embeddings = True
    model = kind(config)
    model.base_model.load_state_dict(weights)
    model.tie_weights()
    output, bias_V = model.get_output_embeddings(), torch.zeros(len(counts_V))
    if head == "pmi":
        bias_V = log_unigram(counts_V, len(counts_V))
    if isinstance(output, nn.Linear) and output.bias is not None:
        output.bias.copy_(bias_V)
    elif head == "pmi":
        raise UserError(f"`head` pmi needs a bias in the head, but a {kind.__name__} has none; use tied or none.")
    _compare(model.eval(), bias_V)
    return nn.Module.to(model, next(iter(weights.values())).dtype)


def _compare(model: PreTrainedModel, bias_V: Tensor) -> None:
    """UserError unless the model's scores are its outputs times its input embedding, and the bias."""
    ids_BT = torch.randint(len(bias_V), (2, 16), generator=torch.Generator().manual_seed(0))
    expected_BTV = model.base_model(ids_BT).last_hidden_state @ model.get_input_embeddings().weight.T + bias_V
    error = (model(ids_BT).logits - expected_BTV).abs().max()
    if not error <= _TOLERANCE * expected_BTV.abs().max():
        kind = type(model).__name__
        raise UserError(
            f"`head` must be none for a {kind}, but is not; it does more to its outputs than multiply by its embedding."
        )
