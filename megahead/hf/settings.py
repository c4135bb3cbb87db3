"""Files of an export beside its weights: config.json, generation_config.json and the tokenizer's files.

A run that starts from a Hugging Face folder saves a copy of those files, and its exports contain them again.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile

import tokenizers
from tokenizers.processors import TemplateProcessing

from megahead.config.model import ModelConfig
from megahead.config.run import RunConfig
from megahead.data.tokenizer import Tokenizer, load_tokenizer
from megahead.data.train_tokenizer import set_mask_lstrip
from megahead.data.vocabulary_map import ROLES
from megahead.errors import CheckpointError, DataError
from megahead.files import write_atomically
from megahead.hf.decoders import DECODERS
from megahead.hf.encoders import ENCODERS
from megahead.hf.heads import ExportTarget
from megahead.run_folder import RunFolder

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
_FILE_PATTERNS = (
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
_TOKEN_KEYS = {
    "mask_token": ("mask_token",),
    "cls_token": ("cls_token", "bos_token"),
    "sep_token": ("sep_token", "eos_token"),
}
"""An encoder's special tokens: the names that a tokenizer's settings have for each."""
ENCODER_TOKEN_NAMES = tuple(_TOKEN_KEYS)
_SPELLINGS = {"mask_token": ROLES["mask"], "cls_token": ROLES["begin"], "sep_token": ROLES["end"]}


@dataclass(frozen=True)
class HFSettings:
    """All files of a Hugging Face folder but its weights: their contents by name."""

    files: Mapping[str, bytes]

    @staticmethod
    def from_folder(folder: Path) -> HFSettings:
        """Reads them from a Hugging Face folder."""
        paths = {path for pattern in _FILE_PATTERNS for path in folder.glob(pattern) if path.is_file()}
        return HFSettings({path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(paths)})

    @staticmethod
    def from_run(run: RunFolder) -> HFSettings | None:
        """Reads a run's copy of the files of the Hugging Face folder that it started from. None if the run started from
        none, or is of an earlier version. CheckpointError for a damaged file."""
        if not run.source_hf_files.is_file():
            return None
        try:
            with ZipFile(run.source_hf_files) as archive:
                paths = map(PurePosixPath, archive.namelist())
                if outside := next((path for path in paths if path.is_absolute() or ".." in path.parts), None):
                    raise BadZipFile(f"its {outside} is outside of the folder")
                settings = HFSettings({name: archive.read(name) for name in archive.namelist()})
            if missing := {"model_type", "vocab_size"} - settings.read_json(CONFIG_FILE).keys():
                raise BadZipFile(f"its {CONFIG_FILE} lacks {', '.join(sorted(missing))}")
            return settings
        except (BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, zlib.error) as error:
            raise CheckpointError(
                f"`{run.source_hf_files}` must be a zip archive of settings, but cannot be read ({error}); remove it "
                "to export with the run's own settings."
            ) from None

    def save(self, run: RunFolder) -> None:
        """Writes a copy into a run's folder."""
        buffer = BytesIO()
        with ZipFile(buffer, "w", ZIP_DEFLATED) as archive:
            for name, content in self.files.items():
                archive.writestr(name, content)
        write_atomically(run.source_hf_files, buffer.getvalue())

    def write(self, folder: Path) -> None:
        """Writes all files but config.json and generation_config.json into an export's folder."""
        for name in self.files.keys() - {CONFIG_FILE, GENERATION_FILE}:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(self.files[name])

    def read_json(self, name: str) -> dict[str, Any]:
        """Returns the content of a JSON file; empty if it is missing, or has no object."""
        try:
            content = json.loads(self.files.get(name, b""))
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def find_conflict(self, config: RunConfig, tokenizer: Path | None) -> str | None:
        """Returns why the files are wrong for a run with this config and tokenizer (the run tokenizes, ends or reads
        texts in another way), or None."""
        if tokenizer is not None and not self._has_same_ids(tokenizer):
            return "the run has another tokenizer"
        family = ENCODERS.get(self.read_json(CONFIG_FILE).get("model_type", ""))
        if family is not None and (family.head_type == "CausalLM") != config.model.is_causal:
            return "the run reads texts in another direction"
        if config.masking is not None and not config.model.is_causal:
            special_ids = self.special_ids(tokenizer).items()
            is_same = all(id_ in (None, getattr(config.masking, role)) for role, id_ in special_ids)
            return None if is_same else "the run has other special tokens"
        end_tokens = self.end_tokens()
        is_same = not end_tokens or config.data.end_token in end_tokens
        return None if is_same else "the run ends texts with another token"

    def end_tokens(self) -> list[int]:
        """Returns the ids that end a text, those of config.json first."""
        values = (self.read_json(name).get("eos_token_id") for name in (CONFIG_FILE, GENERATION_FILE))
        ids = [id_ for value in values for id_ in (value if isinstance(value, list) else [value])]
        return [id_ for id_ in ids if isinstance(id_, int) and id_ >= 0]  # some write -1 for none

    def special_ids(self, tokenizer: Path | None) -> dict[str, int | None]:
        """Returns the ids of an encoder's mask, cls and sep token: by the tokenizer's settings, by BERT's spelling, by
        config.json, or by other spellings; None for one that no file has. If cls and sep have the same id,
        as in mmBERT's config.json, bos and eos replace them."""
        vocabulary = None if tokenizer is None else load_tokenizer(tokenizer)
        masks, begins, ends = (self._special_ids(role, vocabulary) for role in _TOKEN_KEYS)
        cls_id, sep_id = next(
            ((begin, end) for begin, end in product(begins, ends) if begin != end),
            (next(iter(begins), None), next(iter(ends), None)),
        )
        return {"mask_token": next(iter(masks), None), "cls_token": cls_id, "sep_token": sep_id}

    def _special_ids(self, role: str, vocabulary: Tokenizer | None) -> list[int]:
        """Returns the ids that the files name for a special token, the most reliable first."""
        keys, (bert_spelling, *spellings), hf_config = _TOKEN_KEYS[role], _SPELLINGS[role], self.read_json(CONFIG_FILE)
        settings = [self.read_json(name) for name in ("tokenizer_config.json", "special_tokens_map.json")]
        tokens = [content.get(keys[0]) for content in settings] + [bert_spelling]
        tokens += [content.get(key) for key in keys[1:] for content in settings]
        texts = [token.get("content") if isinstance(token, dict) else token for token in tokens]
        ids = [] if vocabulary is None else [vocabulary.find(text) for text in texts if text and isinstance(text, str)]
        ids += [hf_config.get(f"{key}_id") for key in keys]
        ids += [] if vocabulary is None else [vocabulary.find(text) for text in spellings]
        return [id_ for id_ in ids if isinstance(id_, int) and 0 <= id_ < hf_config["vocab_size"]]

    def _has_same_ids(self, tokenizer: Path) -> bool:
        """Whether their tokenizer gives the same ids as `tokenizer`."""
        contents = [self.files[name] for name in ("tokenizer.json", "tokenizer.model") if name in self.files]
        content = tokenizer.read_bytes()
        return content in contents or _without_template(content) in map(_without_template, contents)


