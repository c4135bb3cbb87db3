"""One tokenizer interface over three libraries; very long texts are encoded in segments. SentencePiece models are
converted, too."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import fastokens
import numpy as np
import orjson
import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from megahead.data.indexed import Array, TokenizerIdentity, token_dtype
from megahead.errors import DataError
from megahead.files import write_atomically
from megahead.remote_files import local_file
from megahead.run_folder import RunFolder

SEGMENT_CHARACTERS = 1 << 20
"""Approximate characters of a segment."""

CONTEXT_CHARACTERS = 256
"""Characters on either side of a cut, whose ids with and without the cut are compared."""

SEARCH_CHARACTERS = 1 << 16
"""Characters that are searched for a cut; if there is none, the rest stays whole."""

_WORD_START = re.compile(r"(?=\s\w)")
Encode = Callable[[Sequence[str]], list[list[int]]]


def split_text(text: str, encode: Encode) -> Iterator[str]:
    """`text` in segments of about a million characters, whose ids by `encode`, concatenated, are the ids of `text`.

    Cuts before the space in front of a word, if the ids around the cut are the same with and without it. That is exact,
    since all common tokenizers pre-tokenize there. If there is no such cut, the rest stays whole.
    """
    start = 0
    while len(text) - start >= 2 * SEGMENT_CHARACTERS:
        cut = _find_cut(text, start + SEGMENT_CHARACTERS, encode)
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]


def _find_cut(text: str, start: int, encode: Encode) -> int:
    """The first position from `start` on where a cut changes no ids, else the end."""
    for word in _WORD_START.finditer(text, start, start + SEARCH_CHARACTERS):
        cut = word.start()
        left, right = text[cut - CONTEXT_CHARACTERS : cut], text[cut : cut + CONTEXT_CHARACTERS]
        whole, first, second = encode([left + right, left, right])
        if whole == first + second:
            return cut
    return len(text)


# A `tokenizer.json` is read by Hugging Face `tokenizers` (the reference) or, if its ids are the same, by the faster
# `fastokens`; a SentencePiece `.model`, recognized by name or content, by `sentencepiece`.

Engine = Literal["fastokens", "tokenizers", "sentencepiece"]
FileVersion = tuple[int, int, int]


class Tokenizer:
    """The tokenizer in a file, which is cached until it changes; DataError if there is none. Encoding adds no special
    tokens, neither truncates nor pads, and ignores `dropout`. The spelling of a special token in a text is encoded as
    that token."""

    def __init__(self, path: str | Path, engine: Engine = "tokenizers") -> None:
        self.path = path = Path(path)
        if not path.is_file():
            raise DataError(f"`{path}` must be a tokenizer.json file or a .model, but there is none; check the path.")
        stat = path.stat()
        version = stat.st_ino, stat.st_size, stat.st_mtime_ns  # which change with the file
        self._reference = _load_reference(self.path, version)
        self.engine: Engine = "sentencepiece" if isinstance(self._reference, _SentencePieceModel) else engine
        self._fast = _load_fast(self.path, version) if self.engine == "fastokens" else None
        self.vocab_size = self._reference.vocab_size
        """One above the largest id, added tokens included."""
        self.special_ids = self._reference.special_ids
        """Those that a `.model` has for `begin`, `end`, `padding` and `unknown`; empty for a tokenizer.json."""
        self.added_tokens = self._reference.added_tokens
        """The spellings of a tokenizer.json's added tokens, which libraries may encode differently."""
        self.dropout = self._reference.dropout
        """The BPE dropout in the file, which is ignored here."""

    def content(self) -> str:
        """The tokenizer.json, without dropout; for a `.model` a tokenizer.json with the same ids, DataError if there is
        none."""
        is_unchanged = self.engine != "sentencepiece" and not self.dropout
        return self.path.read_text(encoding="utf-8") if is_unchanged else self._reference.content()

    def identity(self) -> TokenizerIdentity:
        """Identifies the tokenizer in datasets, runs and exports. Takes as long as writing its vocabulary as JSON."""
        sha256 = hashlib.sha256(self.path.read_bytes()).hexdigest()
        try:
            content = orjson.loads(self._reference.content())
        except DataError:  # a `.model` without an equal tokenizer.json
            return TokenizerIdentity(self.path.name, sha256, sha256)
        encoding_parts = {part: content[part] for part in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
        vocabulary_sha256 = hashlib.sha256(orjson.dumps(encoding_parts, option=orjson.OPT_SORT_KEYS)).hexdigest()
        return TokenizerIdentity(self.path.name, sha256, vocabulary_sha256)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text. Uses as many cores as the library may."""
        if self._fast is not None:
            ids, lengths = self.encode_flat(texts)
            return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] if len(lengths) else []
        return self._reference.encode(list(texts))

    def encode_flat(self, texts: Sequence[str]) -> tuple[Array, Array]:
        """(ids of all texts, concatenated; number of ids of each), without a Python object per token."""
        if all(len(text) < 2 * SEGMENT_CHARACTERS for text in texts):
            return self._encode_whole(texts)
        dtype, parts = token_dtype(self.vocab_size), []
        for text in texts:
            segments = split_text(text, self.encode_batch)
            encoded = [self._encode_whole([segment])[0].astype(dtype) for segment in segments]
            parts.append(np.concatenate([np.empty(0, dtype), *encoded]))  # an empty text has no segment
        return np.concatenate(parts), np.array([len(part) for part in parts], np.int64)

    def _encode_whole(self, texts: Sequence[str]) -> tuple[Array, Array]:
        if self._fast is not None:
            ids, bounds = self._fast.encode_batch_flat(list(texts))
            return np.frombuffer(ids, np.uint32), np.diff(np.frombuffer(bounds, np.uint64).astype(np.int64))
        parts = self._reference.encode(list(texts))
        lengths = np.array([len(part) for part in parts], np.int64)
        return np.concatenate([np.empty(0, np.int64), *(np.asarray(part, np.int64) for part in parts)]), lengths

    def decode(self, ids: Sequence[int] | Array) -> str:
        """The text of `ids`, special tokens included."""
        return self._reference.decode([int(i) for i in ids])

    def spellings(self, count: int) -> list[str | None]:
        """The spelling of each id below `count`; None for unused ids."""
        return [self._reference.spelling(i) if i < self.vocab_size else None for i in range(count)]

    def find(self, token: str) -> int | None:
        """The id of a token given by its spelling; None when the vocabulary lacks it."""
        return self._reference.id_of(token)

    def id_of(self, token: str) -> int:
        """The id of a token given by its spelling; DataError when the vocabulary lacks it."""
        id_ = self.find(token)
        if id_ is None:
            raise DataError(f"the tokenizer `{self.path}` must have a token `{token}`, but has none; name another one.")
        return id_


def load_tokenizer(path: str | Path, probe: Sequence[str] = ()) -> Tokenizer:
    """The tokenizer in `path`, with `fastokens` if that gives the ids of `tokenizers` on every text of `probe`, and
    around every added token.

    Without a probe, or if `fastokens` cannot read the file (WordPiece, for one), with `tokenizers`. Caches
    tokenizers; downloads the file of a URL first. DataError if the file is missing, or neither a `tokenizer.json` nor a
    `.model`.
    """
    path = local_file(str(path))
    reference = Tokenizer(path)
    if not probe or reference.engine == "sentencepiece" or reference.dropout:
        return reference
    try:
        fast = Tokenizer(path, "fastokens")
        texts = [*probe, *(f"a {token} b{token}c" for token in reference.added_tokens)]
        exact = fast.encode_batch(texts) == reference.encode_batch(texts)
    except ValueError:  # what fastokens raises for a kind of tokenizer it does not know
        exact = False
    return fast if exact else reference


def tokenizer_fingerprint(path: str | Path) -> str:
    """Identifies the tokenizer in a run's checkpoints; equal for files that give equal ids."""
    return f"vocabulary {Tokenizer(local_file(str(path))).identity().vocabulary}"


def has_fingerprint(path: str | Path, fingerprint: str) -> bool:
    """Whether the tokenizer in `path` has this fingerprint; earlier versions used the SHA-256 of the file."""
    file = Path(local_file(str(path)))
    return fingerprint == hashlib.sha256(file.read_bytes()).hexdigest() or fingerprint == tokenizer_fingerprint(file)


def copy_tokenizer(source: Path, run: RunFolder) -> None:
    """Copies a tokenizer's file into a run's folder, and removes one of the other type."""
    target = run.tokenizer_model if is_sentencepiece(source) else run.tokenizer_json
    write_atomically(target, source.read_bytes())
    for other in {run.tokenizer_model, run.tokenizer_json} - {target}:
        other.unlink(missing_ok=True)


class _TokenizerJson:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"`{path}` must be a tokenizer.json file, but cannot be read as one: {error}.") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.dropout = float(getattr(self._tokenizer.model, "dropout", None) or 0)
        if self.dropout:
            self._tokenizer.model.dropout = None
        self.special_ids: dict[str, int] = {}
        self.added_tokens = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        if not ids:
            raise DataError(f"`{path}` must have tokens, but has none.")
        self.vocab_size = max(ids) + 1
        self.id_of, self.spelling = self._tokenizer.token_to_id, self._tokenizer.id_to_token

    def content(self) -> str:
        """The tokenizer.json, serialized again: equal for equal tokenizers."""
        return str(self._tokenizer.to_str(pretty=True))

    def encode(self, texts: list[str]) -> list[list[int]]:
        try:
            return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        except Exception as error:  # a plain one: WordPiece and Unigram need an unknown token
            fix = "give it a token for unknown characters"
            raise DataError(f"`{self._path}` must encode any text, but does not ({error}); {fix}.") from error

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class _SentencePieceModel:
    dropout = 0.0
    added_tokens: list[str] = []  # noqa: RUF012 - never changed

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise DataError(f"`{path}` must be a SentencePiece model, but cannot be read as one: {error}.") from error
        self.vocab_size = int(self._model.get_piece_size())
        ids = {"begin": self._model.bos_id(), "end": self._model.eos_id()}
        ids |= {"padding": self._model.pad_id(), "unknown": self._model.unk_id()}
        self.special_ids = {role: int(id_) for role, id_ in ids.items() if id_ >= 0}

    def content(self) -> str:
        return str(tokenizer_json(self._path).to_str(pretty=True))

    def encode(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = self._model.encode(texts, out_type=int, num_threads=1)
        return ids

    def decode(self, ids: list[int]) -> str:
        return str(self._model.decode(ids))

    def id_of(self, token: str) -> int | None:
        id_ = int(self._model.piece_to_id(token))  # for an unknown token the id of <unk>
        return id_ if self._model.id_to_piece(id_) == token else None

    def spelling(self, id_: int) -> str | None:
        return str(self._model.id_to_piece(id_))


@lru_cache(maxsize=4)
def _load_reference(path: Path, version: FileVersion) -> _TokenizerJson | _SentencePieceModel:
    return _SentencePieceModel(path) if is_sentencepiece(path) else _TokenizerJson(path)


@lru_cache(maxsize=4)
def _load_fast(path: Path, version: FileVersion) -> fastokens.Tokenizer:
    tokenizer = fastokens.Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


# A SentencePiece `.model` as a `tokenizer.json` with the same ids.

_SPACE = "▁"
_UNIGRAM = 1
_SCORE_TOLERANCE = 1e-3
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
PROBES = (
    *("", " ", "  ", " a", "a ", "  a  b  ", "a\n\nb\n", "\ta\t b", "a\r\nb", "a\u00a0b", "a\u3000b", "▁a ▁ b"),
    *(f"x{' ' * spaces}y" for spaces in (3, 4, 5, 7, 8, 16, 31)),
    "The quick brown fox, don't you think? (Yes: 1,234.56 and 10^-3!) https://example.org/a_b?c=d#e",
    "def f(x):\n    if x > 0:\n        return {'a': [x, -x]}\n\treturn None  # done",
    "Ça coûte 50 €, naïve œuvre ; Straße, Ångström, İstanbul ışık, žluťoučký kůň, đường phố, cafe\u0301 ﬁn ½ ① ™ …",
    "Съешь ещё этих мягких булок; за\u0301мок, О\u0301зеро, Їжак, Ђурђевак",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. ΟΔΥΣΣΕΥΣ, ἐν ἀρχῇ",
    "شَّمس، اللغة العربية ١٢٣؟ یک متن فارسی می\u200cخوانم",
    "שָׁלוֹם, עברית קלה",
    "हिन्दी में क्षेत्र, ज़मीन। বাংলা ভাষা, தமிழ் மொழி, తెలుగు, ಕನ್ನಡ, മലയാളം",
    "ภาษาไทยเขียนติดกัน น้ำ, ລາວ, မြန်မာ, ភាសាខ្មែរ",
    "中文没有空格。日本語のテキスト、カタカナ。ＡＢＣ１２３！ 한국어 문장입니다.",
    "ქართული, Հայերեն, አማርኛ, ᏣᎳᎩ",
    "👩\u200d👩\u200d👧 🇩🇪 👍🏽 → ∑ √ 𝔸 ∞ \u200bz",
)
"""Texts on which model and tokenizer.json must agree, in many scripts and with all that normalization changes."""


def is_sentencepiece(path: Path) -> bool:
    """Whether the file is named `.model`, or begins like one: with a piece (protobuf field 1), which begins with its
    spelling (field 1). Runs of earlier versions have such a file as their `tokenizer.json`."""
    if path.suffix == ".model":
        return True
    with path.open("rb") as file:
        start = file.read(64)
    return start[:1] == start[2:3] == b"\n" and not start.lstrip().startswith(b"{")


def tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    """A tokenizer with the ids of the model in `path`, with two exceptions: it encodes a control token's spelling in a
    text as that token, and Unigram may choose another of two equally likely segmentations.

    DataError if the ids differ on PROBES: for models of whole words, with spaces as suffixes, or with case folding.
    """
    content = path.read_bytes()
    tokenizer, proto = from_sentencepiece(content), _parse_model(content)
    library = sentencepiece.SentencePieceProcessor(model_proto=content)
    probes = [*PROBES, *(f"a{piece}b {piece} c" for piece in _pieces_of_type(proto, _USER_DEFINED))]
    expected: list[list[int]] = library.encode(probes)
    actual = [encoding.ids for encoding in tokenizer.encode_batch(probes, add_special_tokens=False)]
    triples = zip(probes, expected, actual, strict=True)
    mismatch = next((probe for probe, a, b in triples if a != b and not _is_tie(proto, a, b)), None)
    if mismatch is not None:
        raise DataError(
            f"`{path}` must give the ids of a tokenizer.json that is made of it, as exports hold one, but does not on "
            f"{mismatch[:40]!r}; use a model of `model_type` unigram or bpe, whose `normalization_rule_name` is "
            "identity, nfkc or nmt_nfkc, without `treat_whitespace_as_suffix`."
        )
    return tokenizer


def from_sentencepiece(content: bytes) -> tokenizers.Tokenizer:
    """Converts the bytes of a `.model` to a tokenizer, without comparing their ids."""
    proto = _parse_model(content)
    spec = proto.trainer_spec
    if spec.model_type == _UNIGRAM:
        pieces = [(piece.piece, piece.score) for piece in proto.pieces]
        tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=spec.unk_id, byte_fallback=spec.byte_fallback))
    else:
        tokenizer = tokenizers.Tokenizer(_bpe(proto))
    tokenizer.normalizer = normalizers.Sequence(list(_normalizers(proto.normalizer_spec)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(_pre_tokenizers(proto)))
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    parts += [decoders.Strip(" ", 1, 0)] if proto.normalizer_spec.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(parts)
    control = _pieces_of_type(proto, _CONTROL)
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in control])
    return tokenizer


