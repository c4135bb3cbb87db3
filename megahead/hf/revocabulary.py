"""Replaces a model's vocabulary: shared tokens keep their rows, others start as means of the rows of their pieces."""

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
from megahead.hf.importing import from_hf, require_tokenizer, save_initial_checkpoint
from megahead.hf.trained import EMBEDDING, HEAD, MASK_HEAD, OUTPUT_BIAS, POSITIONS, TARGET_COUNTS, TrainedModel
from megahead.objectives.pretraining import weight_shapes
from megahead.run_folder import RunFolder

# Rows for the tokens of a new vocabulary that the old one lacks: a method is a function here and a line in METHODS.
# A token's pieces are the ids that the old tokenizer splits it into.
#
# V old ids, n new tokens, D features (1 for a bias).

_RARITY = 1e-3  # of Arora et al.: a piece of this frequency weighs half of one that never occurs
_CHUNK_TOKENS = 4096

Pieces = Sequence[Sequence[int]]
RowMethod = Callable[[Tensor, Pieces, Tensor | None, torch.Generator], Tensor]
"""From the old table [V, D] in fp32, each token's pieces, target counts of old ids [V] and a generator to rows
[n, D]."""


def mean_rows(old_VD: Tensor, pieces: Pieces, counts_V: Tensor | None, generator: torch.Generator) -> Tensor:
    """[n, D]: the mean of the pieces' rows; random for a token without pieces.

    Gee et al. 2022, "Fast Vocabulary Transfer for Language Model Compression", arXiv 2402.09977.
    """
    return _weighted_rows(old_VD, pieces, torch.ones(len(old_VD), dtype=torch.float64), generator)


def rarity_rows(old_VD: Tensor, pieces: Pieces, counts_V: Tensor | None, generator: torch.Generator) -> Tensor:
    """[n, D]: the mean with weights a / (a + p), p a piece's frequency; random for a token without pieces.

    Arora, Liang, Ma 2017, "A Simple but Tough-to-Beat Baseline for Sentence Embeddings", ICLR (SIF).
    """
    assert counts_V is not None
    frequency_V = (counts_V.double() + 1) / (counts_V.double() + 1).sum()
    return _weighted_rows(old_VD, pieces, _RARITY / (_RARITY + frequency_V), generator)


def random_rows(old_VD: Tensor, pieces: Pieces, counts_V: Tensor | None, generator: torch.Generator) -> Tensor:
    """[n, D]: from a normal distribution with each feature's mean and standard deviation in the old table.

    Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models" (with a diagonal covariance).
    """
    deviation_D, mean_D = torch.std_mean(old_VD, dim=0, correction=0)
    return torch.randn(len(pieces), old_VD.shape[1], generator=generator) * deviation_D + mean_D


METHODS: dict[str, RowMethod] = {"mean": mean_rows, "rarity": rarity_rows, "random": random_rows}
METHODS_WITH_COUNTS = frozenset({"rarity"})


def _weighted_rows(old_VD: Tensor, pieces: Pieces, weight_V: Tensor, generator: torch.Generator) -> Tensor:
    """[n, D]: weighted means of the pieces' rows, exact to float32; random for a token without pieces."""
    rows_nD = random_rows(old_VD, pieces, None, generator)
    tokens_with_pieces = [token for token, ids in enumerate(pieces) if ids]
    for first in range(0, len(tokens_with_pieces), _CHUNK_TOKENS):
        tokens = tokens_with_pieces[first : first + _CHUNK_TOKENS]
        ids = torch.tensor([id_ for token in tokens for id_ in pieces[token]])
        lengths = torch.tensor([len(pieces[token]) for token in tokens])
        index = torch.arange(len(tokens)).repeat_interleave(lengths)
        sums = torch.zeros(len(tokens), old_VD.shape[1], dtype=torch.float64)
        sums.index_add_(0, index, old_VD[ids].double() * weight_V[ids, None])
        totals = torch.zeros(len(tokens), dtype=torch.float64).index_add_(0, index, weight_V[ids])
        rows_nD[torch.tensor(tokens)] = (sums / totals[:, None]).float()
    return rows_nD


# Every matrix and bias with a row for each id is changed in the same way: the input embedding, the head, the bias of
# its outputs. V old ids, W new ids.

