"""Queries, the texts that they search, and which texts answer which query: JSON lines of pairs, and BEIR's folders.

Pairs are {"query", "positive"} with, if there are any, "negatives": texts that do not answer the query. A folder of
BEIR (Thakur et al. 2021, arXiv 2104.08663) has corpus.jsonl, queries.jsonl and qrels/{train,dev,test}.tsv.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path

from megahead.errors import DataError, FieldError
from megahead.evaluate.glue_tasks import TASKS, Example, FineTuningSettings, LossName, Task, TaskData, text_builder
from megahead.evaluate.harness_tasks import Row, jsonl_reader, read_articles, read_first_line, read_text
from megahead.hf.other_programs import PoolingName

_EVALUATION_SPLITS = ("test", "dev", "train")
_HELD_OUT_EVERY = 10
"""Pairs in one file have no splits: one in ten queries is held out of training."""


@dataclass(frozen=True)
class SearchData:
    """Queries and texts by id, and how well texts answer queries."""

    queries: Mapping[str, str]
    corpus: Mapping[str, str]

    judgements: Mapping[str, Mapping[str, int]]
    """By ids of a query and a text: above 0 for an answer, the higher the better; 0 or less: none. A text that is not
    judged is no answer."""

    def __iter__(self) -> Iterator[Example]:
        """Every text, queries first."""
        yield from (Example(text, (None,), 0) for texts in (self.queries, self.corpus) for text in texts.values())

    def pairs(self) -> list[Example]:
        """An example for each query and answer: the query, the answer (at index 0), the query's judged negatives."""
        examples = []
        for query, scores in self.judgements.items():
            negatives = [self.corpus[text] for text, score in scores.items() if score <= 0]
            answers = [self.corpus[text] for text, score in scores.items() if score > 0]
            examples += [Example(self.queries[query], (answer, *negatives), 0) for answer in answers]
        return examples


def read_searches(path: Path, limit: int | None) -> Sequence[Row | Example]:
    """The examples of the task `retrieval`, to validate its file: pairs of a query and an answer, or articles, of which
    title and first sentence are the queries, and the rest is the answer."""
    return read_search_data(path, limit=limit).pairs() if has_queries(path) else read_articles(path, limit)


def has_queries(path: Path) -> bool:
    """Whether `path` is BEIR's folder or a file of pairs, and not one of articles."""
    return path.is_dir() or '"query":' in read_first_line(path).replace(" ", "")


def read_search_data(path: Path, splits: Sequence[str] = _EVALUATION_SPLITS, limit: int | None = None) -> SearchData:
    """Reads the judged queries (the first `limit`) and all texts of pairs or of BEIR's folder (its first split among
    `splits`). DataError for missing or repeated ids, no judgements, and queries without a text."""
    data = _read_beir(path, splits) if path.is_dir() else _judge_pairs(read_pairs(path))
    queries = dict(islice(data.queries.items(), limit))
    return SearchData(queries, data.corpus, {query: data.judgements[query] for query in queries})


def read_pairs(file: Path) -> list[Example]:
    """Reads pairs as `SearchData.pairs` returns them; DataError for a query, an answer or a negative without text."""
    examples = []
    for number, row in enumerate(jsonl_reader("query", "positive", optional=("negatives",))(file), 1):
        negatives = row.get("negatives") or []
        texts = [row["query"], row["positive"], *(negatives if isinstance(negatives, list) else [None])]
        if not all(isinstance(text, str) and text.strip() for text in texts):
            rule = "have texts as query and positive, and a list of them as negatives"
            raise DataError(f"`{file}` must {rule}, but pair {number} has not; leave it out.")
        examples.append(Example(texts[0], tuple(texts[1:]), 0))
    return examples


def read_tuning_data(path: Path) -> tuple[list[Example], SearchData]:
    """The pairs that a model is tuned on, and what it is evaluated on.

    BEIR's folder: qrels/train.tsv, where judgements of 0 are hard negatives, and qrels/dev.tsv or test.tsv. A file: one
    in ten queries is held out (every tenth if none share an answer). Held-out queries search the texts of all held-out
    pairs.
    """
    if path.is_dir():
        return read_search_data(path, ("train",)).pairs(), read_search_data(path, ("dev", "test"))
    pairs, held_out, num_queries = read_pairs(path), set[str](), 0
    for queries_of_group in _group_queries(pairs):  # held out if at most a tenth of the queries so far are then
        num_queries += len(queries_of_group)
        if len(held_out) + len(queries_of_group) <= num_queries // _HELD_OUT_EVERY:
            held_out |= queries_of_group
    if not held_out:
        rule = f"hold pairs of at least {_HELD_OUT_EVERY} queries, of which one is held out with its answers"
        raise DataError(f"`{path}` must {rule}, but has {num_queries}, or too many with an equal answer; add pairs.")
    train = _judge_pairs([pair for pair in pairs if pair.first_text not in held_out])
    return train.pairs(), _judge_pairs([pair for pair in pairs if pair.first_text in held_out])