def _without_template(tokenizer: bytes) -> object:
    """Returns the parts of a tokenizer.json that decide a text's ids: without post-processor, padding and truncation,
    and without `lstrip` of special tokens."""
    try:
        content = json.loads(tokenizer)
    except ValueError:  # of SentencePiece
        return tokenizer
    tokens = [token | {"lstrip": False} for token in content.get("added_tokens") or ()]
    parts = {name: part for name, part in content.items() if name not in ("post_processor", "padding", "truncation")}
    return parts | {"added_tokens": tokens}


# config.json and generation_config.json.


def write_settings(folder: Path, target: ExportTarget) -> tuple[Path | None, str | None]:
    """Writes config.json, generation_config.json and the tokenizer files; returns the tokenizer's source, and why
    settings of the folder that the run started from were not used, or None.

    Those settings stay as they are, except for what the run changed: their tokenizer adds the tokens that the folder's
    added to a text, though a decoder's rows have none of them. If there are none, or the run tokenizes, ends or reads
    texts in another way, special tokens are those of the run's config.
    """
    model = target.model
    tokenizer, original = model.tokenizer_path(), HFSettings.from_run(model.run_folder())
    conflict = None if original is None else original.find_conflict(model.config, tokenizer)
    if original is None or conflict is not None:
        ids = _write_run_tokenizer(folder, target, tokenizer)
        hf_config, generation = _hf_config(target) | ids, ids
    else:
        original.write(folder)
        if tokenizer is not None and not (folder / "tokenizer.json").is_file():
            with suppress(DataError):  # not every SentencePiece model can be converted
                _write_converted_tokenizer(tokenizer, folder, original, model.config.model.vocab_size)
        if tokenizer is None and (folder / "tokenizer.json").is_file():
            tokenizer = model.run_folder().source_hf_files
        hf_config, generation = _updated_hf_config(target, original), original.read_json(GENERATION_FILE)
    write_json(folder / CONFIG_FILE, hf_config)
    if target.has_head() and not target.is_masked_lm() and generation:
        write_json(folder / GENERATION_FILE, generation)
    return tokenizer, conflict


