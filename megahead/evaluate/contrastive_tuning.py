"""Tunes an encoder on pairs of a query and a text that answers it, so that their vectors are near.

B pairs of a rank, P texts of a rank, U distinct texts of the batch, D features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megahead.distributed.group import Group, copy_to_group, gather_from_group, per_rank_rng
from megahead.errors import DataError
from megahead.evaluate.finetuning import EpochScores, InitialModel, train_epochs
from megahead.evaluate.glue_tasks import Example, FineTuningSettings, TaskData
from megahead.evaluate.retrieval import TextEncoder, score_search
from megahead.evaluate.search_data import ContrastiveSettings, SearchData
from megahead.files import atomic_folder
from megahead.hf.other_programs import MODULES_FILE, write_pooling
from megahead.losses.candidates import all_rows_as_candidates
from megahead.losses.scores import LearnedTemperature
from megahead.losses.softmax import candidate_loss
from megahead.wording import pluralize


class ContrastiveModel(nn.Module):
    """An encoder and a learned temperature, with the loss of a batch that is split over the ranks of `group`.

    `token_ids_by_text`: the tokenized texts of all batches.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        token_ids_by_text: Mapping[str, list[int]],
        settings: ContrastiveSettings,
        group: Group,
    ) -> None:
        super().__init__()
        self.backbone: nn.Module = encoder.model
        self.temperature = LearnedTemperature(settings.temperature)
        nn.init.constant_(self.temperature.log_value, math.log(settings.temperature))
        self.to(encoder.model.device)
        self._encoder, self._token_ids_by_text = encoder, token_ids_by_text
        self._pooling, self._group = settings.pooling, group

    def loss(self, batch: Sequence[Example]) -> Tensor:
        """This rank's part of the batch's loss, a scalar; collective, with the same batch on every rank.

        -1/B sum_i log( exp(q_i.t_i / T) / sum_u exp(q_i.t_u / T) ), with the cosines of queries and texts (DPR:
        Karpukhin et al. 2020, arXiv 2004.04906). Candidates are the distinct answers and negatives of all ranks; a text
        that occurs twice is one. A rank has every `size`-th pair, and sends the vectors of its texts.
        """
        shares = [batch[rank :: self._group.size] for rank in range(self._group.size)]
        texts_by_rank = [list(dict.fromkeys(text or "" for x in share for text in x.second_texts)) for share in shares]
        width = max(map(len, texts_by_rank))
        gathered_row: dict[str, int] = {}
        for rank, texts in enumerate(texts_by_rank):
            for index, text in enumerate(texts):
                gathered_row.setdefault(text, rank * width + index)
        pairs, texts = shares[self._group.rank], texts_by_rank[self._group.rank]
        with per_rank_rng(self._group, self.temperature.log_value.device):
            queries_BD, texts_PD = self._vectors([pair.first_text for pair in pairs]), self._vectors(texts)
        padded_PD = F.pad(texts_PD, (0, 0, 0, width - len(texts)))
        gathered_PD = copy_to_group(gather_from_group(padded_PD, self._group, 0), self._group)
        indices = {text: index for index, text in enumerate(gathered_row)}
        target_B = torch.tensor([indices[pair.second_texts[0] or ""] for pair in pairs], device=queries_BD.device)
        candidates = all_rows_as_candidates(target_B)
        rows_UD = gathered_PD[list(gathered_row.values())]
        return candidate_loss(self.temperature(queries_BD), rows_UD, candidates) / len(batch)

    def _vectors(self, texts: Sequence[str]) -> Tensor:
        return self._encoder.pool([self._token_ids_by_text[text] for text in texts])[self._pooling]


def tokenize_pairs(encoder: TextEncoder, pairs: Sequence[Example]) -> dict[str, list[int]]:
    """The ids of every text of `pairs`, once."""
    texts = list(dict.fromkeys(text or "" for pair in pairs for text in (pair.first_text, *pair.second_texts)))
    return dict(zip(texts, encoder.tokenize(texts), strict=True))


