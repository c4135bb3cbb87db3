"""Makes a last-word test from held-out documents, in the spirit of LAMBADA.

Each passage is a few whole sentences that end in a content word which already occurred in the passage: a reader who
followed it can name the word, one who saw only the last sentence often cannot. A line is {"text": passage}; the word
after its last space is the one to predict.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from demo_pipeline.corpus import write_jsonl
from megahead.errors import DataError

WORDS = range(30, 81)  # length of a passage
PER_DOCUMENT = 4  # passages from one document at most
_WORD = re.compile(r"[A-Za-z]+")
_SENTENCE_START = re.compile(r"(?<=[\w)`'\"][.!?])\s+(?=[A-Z`])")
_CLAUSE_END = re.compile(r"(?<=[a-z])(?=[,;:.!?](\s|$))")
_NOT_PROSE = re.compile(r"[|\\{}~^=<>]|--|\*\*|\.\.|\]\(| : |::|https?:|\w\)?: \w|:$|^\W*\w+\(")
_FUNCTION_WORDS = """
about above after also because been before being below between both does each either every false from given have
here however instead into itself like make many more most must need none note only other over same should since some
such than that their them then there these they this those through true under until used using very well were what
when where whether which while will with within without would your
"""


def build_cloze(documents: Path, output: Path, *, limit: int = 1000, seed: int = 1234) -> int:
    """Writes up to `limit` passages from a jsonl of {"text"} documents and returns how many.

    Chosen by hash: the same documents and seed give the same file. Raises DataError when no passage is found.
    """
    with documents.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    drawn = {one for text in texts for one in sorted(passages_of(text), key=_key(seed))[:PER_DOCUMENT]}
    passages = sorted(drawn, key=_key(seed))[:limit]
    if not passages:
        raise DataError(f"{documents} must hold prose that ends in a repeated word, but gives no cloze passage.")
    write_jsonl(output, ({"text": passage} for passage in passages))
    return len(passages)


def passages_of(text: str) -> Iterator[str]:
    """Every passage of one document that may serve: from the start of a sentence to the end of a clause."""
    for prose in _prose(text):
        starts = [0, *(match.end() for match in _SENTENCE_START.finditer(prose))]
        for clause in _CLAUSE_END.finditer(prose):
            passages = (prose[start : clause.start()] for start in reversed(starts) if start < clause.start())
            fitting = (passage for passage in passages if len(passage.split()) in WORDS and is_answerable(passage))
            yield from itertools.islice(fitting, 1)


def is_answerable(passage: str) -> bool:
    """Whether the last word is a content word that occurs before, though not right before."""
    before, _, answer = passage.rpartition(" ")
    words = _WORD.findall(before)
    content = len(answer) >= 4 and answer.isalpha() and answer.islower() and answer not in _FUNCTION_WORDS.split()
    return content and answer in words[:-1]


def _prose(text: str) -> Iterator[str]:
    """Runs of neighbouring paragraphs that are plain sentences, each run on one line."""
    run: list[str] = []
    blocks = itertools.groupby(text.splitlines(), key=lambda line: (not line, len(line) - len(line.lstrip())))
    joined = (" ".join(" ".join(lines).split()) for _, lines in blocks)  # of one indentation, without empty lines
    for paragraph in [*filter(None, joined), ""]:
        if paragraph[:1].isupper() and paragraph.endswith((".", "!", "?")) and not _NOT_PROSE.search(paragraph):
            run.append(paragraph)
        elif run:
            yield " ".join(run)
            run = []


def _key(seed: int) -> Callable[[str], bytes]:
    return lambda passage: hashlib.blake2b(f"{seed}:{passage}".encode(), digest_size=8).digest()