def _write_run_tokenizer(folder: Path, target: ExportTarget, tokenizer: Path | None) -> dict[str, int]:
    """Writes the tokenizer's files by the run's config; returns the ids of special tokens."""
    config, end_token = target.model.config, target.model.config.data.end_token
    if config.masking is None:
        ids = {"bos_token_id": end_token, "eos_token_id": end_token, "pad_token_id": end_token}
        return ids | ({} if tokenizer is None else write_tokenizer(tokenizer, folder, config))
    cls_token, sep_token = config.masking.cls_token, config.masking.sep_token
    padding = config.model.padding_token() or 0
    ids = {"pad_token_id": padding, "bos_token_id": cls_token, "cls_token_id": cls_token}
    ids |= {"eos_token_id": sep_token, "sep_token_id": sep_token}
    ids |= {} if tokenizer is None else write_encoder_tokenizer(tokenizer, folder, config)
    return ids | ({"eos_token_id": end_token} if config.model.is_causal else {})


def _write_converted_tokenizer(source: Path, folder: Path, original: HFSettings, vocab_size: int) -> None:
    """Writes the tokenizer.json of a SentencePiece model, which adds a begin and an end token to a text where
    `add_bos_token` and `add_eos_token` of the original's settings say so, as transformers does for the model itself.
    Nothing for another tokenizer; DataError for a model that cannot be converted."""
    if load_tokenizer(source).engine != "sentencepiece":
        return
    tokenizer, special_ids = _load_tokenizer(source, vocab_size), load_tokenizer(source).special_ids
    settings, tokens = original.read_json("tokenizer_config.json"), {}
    for role, name in (("begin", "add_bos_token"), ("end", "add_eos_token")):
        if settings.get(name) and role in special_ids:
            tokens[role] = str(tokenizer.id_to_token(special_ids[role]))
    begin, end = ([tokens[role]] if role in tokens else [] for role in ("begin", "end"))
    first, second = ([f"{part}:{type_}" for part in (*begin, text, *end)] for type_, text in enumerate(("$A", "$B")))
    special_tokens = [(token, special_ids[role]) for role, token in tokens.items()]
    tokenizer.post_processor = TemplateProcessing(single=first, pair=[*first, *second], special_tokens=special_tokens)
    tokenizer.save(str(folder / "tokenizer.json"))


