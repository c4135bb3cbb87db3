"""What an export holds beside its weights: config.json, generation_config.json and the tokenizer's files.

What a Hugging Face folder holds is kept with the run that begins from it, and given back by the run's exports.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile

import tokenizers
from tokenizers.processors import TemplateProcessing

from megahead.config.model import ModelConfig
from megahead.config.run import RunConfig
from megahead.data.tokenizer import load_tokenizer
from megahead.errors import CheckpointError, DataError
from megahead.files import write_atomically
from megahead.hf.heads import ExportTarget
from megahead.run_folder import RunFolder

CONFIG, GENERATION = "config.json", "generation_config.json"
_PATTERNS = (
    "*config.json",
    "tokenizer.*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "additional_chat_templates/*",
    "vocab.*",
    "merges.txt",
    "*.model",
)
_ROLES = {
    "mask_token": ("mask_token",),
    "cls_token": ("cls_token", "bos_token"),
    "sep_token": ("sep_token", "eos_token"),
}
"""How a folder names what an encoder's row needs."""


@dataclass(frozen=True)
class KeptSettings:
    """Settings and the tokenizer's files, by their names in the folder."""

    files: Mapping[str, bytes]

    @staticmethod
    def of_folder(folder: Path) -> KeptSettings:
        """Those of a Hugging Face folder."""
        paths = {path for pattern in _PATTERNS for path in folder.glob(pattern) if path.is_file()}
        return KeptSettings({path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(paths)})

    @staticmethod
    def of_run(run: RunFolder) -> KeptSettings | None:
        """Those of the folder that a run began from; None where it began from none, or an earlier version made it.
        CheckpointError for a damaged file."""
        if not run.published_files.is_file():
            return None
        try:
            with ZipFile(run.published_files) as archive:
                return KeptSettings({name: archive.read(name) for name in archive.namelist()})
        except (BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, zlib.error) as error:
            raise CheckpointError(
                f"`{run.published_files}` must be a zip archive of settings, but cannot be read ({error}); remove it "
                "to export with the run's own settings."
            ) from None

    def keep(self, run: RunFolder) -> None:
        """Puts them into a run's folder."""
        buffer = BytesIO()
        with ZipFile(buffer, "w", ZIP_DEFLATED) as archive:
            for name, content in self.files.items():
                archive.writestr(name, content)
        write_atomically(run.published_files, buffer.getvalue())

    def write(self, folder: Path) -> None:
        """Writes all but the model's own, config.json and generation_config.json, into an export's folder."""
        for name in self.files.keys() - {CONFIG, GENERATION}:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(self.files[name])

    def content(self, name: str) -> dict[str, Any]:
        """Of a JSON file; empty where there is none, or no object in it."""
        try:
            content = json.loads(self.files.get(name, b""))
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def conflict(self, config: RunConfig, tokenizer: Path | None) -> str | None:
        """Why they are wrong for a run with this config and tokenizer: it reads or ends texts otherwise; None where
        they are right."""
        if tokenizer is not None and not self._are_of(tokenizer):
            return "the run has another tokenizer"
        if config.masking is not None and not config.model.is_causal:
            roles = self.special_ids(tokenizer).items()
            same = all(id_ in (None, getattr(config.masking, role)) for role, id_ in roles)
            return None if same else "the run has other special tokens"
        ends = self.end_tokens()
        return None if not ends or config.data.end_token in ends else "the run ends texts with another token"

    def end_tokens(self) -> list[int]:
        """The ids that end a text, the model's first."""
        named = (self.content(name).get("eos_token_id") for name in (CONFIG, GENERATION))
        return [id_ for ids in named if ids is not None for id_ in (ids if isinstance(ids, list) else [ids])]

    def special_ids(self, tokenizer: Path | None) -> dict[str, int | None]:
        """The ids that an encoder masks, begins and ends texts with: as its tokenizer's settings name them, as BERT
        spells them, or as config.json has them; None where no file has it."""
        vocabulary, config = None if tokenizer is None else load_tokenizer(tokenizer), self.content(CONFIG)
        named = [self.content(name) for name in ("tokenizer_config.json", "special_tokens_map.json")]
        found: dict[str, int | None] = {}
        for role, names in _ROLES.items():
            tokens = [settings.get(names[0]) for settings in named] + [f"[{role[:-6].upper()}]"]
            tokens += [settings.get(name) for name in names[1:] for settings in named]
            spelled = [one["content"] if isinstance(one, dict) else one for one in tokens if one]
            ids = [] if vocabulary is None else [vocabulary.find(name) for name in spelled]
            ids += [config.get(f"{name}_id") for name in names]
            found[role] = next((id_ for id_ in ids if isinstance(id_, int) and id_ < config["vocab_size"]), None)
        return found

    def _are_of(self, tokenizer: Path) -> bool:
        """Whether they are of a tokenizer that gives the same ids."""
        mine = [self.files[name] for name in ("tokenizer.json", "tokenizer.model") if name in self.files]
        content = tokenizer.read_bytes()
        return content in mine or _ids_of(content) in map(_ids_of, mine)


