"""Gives a model another vocabulary: rows of shared tokens stay, others begin as means of their pieces' rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megahead.checkpoints.disk import find_checkpoint
from megahead.config.loading import config_from_dict
from megahead.config.run import RunConfig
from megahead.data.vocabulary_map import ROLES, ByteVocabulary, VocabularyMap, map_vocabulary
from megahead.errors import CheckpointError, DataError, FieldError
from megahead.files import atomic_folder
from megahead.hf.published import from_hf, save_initial_checkpoint
from megahead.hf.trained import EMBEDDING, HEAD, MASK_HEAD, OUTPUT_BIAS, TARGET_COUNTS, TrainedModel
from megahead.objectives.pretraining import weight_shapes
from megahead.run_folder import RunFolder

# Rows for the tokens of a new vocabulary that the old one lacks: a method is a function here and a line in METHODS.
#
# V old ids, n new tokens, D features (1 for a bias).

_RARITY = 1e-3  # of Arora et al.: a piece of this frequency weighs half of one that never occurs
_TOKENS_AT_ONCE = 4096

Pieces = Sequence[Sequence[int]]
Method = Callable[[Tensor, Pieces, Tensor | None, torch.Generator], Tensor]
"""From the old table [V, D] in fp32, each token's pieces, counts of old ids [V] and random numbers to rows [n, D]."""


def mean_rows(old_VD: Tensor, pieces: Pieces, counts_V: Tensor | None, generator: torch.Generator) -> Tensor:
    """The mean of the pieces' rows; drawn where there is none.

    Gee et al. 2022, "Fast Vocabulary Transfer for Language Model Compression", arXiv 2402.09977.
    """
    return _weighted(old_VD, pieces, torch.ones(len(old_VD), dtype=torch.float64), generator)


def rarity_rows(old_VD: Tensor, pieces: Pieces, counts_V: Tensor | None, generator: torch.Generator) -> Tensor:
    """The mean with weights a / (a + p), p a piece's frequency: rare pieces weigh more; drawn where there is none.

    Arora, Liang, Ma 2017, "A Simple but Tough-to-Beat Baseline for Sentence Embeddings", ICLR (SIF).
    """
    assert counts_V is not None
    shares_V = (counts_V.double() + 1) / (counts_V.double() + 1).sum()
    return _weighted(old_VD, pieces, _RARITY / (_RARITY + shares_V), generator)


def random_rows(old_VD: Tensor, pieces: Pieces, counts_V: Tensor | None, generator: torch.Generator) -> Tensor:
    """Drawn from a normal distribution with the mean and the deviation that each feature has in the old table.

    Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models" (its covariance without what is off
    the diagonal).
    """
    deviation_D, mean_D = torch.std_mean(old_VD, dim=0, correction=0)
    return torch.randn(len(pieces), old_VD.shape[1], generator=generator) * deviation_D + mean_D


METHODS: dict[str, Method] = {"mean": mean_rows, "rarity": rarity_rows, "random": random_rows}
NEED_COUNTS = frozenset({"rarity"})


def _weighted(old_VD: Tensor, pieces: Pieces, weight_V: Tensor, generator: torch.Generator) -> Tensor:
    """Means of the pieces' rows, exact to float32."""
    rows_nD = random_rows(old_VD, pieces, None, generator)
    known = [token for token, ids in enumerate(pieces) if ids]
    for first in range(0, len(known), _TOKENS_AT_ONCE):
        tokens = known[first : first + _TOKENS_AT_ONCE]
        ids = torch.tensor([id_ for token in tokens for id_ in pieces[token]])
        lengths = torch.tensor([len(pieces[token]) for token in tokens])
        of_token = torch.arange(len(tokens)).repeat_interleave(lengths)
        sums = torch.zeros(len(tokens), old_VD.shape[1], dtype=torch.float64)
        sums.index_add_(0, of_token, old_VD[ids].double() * weight_V[ids, None])
        totals = torch.zeros(len(tokens), dtype=torch.float64).index_add_(0, of_token, weight_V[ids])
        rows_nD[torch.tensor(tokens)] = (sums / totals[:, None]).float()
    return rows_nD