_VOCABULARY_PARAMETERS = (EMBEDDING, HEAD, f"{MASK_HEAD}bias", OUTPUT_BIAS)
_POSITIONS = (POSITIONS, "generator.positions.weight")
"""Ends of names, also of an auxiliary objective's generator."""
_SEED = 0


@dataclass(frozen=True)
class RevocabularyReport:
    """Numbers of ids by the source of their rows."""

    folder: Path
    old_vocab_size: int
    new_vocab_size: int
    num_kept: int
    num_split: int
    """Tokens with pieces in the old vocabulary, whose rows start as a mean unless the method is `random`."""

    pieces_per_token: float
    """Mean number of pieces of these."""

    num_new: int
    """Tokens without pieces, whose rows start random."""


def revocabulary(model_dir: Path, tokenizer: Path, output_dir: Path, method: str = "mean") -> RevocabularyReport:
    """Writes the model of a run, checkpoint or Hugging Face folder with the ids of `tokenizer`, as a run folder.

    The output is for `init.from_checkpoint` and export, as that of `from_hf`. Rows of tokens with the same bytes, or of
    special tokens with the same role, stay bitwise equal; others are computed by `method`, a name of METHODS. Target
    counts are kept if ids are only renumbered; for other tokens they would be wrong. Raises UserError, with nothing
    written, if it is impossible.
    """
    if method not in METHODS:
        raise FieldError("--method", f"be one of {', '.join(METHODS)}", got=method)
    new = ByteVocabulary.open(tokenizer)
    with atomic_folder(output_dir) as staged, _open_model(model_dir, output_dir.absolute().parent) as model:
        old = _old_vocabulary(model, model_dir)
        vocabulary_map = map_vocabulary(old, new, _special_ids_by_role(model.config))
        vocabulary_map = vocabulary_map.with_appended_ids(_appended_mask_ids(model.config, old, new))
        config = _new_config(model.config, old, new)
        tensors = _new_tensors(model, config, vocabulary_map, method)
        save_initial_checkpoint(RunFolder(staged), tensors, config, tokenizer)
    num_kept, num_split, num_new = vocabulary_map.counts()
    pieces_per_token = sum(map(len, vocabulary_map.old_pieces)) / max(num_split, 1)
    old_size, new_size = len(old.spellings), len(vocabulary_map.old_ids)
    return RevocabularyReport(output_dir, old_size, new_size, num_kept, num_split, pieces_per_token, num_new)


@contextmanager
def _open_model(model_dir: Path, scratch: Path) -> Iterator[TrainedModel]:
    """Opens a run or checkpoint; a Hugging Face folder is imported into a temporary folder in `scratch`."""
    if find_checkpoint(model_dir) is not None:
        yield TrainedModel.open(model_dir)
        return
    with TemporaryDirectory(dir=scratch) as folder:
        yield TrainedModel.open(from_hf(model_dir, Path(folder, "imported")))


def _old_vocabulary(model: TrainedModel, model_dir: Path) -> ByteVocabulary:
    tokenizer = require_tokenizer(model.tokenizer_path(), model_dir)
    old, num_rows = ByteVocabulary.open(tokenizer), model.config.model.vocab_size
    if len(old.spellings) > num_rows:
        raise DataError(
            f"`{model_dir}` must have a row for each id of its tokenizer, but has {num_rows} for {len(old.spellings)}."
        )
    return old


def _special_ids_by_role(config: RunConfig) -> dict[str, int]:
    """Returns the old ids of the special tokens in a run's config, by role."""
    if config.masking is None:
        mask = {} if config.masked_inputs is None else {"mask": config.masked_inputs.mask_token}
        return {"end": config.data.end_token, **mask}
    masking = config.masking
    return {"begin": masking.cls_token, "end": masking.sep_token, "mask": masking.mask_token}