def _parse_model(content: bytes) -> Any:
    from sentencepiece import sentencepiece_model_pb2  # takes 0.03 s, and few need it

    return sentencepiece_model_pb2.ModelProto.FromString(content)  # type: ignore[attr-defined]


def _pieces_of_type(proto: Any, type_: int) -> list[str]:
    return [piece.piece for piece in proto.pieces if piece.type == type_]


def _is_tie(proto: Any, *segmentations: list[int]) -> bool:
    """Whether two segmentations of a text have equal Unigram scores, which the libraries add in fp32 and in fp64."""
    first, second = ([proto.pieces[id_] for id_ in ids] for ids in segmentations)
    is_same_text = "".join(piece.piece for piece in first) == "".join(piece.piece for piece in second)
    difference = sum(piece.score for piece in first) - sum(piece.score for piece in second)
    return bool(proto.trainer_spec.model_type == _UNIGRAM and is_same_text and abs(difference) < _SCORE_TOLERANCE)


def _normalizers(spec: Any) -> Iterator[normalizers.Normalizer]:
    """In SentencePiece's order. Only spaces are stripped, where `Strip` would strip line ends, too."""
    if spec.precompiled_charsmap:
        yield normalizers.Precompiled(spec.precompiled_charsmap)
    if spec.remove_extra_whitespaces:
        yield normalizers.Replace(Regex(r"\A +| +\z"), "")
        yield normalizers.Replace(Regex(" {2,}"), " ")
    if spec.add_dummy_prefix:
        yield normalizers.Prepend(_SPACE)
    if spec.escape_whitespaces:
        yield normalizers.Replace(" ", _SPACE)