def _ids_of(tokenizer: bytes) -> object:
    """What decides its ids: a tokenizer.json without what it puts around a text."""
    try:
        content = json.loads(tokenizer)
    except ValueError:  # of SentencePiece
        return tokenizer
    return {name: part for name, part in content.items() if name not in ("post_processor", "padding", "truncation")}


# config.json and generation_config.json.


def write_settings(folder: Path, target: ExportTarget) -> tuple[Path | None, str | None]:
    """Writes config.json, generation_config.json and the tokenizer files; returns the tokenizer's source, and why
    settings of the folder that the run began from were left out.

    Those settings stay as they are, but for what the run changed; where it reads or ends texts in another way, and in
    all other runs, special tokens are those of its config.
    """
    model = target.model
    tokenizer, kept = model.tokenizer(), KeptSettings.of_run(model.run_folder())
    conflict = None if kept is None else kept.conflict(model.config, tokenizer)
    if kept is None or conflict is not None:
        ids = _files_of_run(folder, target, tokenizer)
        content, generation = _of_run(target) | ids, ids
    else:
        kept.write(folder)
        if tokenizer is None and (folder / "tokenizer.json").is_file():
            tokenizer = model.run_folder().published_files
        content, generation = _of_kept(target, kept), kept.content(GENERATION)
    write_json(folder / CONFIG, content)
    if target.has_head() and not target.predicts_masked() and generation:
        write_json(folder / GENERATION, generation)
    return tokenizer, conflict


def _files_of_run(folder: Path, target: ExportTarget, tokenizer: Path | None) -> dict[str, int]:
    """Writes the tokenizer's files of a run that began from no folder; returns the ids of special tokens."""
    config, end = target.model.config, target.model.config.data.end_token
    if config.masking is None:
        ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
        return ids | ({} if tokenizer is None else write_tokenizer(tokenizer, folder, config))
    first, last = config.masking.cls_token, config.masking.sep_token
    ids = {"pad_token_id": 0, "bos_token_id": first, "cls_token_id": first}
    ids |= {"eos_token_id": last, "sep_token_id": last}
    ids |= {} if tokenizer is None else write_encoder_tokenizer(tokenizer, folder, config)
    return ids | ({"eos_token_id": end} if config.model.is_causal else {})


def _of_run(target: ExportTarget) -> dict[str, Any]:
    """config.json without special tokens."""
    model, config, head, family = target.model, target.model.config, target.head, target.family
    origin: dict[str, Any] = {"run": config.name, "head": head.name, "objective": config.objective.model_dump()}
    origin |= {"step": model.checkpoint.step, "tokens": model.checkpoint.state.get("tokens")}
    return {
        **family.config(head.shape(config.model)),
        "architectures": [family.with_head() if target.has_head() else f"{family.classes}Model"],
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": head.is_embedding(),
        "dtype": target.dtype,
        "megahead": origin,
    }


def _of_kept(target: ExportTarget, kept: KeptSettings) -> dict[str, Any]:
    """config.json as it was, with what the run changed."""
    before, now = kept.content(CONFIG), _of_run(target)
    if before["model_type"] != now["model_type"]:  # a class with another head, or the Llama that a Mistral becomes
        return now | {name: id_ for name, id_ in before.items() if name.endswith("_token_id")}
    then = target.family.config(ModelConfig(**target.family.settings(before)))
    changed = {name: value for name, value in now.items() if name not in then or then[name] != value}
    if not target.has_head() and "tie_word_embeddings" in before:
        del changed["tie_word_embeddings"]  # there is nothing to tie
    if "torch_dtype" in before:
        changed["torch_dtype"] = target.dtype
    return before | changed


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Indented, for people too."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# The tokenizer's files, as transformers (4 and 5) reads them.

PADDING_TOKEN = "<|padding|>"
PADDING_TOKENS = ("[PAD]", PADDING_TOKEN, "<pad>")