# Every matrix and bias with a row for each id is changed in the same way: the input embedding, the head, the bias of
# its outputs. V old ids, W new ids.

_WITH_A_ROW_PER_ID = (EMBEDDING, HEAD, f"{MASK_HEAD}bias", OUTPUT_BIAS)
_SEED = 0


@dataclass(frozen=True)
class RevocabularyReport:
    """What became of the rows."""

    folder: Path
    old_ids: int
    new_ids: int
    kept: int
    pieced: int
    """Tokens that begin as a mean of their pieces' rows, where the method takes one."""

    pieces: float
    """How many these have on average."""

    new: int


def revocabulary(model_dir: Path, tokenizer: Path, output_dir: Path, method: str = "mean") -> RevocabularyReport:
    """Writes the model of a run, checkpoint or Hugging Face folder with the ids of `tokenizer`, as a run folder.

    Good for `init.from_checkpoint` and for export, like what `from_hf` writes. Rows of tokens with the same bytes, or
    of special tokens with the same role, stay bit by bit; others are made by `method`, a name of METHODS. Counts of
    targets stay where ids are only renumbered: for other tokens they would be wrong. UserError where it cannot be
    done, with nothing written.
    """
    if method not in METHODS:
        raise FieldError("--method", f"be one of {', '.join(METHODS)}", got=method)
    new = ByteVocabulary.open(tokenizer)
    with atomic_folder(output_dir) as staged, _opened(model_dir, output_dir.absolute().parent) as model:
        old = _old_vocabulary(model, model_dir)
        vocabulary_map = map_vocabulary(old, new, _roles(model.config))
        vocabulary_map = vocabulary_map.with_appended_ids(_masks_behind(model.config, old, new))
        config = _config(model.config, old, new)
        save_initial_checkpoint(RunFolder(staged), _tensors(model, config, vocabulary_map, method), config, tokenizer)
    kept, pieced, fresh = vocabulary_map.counts()
    pieces = sum(map(len, vocabulary_map.old_pieces_V)) / max(pieced, 1)
    return RevocabularyReport(output_dir, len(old.spellings), len(vocabulary_map.old_id_V), kept, pieced, pieces, fresh)


@contextmanager
def _opened(model_dir: Path, beside: Path) -> Iterator[TrainedModel]:
    """The model of a run or checkpoint, or of a Hugging Face folder, imported for a while."""
    if find_checkpoint(model_dir) is not None:
        yield TrainedModel.open(model_dir)
        return
    with TemporaryDirectory(dir=beside) as folder:
        yield TrainedModel.open(from_hf(model_dir, Path(folder, "imported")))


def _old_vocabulary(model: TrainedModel, model_dir: Path) -> ByteVocabulary:
    tokenizer = model.tokenizer()
    if tokenizer is None:
        raise CheckpointError(
            f"`{model_dir}` must hold a tokenizer.json, but has none; put the model's tokenizer there."
        )
    old, rows = ByteVocabulary.open(tokenizer), model.config.model.vocab_size
    if len(old.spellings) > rows:
        raise DataError(
            f"`{model_dir}` must have a row for each id of its tokenizer, but has {rows} for {len(old.spellings)}."
        )
    return old


def _roles(config: RunConfig) -> dict[str, int]:
    """The old ids of special tokens that a run names, by their roles."""
    if config.masking is None:
        masked = {} if config.masked_inputs is None else {"mask": config.masked_inputs.mask_token}
        return {"end": config.data.end_token, **masked}
    masking = config.masking
    return {"begin": masking.cls_token, "end": masking.sep_token, "mask": masking.mask_token}