def _hf_config(target: ExportTarget, kept: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns config.json without special tokens; `kept`: settings of the run's source, in place of the run's."""
    model, config, head, family = target.model, target.model.config, target.head, target.family
    origin: dict[str, Any] = {"run": config.name, "head": head.name, "objective": config.objective.model_dump()}
    origin |= {"step": model.checkpoint.step, "tokens": model.checkpoint.state.get("tokens")}
    return {
        **family.hf_config(head.exported_config(config.model.model_copy(update=kept))),
        "architectures": [family.head_class() if target.has_head() else f"{family.class_prefix}Model"],
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": head.is_tied(),
        "dtype": target.dtype,
        "megahead": origin,
    }


def _updated_hf_config(target: ExportTarget, original: HFSettings) -> dict[str, Any]:
    """Returns the original config.json with what the run changed."""
    old, family = original.read_json(CONFIG_FILE), target.family
    source = ModelConfig(**(DECODERS | ENCODERS)[old["model_type"]].model_settings(old))
    new = _hf_config(target, _kept_settings(source, target.model.config))
    if old["model_type"] != new["model_type"]:  # a class with another head, or a Mistral that is exported as a Llama
        return new | {name: id_ for name, id_ in old.items() if name.endswith("_token_id")}
    unchanged = family.hf_config(source)
    changes = {name: value for name, value in new.items() if name not in unchanged or unchanged[name] != value}
    if not target.has_head() and "tie_word_embeddings" in old:
        del changes["tie_word_embeddings"]  # there is nothing to tie
    if "torch_dtype" in old:
        changes["torch_dtype"] = target.dtype
    return old | changes


def _kept_settings(source: ModelConfig, config: RunConfig) -> dict[str, Any]:
    """Returns those settings that need not be the source's, and that the run left at their defaults: the context, if
    the run's rows are no longer, and the initial deviation."""
    names = ["init_std"] + ["max_positions"] * (source.max_positions >= config.data.sequence_length)
    return {name: getattr(source, name) for name in names if config.model.has_default(name)}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes indented JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class ExportOrigin(NamedTuple):
    """The run that an export is from, and how many tokens it had been trained on."""

    run: str
    tokens: int


def read_origin(folder: Path) -> ExportOrigin:
    """Returns the origin of an export by megahead; CheckpointError for another folder."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))["megahead"]
        return ExportOrigin(content["run"], int(content["tokens"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(
            f"`{folder}` must name its run and tokens to be drawn on a curve, but does not; name the run's checkpoints."
        ) from None


# The tokenizer's files, as transformers (4 and 5) reads them.

PADDING_TOKEN = "<|padding|>"
PADDING_TOKENS = ("[PAD]", PADDING_TOKEN, "<pad>")


def write_tokenizer(source: Path, folder: Path, config: RunConfig) -> dict[str, int]:
    """Copies the tokenizer at `source` and writes its settings; returns the ids that generation needs. For a
    SentencePiece model it also writes the tokenizer.json that gives the same ids.

    It adds no special tokens to a text, whatever the file says, as rows have none but the end token. That also begins
    texts; the padding and the unknown token are the tokenizer's, or the end token again. Raises DataError for a
    tokenizer that cannot be this model's.
    """
    tokenizer, end_id = _load_tokenizer(source, config.model.vocab_size), config.data.end_token
    end_token = _token_text(tokenizer, source, "data.end_token", end_id)
    special_ids = load_tokenizer(source).special_ids
    padding_id = special_ids.get("padding", tokenizer.token_to_id(PADDING_TOKEN))
    ids = {"pad_token": end_id if padding_id is None else padding_id, "unk_token": special_ids.get("unknown", end_id)}
    special_tokens = {"bos_token": end_token, "eos_token": end_token}
    special_tokens |= {name: str(tokenizer.id_to_token(id_)) for name, id_ in ids.items()}
    _copy_tokenizer(source, tokenizer, folder)
    _add_no_special_tokens(folder / "tokenizer.json")
    # llama.cpp would add them to a SentencePiece model's texts
    _write_tokenizer_config(folder, config, special_tokens, add_bos_token=False, add_eos_token=False)
    return {"pad_token_id": ids["pad_token"]}


def _add_no_special_tokens(path: Path) -> None:
    """Removes from a tokenizer.json what adds tokens to a text: all of its post-processor but ByteLevel, which changes
    offsets alone."""
    content = json.loads(path.read_text(encoding="utf-8"))
    processor = content.get("post_processor") or {"type": "Sequence", "processors": []}
    parts = processor["processors"] if processor["type"] == "Sequence" else [processor]
    kept = [part for part in parts if part["type"] == "ByteLevel"]
    if kept != parts:
        content["post_processor"] = {"type": "Sequence", "processors": kept} if kept else None
        path.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")


def write_encoder_tokenizer(source: Path, folder: Path, config: RunConfig) -> dict[str, int]:
    """As `write_tokenizer`, for an encoder. Its tokenizer adds [CLS] before a text, [SEP] between two texts, and [SEP]
    after them unless the model is causal and continues texts. Returns the ids that the model needs."""
    masking, tokenizer = config.masking, _load_tokenizer(source, config.model.vocab_size)
    assert masking is not None
    ids = {"cls_token": masking.cls_token, "sep_token": masking.sep_token, "mask_token": masking.mask_token}
    special_tokens = {name: _token_text(tokenizer, source, f"masking.{name}", id_) for name, id_ in ids.items()}
    cls, sep = special_tokens["cls_token"], special_tokens["sep_token"]
    pad_token = _padding_token(tokenizer, source, config.model, default=sep)
    unk_token = next((token for token in ROLES["unknown"] if tokenizer.token_to_id(token) is not None), pad_token)
    special_tokens |= {"pad_token": pad_token, "unk_token": unk_token}
    suffixes = [""] * 2 if config.model.is_causal else [f" {sep}:{token_type}" for token_type in (0, 1)]
    if config.model.is_causal:
        end_token = _token_text(tokenizer, source, "data.end_token", config.data.end_token)
        special_tokens |= {"bos_token": cls, "eos_token": end_token}
    tokenizer.no_padding()
    tokenizer.no_truncation()
    set_mask_lstrip(tokenizer, special_tokens["mask_token"])
    tokenizer.post_processor = TemplateProcessing(
        single=f"{cls}:0 $A:0{suffixes[0]}",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1{suffixes[1]}",
        special_tokens=[(cls, masking.cls_token), (sep, masking.sep_token)],
    )
    _copy_tokenizer(source, tokenizer, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    input_names = ["input_ids", *(["token_type_ids"] if config.model.token_types > 1 else []), "attention_mask"]
    _write_tokenizer_config(folder, config, special_tokens, model_input_names=input_names)
    return {"pad_token_id": int(tokenizer.token_to_id(pad_token) or 0)}


def _padding_token(tokenizer: tokenizers.Tokenizer, source: Path, model: ModelConfig, default: str) -> str:
    """Returns an encoder's padding token: in a RoBERTa by its position offset, else the tokenizer's."""
    position_padding = model.padding_token()
    if position_padding is not None:
        return _token_text(tokenizer, source, "model.position_offset - 1", position_padding)
    padding_id = load_tokenizer(source).special_ids.get("padding")
    tokens = [] if padding_id is None else [str(tokenizer.id_to_token(padding_id))]
    return next(token for token in [*tokens, *PADDING_TOKENS, default] if tokenizer.token_to_id(token) is not None)


def _load_tokenizer(source: Path, vocab_size: int) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(load_tokenizer(source).content())
    num_ids = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    if num_ids > vocab_size:
        raise DataError(f"`{source}` must have at most {vocab_size} ids (model.vocab_size), but has {num_ids} instead.")
    return tokenizer


def _copy_tokenizer(source: Path, tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """Copies the file, and for a SentencePiece model writes the tokenizer.json that gives the same ids."""
    if load_tokenizer(source).engine == "sentencepiece":
        shutil.copyfile(source, folder / "tokenizer.model")
        tokenizer.save(str(folder / "tokenizer.json"))
    else:
        (folder / "tokenizer.json").write_text(load_tokenizer(source).content(), encoding="utf-8")


def _token_text(tokenizer: tokenizers.Tokenizer, source: Path, field: str, id_: int) -> str:
    token = tokenizer.id_to_token(id_)
    if token is None:
        raise DataError(f"`{source}` must have a token with the id of {field} ({id_}), but has none.")
    return str(token)


def _write_tokenizer_config(
    folder: Path, config: RunConfig, special_tokens: dict[str, str], **settings: object
) -> None:
    length = min(config.data.sequence_length, config.model.max_positions)
    common = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(folder / "special_tokens_map.json", special_tokens)
    write_json(folder / "tokenizer_config.json", {**special_tokens, **common, "model_max_length": length, **settings})