def _group_queries(pairs: Sequence[Example]) -> Iterable[set[str]]:
    """Groups of queries that share answers, directly or through other queries, in the order of their first pairs; every
    query is in one."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    numbers: dict[tuple[str, str | None], int] = defaultdict(count().__next__)
    query_P = [numbers["query", pair.first_text] for pair in pairs]
    answer_P = [numbers["answer", pair.second_texts[0]] for pair in pairs]
    graph = coo_array(([True] * len(pairs), (query_P, answer_P)), (len(numbers), len(numbers)))
    _, group_of = connected_components(graph, directed=False)
    groups = defaultdict[int, set[str]](set)
    for number, pair in zip(query_P, pairs, strict=True):
        groups[group_of[number]].add(pair.first_text)
    return groups.values()


def _judge_pairs(pairs: Sequence[Example]) -> SearchData:
    """Merges equal queries, and equal texts of the corpus. A text that answers a query in any pair is no negative of
    it."""
    texts = dict.fromkeys(text or "" for pair in pairs for text in pair.second_texts)
    ids = {text: f"d{index}" for index, text in enumerate(texts)}
    query_ids = {text: f"q{index}" for index, text in enumerate(dict.fromkeys(pair.first_text for pair in pairs))}
    judgements: dict[str, dict[str, int]] = {query: {} for query in query_ids.values()}
    for pair in pairs:
        scores = judgements[query_ids[pair.first_text]]
        for index, text in enumerate(pair.second_texts):
            scores[ids[text or ""]] = max(scores.get(ids[text or ""], 0), int(index == 0))
    queries, corpus = ({id_: text for text, id_ in by_text.items()} for by_text in (query_ids, ids))
    return SearchData(queries, corpus, judgements)


# Tuning on pairs as one of the tasks of `megahead finetune`.

RETRIEVAL_PREFIX = "retrieval/"
"""Prefix of names of tasks, before the path of their data."""

_PAIRS_TASK = Task(
    labels=(),
    build=text_builder("query", "positive"),
    files=(),
    hub=("", "", ""),
    metric="ndcg@10",
    extra_metrics=("recall@1", "recall@10", "recall@100", "mrr@10"),
)


def find_task(name: str) -> Task:
    """The task of that name, one of `TASKS` or retrieval/PATH."""
    return _PAIRS_TASK if name.startswith(RETRIEVAL_PREFIX) else TASKS[name]


@dataclass(frozen=True, kw_only=True)
class ContrastiveSettings(FineTuningSettings):
    """Settings of a contrastive run; a batch's pairs are negatives for each other."""

    loss: LossName = field(default="regular", init=False)
    """No other: there are no classes to balance."""

    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    batch_size: int = 64
    epochs: int = 3

    pooling: PoolingName = "mean"
    """The vector of a text: the hidden state of [CLS], or the mean over tokens."""

    temperature: float = 0.05
    """Initial value of the learned temperature, which divides cosines."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature <= 0:
            raise FieldError("--temperature", "be above 0", got=self.temperature)


def load_pairs(name: str, max_train_rows: int | None = None) -> TaskData:
    """The data of the task retrieval/PATH; `max_train_rows` as in `load_task`."""
    path = Path(name.removeprefix(RETRIEVAL_PREFIX))
    train, evaluation = read_tuning_data(path)
    if max_train_rows is not None and len(train) > max_train_rows:
        train = random.Random(0).sample(train, max_train_rows)
    return TaskData(name, _PAIRS_TASK, train, {path.name: evaluation}, trains_on_dev=False)


# BEIR's files.


def _read_beir(folder: Path, splits: Sequence[str]) -> SearchData:
    file = next((file for split in splits if (file := folder / f"qrels/{split}.tsv").is_file()), None)
    if file is None:
        names = " or ".join(f"qrels/{split}.tsv" for split in splits)
        raise DataError(f"`{folder}` must hold judgements, {names}, but has none; get them or write pairs as jsonl.")
    queries, corpus = (_texts_by_id(folder / name) for name in ("queries.jsonl", "corpus.jsonl"))
    judgements = _read_judgements(file, queries, corpus)
    without_text = next((query for query in judgements if not queries[query]), None)
    if without_text is not None:
        raise DataError(f"`{folder / 'queries.jsonl'}` must have a text for each query, but {without_text} has none.")
    return SearchData({query: queries[query] for query in judgements}, corpus, judgements)


def _texts_by_id(file: Path) -> dict[str, str]:
    """A title and the text are joined by a space, as in BEIR."""
    texts: dict[str, str] = {}
    for row in jsonl_reader("_id", "text", optional=("title",))(file):
        id_ = str(row["_id"])
        if id_ in texts:
            raise DataError(f"`{file}` must have each _id once, but repeats {id_}; rename or remove one.")
        title, text = (row.get(field) or "" for field in ("title", "text"))
        if not (isinstance(title, str) and isinstance(text, str)):
            raise DataError(f"`{file}` must have texts as title and text, but {id_} has not; leave it out.")
        texts[id_] = f"{title} {text}".strip()
    return texts


def _read_judgements(file: Path, queries: Mapping[str, str], corpus: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Reads lines of query, text and score, after a header; DataError if none of the texts answers its query."""
    judgements: dict[str, dict[str, int]] = {}
    header, *lines = read_text(file).rstrip("\n").split("\n")
    if header.split("\t")[-1].lstrip("-").isdecimal():
        raise DataError(
            f"`{file}` must begin with a header, but begins with a judgement; add query-id, corpus-id, score."
        )
    for number, line in enumerate(lines, 2):
        try:
            query, text, score = line.split("\t")
            value = int(score)
        except ValueError:
            rule = "hold a query's id, a text's and a whole number, between tabs"
            raise DataError(f"`{file}` must {rule}, but line {number} is not so.") from None
        for id_, name, texts in ((query, "queries.jsonl", queries), (text, "corpus.jsonl", corpus)):
            if id_ not in texts:
                raise DataError(
                    f"`{file}` must name ids of {name}, but line {number} has {id_}, which is not there; get all files "
                    "of one version, or leave the line out."
                )
        judgements.setdefault(query, {})[text] = value
    if not judgements:
        raise DataError(f"`{file}` must hold judgements after its header, but holds none.")
    if all(score <= 0 for scores in judgements.values() for score in scores.values()):
        raise DataError(f"`{file}` must hold an answer, a score above 0, but holds none; check the column.")
    return judgements
