"""Log-probabilities of tokens by a language model, for many rows at once, without computing anything twice.

Rows are batched by length, so that little is padding. The head, most of a small model's work, is applied only to
outputs that predict a wanted token. In a decoder, rows with the same prefix share one output, as minimal pairs do.

B rows, T tokens, P predictions, O distinct outputs from which they are made, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_TOKENS, _LOGITS = 1 << 13, 1 << 22  # of a batch on a CPU: 16 MB of logits, which stay in its caches
_ON_GPU = 32  # on a GPU, this many times larger batches, to keep it busy
_AT_ONCE = 16  # outputs per call of logsumexp


class Row(NamedTuple):
    """Tokens that a model reads, and at some places the targets whose probability is wanted."""

    ids: tuple[int, ...]
    places: tuple[int, ...]
    targets: tuple[int, ...]


class TokenPredictor:
    """Computes log-probabilities with a Hugging Face language model; `causal`: a token attends only to earlier ones."""

    def __init__(self, model: Any, *, causal: bool, batch_size: int | None = None) -> None:
        """batch_size: rows at once; None: as many as 8,192 tokens and 4 million logits allow (a GPU: 32 times that)."""
        self._model = model
        self._causal = causal
        self._batch_size = batch_size

    def log_probabilities(self, rows: Sequence[Row]) -> list[float]:
        """For each row the sum over its targets, in nats. Equal rows get equal numbers: each is computed once."""
        found: dict[Row, float] = {}
        for batch in self._batches(sorted(set(rows), key=lambda row: (len(row.ids), row))):
            found.update(zip(batch, self._sums(batch).tolist(), strict=True))
        return [found[row] for row in rows]

    def _batches(self, rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
        """`rows`, by length, cut before a batch grows beyond its limits."""
        times = _ON_GPU if self._model.device.type == "cuda" else 1
        tokens, most_outputs = times * _TOKENS, times * _LOGITS // self._model.config.vocab_size
        start, outputs = 0, set[Hashable]()
        for end, row in enumerate(rows):
            size, mine = end - start + 1, set(self._outputs(row))
            outputs |= mine
            large = size * len(row.ids) > tokens or len(outputs) > most_outputs
            if end > start and (large if self._batch_size is None else size > self._batch_size):
                yield rows[start:end]
                start, outputs = end, mine
        if rows:
            yield rows[start:]

    def _outputs(self, row: Row) -> list[Hashable]:
        """For each of its places a key: equal keys mean equal outputs."""
        return [row.ids[: place + 1] if self._causal else (row.ids, place) for place in row.places]

    @torch.inference_mode()
    def _sums(self, rows: Sequence[Row]) -> Tensor:
        """[B], fp64."""
        longest, device = max(len(row.ids) for row in rows), self._model.device
        ids_BT = torch.tensor([row.ids + (0,) * (longest - len(row.ids)) for row in rows], device=device)
        lengths_B = torch.tensor([len(row.ids) for row in rows], device=device)
        made: dict[Hashable, tuple[int, int, int]] = {}  # an output's number, row and place
        wanted = []
        for k, row in enumerate(rows):
            for output, place, target in zip(self._outputs(row), row.places, row.targets, strict=True):
                wanted.append((k, made.setdefault(output, (len(made), k, place))[0], target))
        row_P, output_P, target_P = torch.tensor(wanted, device=device).view(-1, 3).unbind(-1)
        _, row_O, place_O = torch.tensor(list(made.values()), device=device).view(-1, 3).unbind(-1)
        logits_OV = self._logits(ids_BT, lengths_B, row_O, place_O)
        total_O = torch.cat([part.float().logsumexp(-1) for part in logits_OV.split(_AT_ONCE)])
        log_p_P = logits_OV[output_P, target_P].float() - total_O[output_P]
        return torch.zeros(len(rows), dtype=torch.float64, device=device).index_add_(0, row_P, log_p_P.double())

    def _logits(self, ids_BT: Tensor, lengths_B: Tensor, row_O: Tensor, place_O: Tensor) -> Tensor:
        """[O, V]: logits; the head is applied only to the body's outputs at those places."""

        def keep(_: Any, __: Any, outputs: Any) -> Any:
            outputs.last_hidden_state = outputs.last_hidden_state[row_O, place_O][None]
            return outputs

        options: dict[str, Any] = {"use_cache": False} if self._causal else {}
        if not self._causal:  # a causal model needs no mask: padding comes last, and nothing attends to later tokens
            options["attention_mask"] = torch.arange(ids_BT.shape[1], device=ids_BT.device) < lengths_B[:, None]
        hook = self._model.base_model.register_forward_hook(keep)
        try:
            logits_1OV: Tensor = self._model(input_ids=ids_BT, **options).logits
        finally:
            hook.remove()
        return logits_1OV[0]
