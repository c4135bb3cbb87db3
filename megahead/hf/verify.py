"""Verifies that an exported folder computes the same outputs as the checkpoint, within rounding."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megahead.config.model import ModelConfig
from megahead.data.indexed import IndexedDataset
from megahead.errors import CheckpointError, DataError
from megahead.hf.heads import DTYPES, ExportTarget, Head
from megahead.hf.loading import load_backbone, load_causal, load_masked, logits_at
from megahead.hf.trained import EMBEDDING, MASK_HEAD, TrainedModel
from megahead.models.families import build_backbone
from megahead.objectives.micro_batch import MaskHead
from megahead.remote_files import is_remote

TOLERANCE = 1e-5
"""Largest error of an fp32 export, as a share of the largest output (of 10, when all are smaller)."""

MAX_PADDING = 1e-6
"""Largest total probability of the ids that only pad the vocabulary, if the export has them."""

_ROUNDING_FACTOR = 4  # tolerance of a half-precision export, in rounding errors of the source

_NUM_ROWS, _ROW_TOKENS = 2, 64
_MAX_LOGITS = 1 << 24
"""Limits the logits to 64 MiB: of large vocabularies only the last tokens of each row are compared."""


@dataclass(frozen=True)
class Parity:
    """The differences between an export and its source."""

    compared: str
    """`logits`, or `hidden states` of an export without a head."""

    tokens: int
    """Number of compared tokens: random ones and, if the run's dataset exists, real ones."""

    largest_output: float
    largest_error: dict[str, float]
    """By the dtype of the computation: float32, and the stored dtype."""

    own_rounding: float
    """The error of the source itself when it computes in the stored dtype; 0 for float32."""

    padding: float
    """Largest total probability of padding rows, over positions and dtypes."""

    tolerance: float
    """The largest error allowed in the stored dtype."""