def _new_config(config: RunConfig, old: ByteVocabulary, new: ByteVocabulary) -> RunConfig:
    """Returns the run's config with the new ids, and without its datasets."""
    settings: dict[str, Any] = config.model_dump(mode="json")
    settings["model"]["vocab_size"] = len(new.spellings)
    path = str(new.tokenizer.path)
    data = {"train": "(another vocabulary, no text)", "validation": None, "tokenizer": path}
    settings["data"] |= data | {"end_token": _require_new_id("end", config.data.end_token, old, new)}
    if config.masking is not None:
        roles = _special_ids_by_role(config).items()
        begin, end, mask = (_require_new_id(role, id_, old, new) for role, id_ in roles)
        other_special_ids = {*new.special_ids.values()} - {begin, end, mask, new.id_of_role("unknown")}
        ids = {"cls_token": begin, "sep_token": end, "mask_token": mask, "special_tokens": sorted(other_special_ids)}
        settings["masking"] |= ids
    padding = config.model.padding_token()
    if padding is not None:  # positions begin after it
        settings["model"]["position_offset"] = _require_new_id("padding", padding, old, new) + 1
    if config.masked_inputs is not None:
        settings["model"]["vocab_size"] += len(_appended_mask_ids(config, old, new))
        new_mask_id = _find_new_id("mask", config.masked_inputs.mask_token, old, new)
        settings["masked_inputs"]["mask_token"] = len(new.spellings) if new_mask_id is None else new_mask_id
    return config_from_dict(settings | {"init": None, "tasks": None, "output_dir": None}, source=path)


def _appended_mask_ids(config: RunConfig, old: ByteVocabulary, new: ByteVocabulary) -> list[int]:
    """Returns the old id of the token that masks a decoder's inputs, if the new tokenizer has none: its row is appended
    to all others."""
    ids = [] if config.masked_inputs is None else [config.masked_inputs.mask_token]
    return [id_ for id_ in ids if _find_new_id("mask", id_, old, new) is None]


def _find_new_id(role: str, id_: int, old: ByteVocabulary, new: ByteVocabulary) -> int | None:
    """Returns the new id of a special token: that of the same text, else of the same role, else None."""
    text = old.spellings[id_] if id_ < len(old.spellings) else None
    return new.special_ids.get(text or "", new.id_of_role(role))


def _require_new_id(role: str, id_: int, old: ByteVocabulary, new: ByteVocabulary) -> int:
    new_id = _find_new_id(role, id_, old, new)
    if new_id is None:
        texts = ", ".join(ROLES[role])
        raise DataError(f"`{new.tokenizer.path}` must have one of {texts} (`{role}` of a text), but has none.")
    return new_id


def _new_tensors(
    model: TrainedModel, config: RunConfig, vocabulary_map: VocabularyMap, method: str
) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter; those with a row per id for the new vocabulary, padded with zeros."""
    old_vocab_size = model.config.model.vocab_size
    counts_V = model.target_counts()[:old_vocab_size] if model.has_target_counts() else None
    if method in METHODS_WITH_COUNTS and counts_V is None:
        raise CheckpointError(
            f"`{model.checkpoint.folder}` must hold counts of its training targets for --method {method}, but lacks "
            "them; use --method mean."
        )
    for name, shape in weight_shapes(config).items():
        weight = model.weight(name)
        if name in _VOCABULARY_PARAMETERS:
            weight = _pad_rows(_translate_rows(weight[:old_vocab_size], vocabulary_map, method, counts_V), shape[0])
        elif name.endswith(_POSITIONS) and model.config.model.position_offset:
            # rows before the offset have no position
            unused = weight.new_zeros(config.model.position_offset, *weight.shape[1:])
            weight = torch.cat([unused, weight[model.config.model.position_offset :]])
        yield f"weight/{name}", weight
    if counts_V is not None and vocabulary_map.is_permutation():
        index = torch.tensor([id_ or 0 for id_ in vocabulary_map.old_ids])
        yield TARGET_COUNTS, _pad_rows(counts_V[index], config.model.padded_vocab_size())


def _translate_rows(old_V: Tensor, vocabulary_map: VocabularyMap, method: str, counts_V: Tensor | None) -> Tensor:
    """[W, D], or [W] of a bias: old rows of shared ids, computed rows for all others."""
    old_VD = old_V.view(len(old_V), -1)
    new_ids = [id_ for id_, old_id in enumerate(vocabulary_map.old_ids) if old_id is None]
    rows_WD = old_VD[torch.tensor([old_id or 0 for old_id in vocabulary_map.old_ids])]
    if new_ids:
        pieces = [vocabulary_map.old_pieces[id_] for id_ in new_ids]
        generator = torch.Generator().manual_seed(_SEED)
        rows_WD[torch.tensor(new_ids)] = METHODS[method](old_VD, pieces, counts_V, generator)
    return rows_WD.view(len(vocabulary_map.old_ids), *old_V.shape[1:])


def _pad_rows(rows_W: Tensor, size: int) -> Tensor:
    return functional.pad(rows_W, (*(0, 0) * (rows_W.ndim - 1), 0, size - len(rows_W)))