def _config(config: RunConfig, old: ByteVocabulary, new: ByteVocabulary) -> RunConfig:
    """The run's, without its text, with the new ids."""
    tree: dict[str, Any] = config.model_dump(mode="json")
    tree["model"]["vocab_size"] = len(new.spellings)
    path = str(new.tokenizer.path)
    text = {"train": "(another vocabulary, no text)", "validation": None, "tokenizer": path}
    tree["data"] |= text | {"end_token": _renamed("end", config.data.end_token, old, new)}
    if config.masking is not None:
        roles = _roles(config).items()
        begin, end, mask = (_renamed(role, id_, old, new) for role, id_ in roles)
        rest = {*new.special.values()} - {begin, end, mask, new.id_of_role("unknown")}
        ids = {"cls_token": begin, "sep_token": end, "mask_token": mask, "special_tokens": sorted(rest)}
        tree["masking"] |= ids
    if config.masked_inputs is not None:
        tree["model"]["vocab_size"] += len(_masks_behind(config, old, new))
        found = _found("mask", config.masked_inputs.mask_token, old, new)
        tree["masked_inputs"]["mask_token"] = len(new.spellings) if found is None else found
    return config_from_dict(tree | {"init": None, "tasks": None, "output_dir": None}, source=path)


def _masks_behind(config: RunConfig, old: ByteVocabulary, new: ByteVocabulary) -> list[int]:
    """The old id of the token that masks a decoder's inputs, where the new tokenizer has none: it comes behind all
    others."""
    masked = config.masked_inputs
    return [] if masked is None or _found("mask", masked.mask_token, old, new) is not None else [masked.mask_token]


def _found(role: str, id_: int, old: ByteVocabulary, new: ByteVocabulary) -> int | None:
    """The new id of a special token: that of the same spelling, else of the same role."""
    spelled = old.spellings[id_] if id_ < len(old.spellings) else None
    return new.special.get(spelled or "", new.id_of_role(role))


def _renamed(role: str, id_: int, old: ByteVocabulary, new: ByteVocabulary) -> int:
    """The same; DataError where there is none."""
    found = _found(role, id_, old, new)
    if found is None:
        named = ", ".join(ROLES[role])
        raise DataError(f"`{new.tokenizer.path}` must have one of {named} (`{role}` of a text), but has none.")
    return found


def _tensors(
    model: TrainedModel, config: RunConfig, vocabulary_map: VocabularyMap, method: str
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter; those with a row per id in the new vocabulary, with zeros for its padding."""
    old_ids = model.config.model.vocab_size
    counts_V = model.target_counts()[:old_ids] if model.has_target_counts() else None
    if method in NEED_COUNTS and counts_V is None:
        raise CheckpointError(
            f"`{model.checkpoint.folder}` must hold counts of its training targets for --method {method}, but lacks "
            "them; use --method mean."
        )
    for name, shape in weight_shapes(config).items():
        weight = model.weight(name)
        if name in _WITH_A_ROW_PER_ID:
            weight = _padded(_translated(weight[:old_ids], vocabulary_map, method, counts_V), shape[0])
        yield f"weight/{name}", weight
    if counts_V is not None and vocabulary_map.is_permutation():
        kept = torch.tensor([id_ or 0 for id_ in vocabulary_map.old_id_V])
        yield TARGET_COUNTS, _padded(counts_V[kept], config.model.padded_vocab_size())


def _translated(old_V: Tensor, vocabulary_map: VocabularyMap, method: str, counts_V: Tensor | None) -> Tensor:
    """[W, D], or [W] of a bias: kept rows as they are, all others made."""
    old_VD = old_V.view(len(old_V), -1)
    others = [id_ for id_, kept in enumerate(vocabulary_map.old_id_V) if kept is None]
    rows_WD = old_VD[torch.tensor([kept or 0 for kept in vocabulary_map.old_id_V])]
    if others:
        pieces = [vocabulary_map.old_pieces_V[id_] for id_ in others]
        generator = torch.Generator().manual_seed(_SEED)
        rows_WD[torch.tensor(others)] = METHODS[method](old_VD, pieces, counts_V, generator)
    return rows_WD.view(len(vocabulary_map.old_id_V), *old_V.shape[1:])


def _padded(rows_W: Tensor, size: int) -> Tensor:
    return functional.pad(rows_W, (*(0, 0) * (rows_W.ndim - 1), 0, size - len(rows_W)))
