"""Converts a SentencePiece `.model` to a `tokenizer.json` with the same ids."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from megahead.errors import DataError

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
    """Whether the file is named `.model` or begins like one: with a piece that begins with its spelling. Runs of
    earlier versions have such a file as their `tokenizer.json`."""
    if path.suffix == ".model":
        return True
    with path.open("rb") as file:
        start = file.read(64)
    return start[:1] == start[2:3] == b"\n" and not start.lstrip().startswith(b"{")


def tokenizer_json(path: Path) -> Tokenizer:
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


def from_sentencepiece(content: bytes) -> Tokenizer:
    """Converts the bytes of a `.model` to a tokenizer, without comparing their ids."""
    proto = _parse_model(content)
    spec = proto.trainer_spec
    if spec.model_type == _UNIGRAM:
        pieces = [(piece.piece, piece.score) for piece in proto.pieces]
        tokenizer = Tokenizer(models.Unigram(pieces, unk_id=spec.unk_id, byte_fallback=spec.byte_fallback))
    else:
        tokenizer = Tokenizer(_bpe(proto))
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
    """Isolates user-defined pieces, and splits words if no piece extends beyond one."""
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