def write_tokenizer(source: Path, folder: Path, config: RunConfig) -> dict[str, int]:
    """Copies `source` and adds its settings; returns the ids that generation needs. Beside a SentencePiece model is the
    tokenizer.json that gives the same ids.

    Special tokens are the tokenizer's own, none is added: the end token, which also begins texts, as in training;
    those for padding and for unknown characters where it has them, else the end token again.
    Raises DataError for a tokenizer that cannot be this model's.
    """
    vocabulary, end_token = _opened(source, config.model.vocab_size), config.data.end_token
    end, own = _spelling(vocabulary, source, "data.end_token", end_token), load_tokenizer(source).roles
    padding_id = own.get("padding", vocabulary.token_to_id(PADDING_TOKEN))
    ids = {"pad_token": end_token if padding_id is None else padding_id, "unk_token": own.get("unknown", end_token)}
    special = {"bos_token": end, "eos_token": end}
    special |= {name: str(vocabulary.id_to_token(id_)) for name, id_ in ids.items()}
    _copy(source, vocabulary, folder)
    _write_settings(folder, special, {"model_max_length": _trained_length(config)})
    return {"pad_token_id": ids["pad_token"]}


def write_encoder_tokenizer(source: Path, folder: Path, config: RunConfig) -> dict[str, int]:
    """The same for an encoder, whose tokenizer puts [CLS] before a text and [SEP] behind, also between two texts; where
    it is causal nothing behind, so that it may go on.

    Returns the ids that the model needs.
    """
    masking, vocabulary = config.masking, _opened(source, config.model.vocab_size)
    assert masking is not None
    ids = {"cls_token": masking.cls_token, "sep_token": masking.sep_token, "mask_token": masking.mask_token}
    special = {name: _spelling(vocabulary, source, f"masking.{name}", id_) for name, id_ in ids.items()}
    own = [str(vocabulary.id_to_token(id_)) for role, id_ in load_tokenizer(source).roles.items() if role == "padding"]
    found = {name: vocabulary.token_to_id(name) for name in (*own, *PADDING_TOKENS, special["sep_token"])}
    special["pad_token"] = next(name for name, id_ in found.items() if id_ is not None)
    special["unk_token"] = "[UNK]" if vocabulary.token_to_id("[UNK]") is not None else special["pad_token"]
    cls, sep = special["cls_token"], special["sep_token"]
    closings = [""] * 2 if config.model.is_causal else [f" {sep}:{kind}" for kind in (0, 1)]
    if config.model.is_causal:
        end = _spelling(vocabulary, source, "data.end_token", config.data.end_token)
        special |= {"bos_token": cls, "eos_token": end}
    vocabulary.no_padding()
    vocabulary.no_truncation()
    vocabulary.post_processor = TemplateProcessing(
        single=f"{cls}:0 $A:0{closings[0]}",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1{closings[1]}",
        special_tokens=[(cls, masking.cls_token), (sep, masking.sep_token)],
    )
    _copy(source, vocabulary, folder)
    vocabulary.save(str(folder / "tokenizer.json"))
    inputs = ["input_ids", *(["token_type_ids"] if config.model.token_types > 1 else []), "attention_mask"]
    _write_settings(folder, special, {"model_max_length": _trained_length(config), "model_input_names": inputs})
    return {"pad_token_id": int(vocabulary.token_to_id(special["pad_token"]) or 0)}


def _trained_length(config: RunConfig) -> int:
    return min(config.data.sequence_length, config.model.max_positions)


def _opened(source: Path, vocab_size: int) -> tokenizers.Tokenizer:
    vocabulary = tokenizers.Tokenizer.from_str(load_tokenizer(source).content())
    ids = max(vocabulary.get_vocab(with_added_tokens=True).values()) + 1
    if ids > vocab_size:
        raise DataError(f"`{source}` must have at most {vocab_size} ids (model.vocab_size), but has {ids} instead.")
    return vocabulary


def _copy(source: Path, vocabulary: tokenizers.Tokenizer, folder: Path) -> None:
    """The file itself, and for a SentencePiece model the tokenizer.json that gives the same ids."""
    if load_tokenizer(source).engine == "sentencepiece":
        shutil.copyfile(source, folder / "tokenizer.model")
        vocabulary.save(str(folder / "tokenizer.json"))
    else:
        (folder / "tokenizer.json").write_text(load_tokenizer(source).content(), encoding="utf-8")


def _spelling(vocabulary: tokenizers.Tokenizer, source: Path, field: str, id_: int) -> str:
    token = vocabulary.id_to_token(id_)
    if token is None:
        raise DataError(f"`{source}` must have a token with the id of {field} ({id_}), but has none.")
    return str(token)


def _write_settings(folder: Path, special: dict[str, str], more: dict[str, object]) -> None:
    shared = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, content in (
        ("special_tokens_map.json", special),
        ("tokenizer_config.json", {**special, **shared, **more}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