def verify(folder: Path, target: ExportTarget) -> Parity:
    """Compares the exported `folder`, in fp32 and in its own dtype, with the source in fp32; CheckpointError if the
    outputs in its own dtype differ by more than the tolerance.

    Cost: a forward pass of a few hundred tokens for each model, with one layer in memory at a time (all layers of an
    exported encoder). A half-precision export needs another pass of the source to measure its rounding.
    """
    model, head, dtype = target.model, target.head, target.dtype
    rows_BT = _token_rows(model)
    num_rows, last = rows_BT.shape
    if target.has_head():
        last = min(last, max(1, _MAX_LOGITS // (num_rows * model.config.model.vocab_size)))
    expected = expected_outputs(model, head, rows_BT, last)
    width = expected.shape[-1]
    errors, padding = {}, 0.0
    for compute_dtype in dict.fromkeys(["float32", dtype]):
        outputs = _exported_outputs(folder, target, rows_BT, last, DTYPES[compute_dtype])
        errors[compute_dtype] = float((outputs[..., :width] - expected).abs().max())  # padding rows come last
        padding = max(padding, float(outputs.softmax(-1)[..., width:].sum(-1).max()))
    rounded = expected if dtype == "float32" else expected_outputs(model, head, rows_BT, last, DTYPES[dtype])
    compared = "logits" if target.has_head() else "hidden states"
    scale = float(expected.abs().max())
    own_rounding = float((rounded - expected).abs().max())
    tolerance = TOLERANCE * max(scale, 10.0) + _ROUNDING_FACTOR * own_rounding
    if not errors[dtype] <= tolerance:  # also if one of them is NaN
        raise CheckpointError(
            f"the exported {compared} must be within {tolerance:.1e} of the checkpoint's, but are off by "
            f"{errors[dtype]:.1e} in {dtype}; nothing was written."
        )
    if padding > MAX_PADDING:
        raise CheckpointError(
            f"padding rows must take at most {MAX_PADDING:.0e} of the exported probability, but take {padding:.1e}; "
            "nothing was written."
        )
    return Parity(compared, expected[..., 0].numel(), scale, errors, own_rounding, padding, tolerance)


@torch.no_grad()
def expected_outputs(
    model: TrainedModel, head: Head, rows_BT: Tensor, last: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[B, t, V] reference logits, for example `E h / temperature + log q` (q: the tokens' frequencies), or [B, t, D]
    hidden states, of the `last` t tokens of each row.

    Computed in `dtype` throughout, returned in fp32.
    """
    backbone, vocab_size = _build_streamed(build_backbone, model, "backbone", dtype), model.config.model.vocab_size
    backbone.register_module("embedding", _StreamedEmbedding(model, dtype))
    hidden_BtD: Tensor = backbone(rows_BT)[:, -last:]
    if head.matrix is None:
        return hidden_BtD.float()
    bias_V = model.head_bias(head.name)
    if f"{MASK_HEAD}bias" in model.shapes:
        hidden_BtD = _build_streamed(MaskHead, model, "mask_head", dtype)(hidden_BtD)
    logits_BtV, first = hidden_BtD.new_empty(*hidden_BtD.shape[:2], vocab_size, dtype=torch.float32), 0
    for rows_vD in model.blocks(head.matrix, vocab_size):
        rows_vD = rows_vD.to(dtype)
        scores_Btv = (hidden_BtD @ rows_vD.T) / head.temperature
        if bias_V is not None:
            scores_Btv = scores_Btv + bias_V[first : first + len(rows_vD)].to(dtype)
        logits_BtV[..., first : first + len(rows_vD)] = scores_Btv
        first += len(rows_vD)
    return logits_BtV


def _build_streamed(
    build: Callable[[ModelConfig], nn.Module], model: TrainedModel, prefix: str, dtype: torch.dtype
) -> nn.Module:
    """Builds the module of the trained model whose parameters' names start with `prefix`, on the CPU in `dtype`. A
    layer reads its weights for each call and frees them after it: memory holds one layer at a time."""
    with torch.device("meta"):
        module = build(model.config.model)
    model.require_parameters(module.named_parameters(prefix))
    for path, layer in module.named_modules(prefix=prefix):
        full_names = {name: f"{path}.{name}" for name, _ in layer.named_parameters(recurse=False)}
        if full_names:
            layer.register_forward_pre_hook(partial(_load_weights, model, full_names, dtype))
            layer.register_forward_hook(partial(_free_weights, full_names))
    return module.eval()


def _load_weights(
    model: TrainedModel, full_names: Mapping[str, str], dtype: torch.dtype, layer: nn.Module, _inputs: Any
) -> None:
    for name, full_name in full_names.items():
        layer.register_parameter(name, nn.Parameter(model.weight(full_name).to(dtype), requires_grad=False))


def _free_weights(names: Iterable[str], layer: nn.Module, _inputs: Any, _output: Any) -> None:
    for name in names:
        layer.register_parameter(name, nn.Parameter(layer.get_parameter(name).to("meta"), requires_grad=False))


class _StreamedEmbedding(nn.Module):
    """An embedding that reads its table from disk for each call, block by block."""

    def __init__(self, model: TrainedModel, dtype: torch.dtype) -> None:
        super().__init__()
        self._model, self._dtype = model, dtype

    def forward(self, ids: Tensor) -> Tensor:
        """[..., D]: the rows of `ids`."""
        rows, first = torch.empty(*ids.shape, self._model.config.model.hidden_size, dtype=self._dtype), 0
        for block in self._model.blocks(EMBEDDING):
            is_in_block = (ids >= first) & (ids < first + len(block))
            rows[is_in_block] = block[ids[is_in_block] - first].to(self._dtype)
            first += len(block)
        return rows


@torch.no_grad()
def _exported_outputs(folder: Path, target: ExportTarget, rows_BT: Tensor, last: int, dtype: torch.dtype) -> Tensor:
    num_rows, length = rows_BT.shape
    with tempfile.TemporaryDirectory(dir=folder) as offload:
        if not target.has_head():
            hidden_BTD: Tensor = load_backbone(folder, dtype, offload_folder=Path(offload))(rows_BT).last_hidden_state
            return hidden_BTD[:, -last:].float()
        is_masked_lm = target.is_masked_lm()
        model = load_masked(folder, dtype) if is_masked_lm else load_causal(folder, dtype, offload_folder=Path(offload))
        row_O = torch.arange(num_rows).repeat_interleave(last)
        position_O = torch.arange(length - last, length).repeat(num_rows)
        logits_OV = next(logits_at(model, row_O, position_O, len(row_O), input_ids=rows_BT))
    return logits_OV.float().view(num_rows, last, -1)


def _token_rows(model: TrainedModel) -> Tensor:
    """[B, T] rows of random ids, and of the run's dataset, longer than the window of local layers."""
    vocab_size = model.config.model.vocab_size
    window = model.config.model.local_window if model.config.model.local_layers() else 0
    length = min(_ROW_TOKENS + window, model.config.data.sequence_length)
    padding = model.config.model.padding_token()  # which has no position in a RoBERTa
    num_ids, generator = vocab_size - (padding is not None), torch.Generator().manual_seed(0)
    random_BT = torch.randint(num_ids, (_NUM_ROWS, length), generator=generator)
    if padding is not None:
        random_BT += random_BT >= padding
    dataset_BT = _dataset_rows(model, length)
    return random_BT if dataset_BT is None else torch.cat([random_BT, dataset_BT])


def _dataset_rows(model: TrainedModel, length: int) -> Tensor | None:
    prefix = model.config.data.validation or model.config.data.parts()[0].prefix
    if is_remote(prefix):
        return None  # does not download a dataset for a few rows
    try:
        dataset = IndexedDataset(prefix)
        starts = range(0, dataset.num_tokens - length, length)[:_NUM_ROWS]
        rows = [torch.from_numpy(dataset.read(start, length).astype(np.int64)) for start in starts]
    except DataError:  # trained on another machine
        return None
    rows = [row for row in rows if row.max() < model.config.model.vocab_size]  # else the file now holds another text
    return torch.stack(rows) if rows else None
