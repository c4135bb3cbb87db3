"""From a Hugging Face folder (of a kind in `families`) to a checkpoint of ours that a run can start from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor
from torch.nn import functional

from megahead.checkpoint import save_checkpoint
from megahead.config import ENCODERS, RunConfig, config_from_dict
from megahead.convert.kept_settings import KeptSettings
from megahead.convert.published import PublishedModel
from megahead.convert.source import TARGET_COUNTS
from megahead.corpus.tokenizer import keep_tokenizer
from megahead.distributed import Group
from megahead.errors import CheckpointError
from megahead.files import staged_folder
from megahead.pretraining import weight_shapes
from megahead.run_folder import RunFolder


def from_hf(
    model_dir: Path,
    output_dir: Path,
    *,
    special_ids: Mapping[str, int] | None = None,
    target_counts_V: Tensor | None = None,
) -> Path:
    """Writes the weights of `model_dir` as OUTPUT/checkpoints/step-00000000, and its tokenizer beside; returns OUTPUT.
    Its settings are kept, for exports.

    Good for `init.from_checkpoint`, for export and for evaluation: it holds no optimizer state and no text. The
    model is headless, tied or untied vanilla, as the folder is. The table is padded with zero rows to a multiple
    of 1,024. A pooler is left out. Raises a UserError for a folder that is none of these in safetensors, leaving
    nothing behind. special_ids: `mask_token`, `cls_token` and `sep_token` of an encoder whose files do not name them.
    target_counts_V: of the targets that a headless model was trained on, where they are known.
    """
    published = PublishedModel.open(model_dir)
    kept = KeptSettings.of_folder(model_dir)
    files = (model_dir / name for name in ("tokenizer.json", "tokenizer.model"))
    tokenizer = next((file for file in files if file.is_file()), None)
    config = _config(published, kept, tokenizer, special_ids or {})
    with staged_folder(output_dir) as staged:
        run = RunFolder(staged)
        save_checkpoint(
            run.checkpoints,
            0,
            _tensors(published, config, target_counts_V),
            state={"step": 0, "tokens": 0},
            config=config.model_dump(mode="json"),
            group=Group(),
            keep=1,
        )
        kept.keep(run)
        if tokenizer is not None:
            keep_tokenizer(tokenizer, run)
    return output_dir


def _config(
    published: PublishedModel, kept: KeptSettings, tokenizer: Path | None, special_ids: Mapping[str, int]
) -> RunConfig:
    """A run's config around the folder's model; only model, objective and special tokens mean something."""
    model_dir, content = published.folder, published.content
    headless = not published.has_head() and published.family.with_head not in (content.get("architectures") or [])
    settings = published.settings()
    masking = (
        _masking(model_dir, {**kept.special_ids(tokenizer), **special_ids}) if settings["family"] in ENCODERS else None
    )
    ends = [*kept.end_tokens(), masking["sep_token"] if masking else 0]
    tree = {
        "name": re.sub(r"[^A-Za-z0-9._-]", "-", model_dir.resolve().name) or "imported",
        "model": settings,
        "masking": masking,
        "data": {
            "train": "(weights imported, no text)",
            "sequence_length": content.get("max_position_embeddings", 2048),
            "end_token": ends[0],
        },
        "batch": {"global_size": 1, "micro_size": 1},
        "objective": {"name": "headless"} if headless else {"name": "vanilla", "tied": published.is_tied()},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"steps": 1},
    }
    return config_from_dict(tree, source=str(model_dir / "config.json"))


def _masking(model_dir: Path, ids: Mapping[str, int | None]) -> dict[str, int]:
    """The ids of an encoder's special tokens; CheckpointError unless all are known."""
    known = {role: id_ for role, id_ in ids.items() if id_ is not None}
    unknown = [role for role in ids if role not in known]
    if unknown:
        raise CheckpointError(
            f"`{model_dir}` must name an encoder's {unknown[0]} in tokenizer_config.json, tokenizer.json (as "
            f"[{unknown[0][:-6].upper()}]) or config.json, but does not; give --special-ids MASK CLS SEP."
        )
    return known


def _tensors(published: PublishedModel, config: RunConfig, counts_V: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of the model, by our name, and the counts. CheckpointError where the folder lacks a parameter or
    its shape differs."""
    for name, shape in weight_shapes(config).items():
        yield f"weight/{name}", published.weight(name, shape)
    if counts_V is not None:
        yield TARGET_COUNTS, functional.pad(counts_V, (0, config.model.padded_vocab_size() - len(counts_V)))