def _pre_tokenizers(proto: Any) -> Iterator[pre_tokenizers.PreTokenizer]:
    """Isolates user-defined pieces, and splits words if no piece spans several."""
    if user_defined := sorted(_pieces_of_type(proto, _USER_DEFINED), key=len, reverse=True):
        yield pre_tokenizers.Split(Regex("|".join(map(re.escape, user_defined))), "isolated")
    if not any(_SPACE in piece.piece.lstrip(_SPACE) for piece in proto.pieces):
        yield pre_tokenizers.Split(Regex(f"(?<!{_SPACE}){_SPACE}+"), "merged_with_next")


def _bpe(proto: Any) -> models.BPE:
    """SentencePiece merges two neighbours if together they are a piece, in the order of the pieces' scores."""
    rank = {piece.piece: (-piece.score, id_) for id_, piece in enumerate(proto.pieces) if piece.type == _NORMAL}
    merges = [
        (rank[whole], -cut, (whole[:cut], whole[cut:]))
        for whole in rank
        for cut in range(1, len(whole))
        if whole[:cut] in rank and whole[cut:] in rank
    ]
    return models.BPE(
        {piece.piece: id_ for id_, piece in enumerate(proto.pieces)},
        [pair for *_, pair in sorted(merges)],
        unk_token=proto.trainer_spec.unk_piece,
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
        ignore_merges=any(piece.type == _USER_DEFINED for piece in proto.pieces),
    )