def epoch_batches(pairs: Sequence[Example], batch_size: int, generator: torch.Generator) -> Iterator[list[Example]]:
    """Yields random batches of almost equal sizes, with every query once and one of its answers. So the other
    answers of a query are no negatives of it, unless another query has one of them, too."""
    by_query: dict[str, list[Example]] = {}
    for pair in pairs:
        by_query.setdefault(pair.first_text, []).append(pair)
    drawn = [members[int(torch.randint(len(members), (), generator=generator))] for members in by_query.values()]
    order = torch.randperm(len(drawn), generator=generator)
    parts = order.tensor_split(num_batches(pairs, batch_size))
    yield from ([drawn[index] for index in indices.tolist()] for indices in parts)


def num_batches(pairs: Sequence[Example], batch_size: int) -> int:
    """Batches of an epoch."""
    return math.ceil(len({pair.first_text for pair in pairs}) / batch_size)


class ContrastiveRun:
    """Tunes one model on one set of pairs, for any number of seeds, on all connected ranks."""

    def __init__(self, initial_model: InitialModel, data: TaskData, settings: FineTuningSettings) -> None:
        assert isinstance(settings, ContrastiveSettings)
        self.initial_model, self.data, self.settings = initial_model, data, settings
        self._group = Group.world()
        queries = len({pair.first_text for pair in data.train})
        if min(queries, settings.batch_size) < 2 * self._group.size:
            rule = f"have at least two queries of a batch on each of {pluralize(self._group.size, 'rank')}"
            hint = "add pairs" if queries < settings.batch_size else "raise the batch size"
            got = f"{min(queries, settings.batch_size)} ({queries} to train on)"
            raise DataError(f"{data.name} must {rule}, but has {got}; {hint}, or take fewer ranks.")
        self._encoder = self._open_encoder()
        self._token_ids_by_text = tokenize_pairs(self._encoder, data.train)
        count, max_tokens = self._encoder.num_truncated, self._encoder.max_tokens
        note = f"{data.name}: {pluralize(count, 'text')} longer than {max_tokens} tokens, and truncated"
        self.truncation_note = note if count else ""
        """A line about truncated training texts, longer than `max_length` or the context; empty if there are none."""

    def run(self, seed: int) -> Iterator[EpochScores]:
        """Tunes with `seed` for the order and dropout (and random weights); yields after each epoch."""
        torch.manual_seed(seed)
        self._encoder, order = self._open_encoder(), torch.Generator().manual_seed(seed)
        pairs, settings = self.data.train, self.settings
        model = ContrastiveModel(self._encoder, self._token_ids_by_text, settings, self._group)
        batches = partial(epoch_batches, pairs, settings.batch_size, order)
        steps = num_batches(pairs, settings.batch_size)
        yield from train_epochs(model, batches, steps, model.loss, self._scores, settings, self._group)

    def save(self, folder: Path) -> None:
        """On rank 0 writes the encoder as it is now, and its tokenizer, as a folder of sentence-transformers, which
        replaces that of an earlier epoch."""
        if self._group.rank:
            return
        encoder = self._encoder
        with atomic_folder(folder, replaceable=MODULES_FILE) as staged:
            encoder.model.save_pretrained(staged)
            encoder.tokenizer.save_pretrained(staged)
            write_pooling(staged, self.settings.pooling, encoder.size, encoder.max_tokens)

    def _open_encoder(self) -> TextEncoder:
        model = self.initial_model
        return TextEncoder(model.folder, max_tokens=self.settings.max_length, random_weights=model.random_weights)

    def _scores(self) -> Mapping[str, Mapping[str, float]]:
        self._encoder.model.eval()
        prefix, scores = f"{self.settings.pooling}_", {}
        for name, evaluation_set in self.data.evaluation_sets.items():
            assert isinstance(evaluation_set, SearchData)
            results = score_search(self._encoder, evaluation_set, [self.settings.pooling])
            scores[name] = {score.metric.removeprefix(prefix): score.value for score in results}
        return scores
