"""The demo's corpus: pages that read like a manual, no copies, a fair held-out share, the same bytes every time."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from demo_pipeline.corpus import (
    Corpus,
    NgramFilter,
    build_cloze,
    build_corpus,
    extract_pages,
    find_passages,
    find_sources,
    is_answerable,
    ngram_hashes,
    sample_sources,
)
from megahead.errors import DataError

WORDS = [
    f"{a}{b}{c}" for a in ("re", "un", "co", "trans") for b in ("form", "port", "pose", "duct") for c in ("er", "ing")
]


def prose(seed: int, count: int = 120) -> str:
    drawn = random.Random(seed).choices(WORDS, k=count)
    return "\n".join(" ".join(drawn[k : k + 12]).capitalize() + "." for k in range(0, count, 12))


def package(root: Path, modules: int) -> Path:
    (root / "pack").mkdir(parents=True)
    for k in range(modules):
        Path(root, "pack", f"m{k:03}.py").write_text(f'"""{prose(k)}"""\n', encoding="utf-8")
    return root


def build(root: Path, output: Path, *, workers: int = 1, held_out: float = 0.25) -> Corpus:
    return build_corpus(output, roots=[root], held_out=held_out, workers=workers)


def documents(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_members_share_a_page_until_they_have_enough_to_say(tmp_path: Path) -> None:
    path = tmp_path / "shop.py"
    path.write_text(
        f'"""{prose(1)}"""\n'
        f'class Till:\n    """Takes money."""\n    def pay(self, amount, *, coin):\n        """Pays."""\n'
        f'    def count(self):\n        """{prose(2)}"""\n'
    )
    page, count = extract_pages(path, "shop")
    assert page.title == "shop"
    assert page.text.startswith("shop\n\n" + prose(1).splitlines()[0])
    assert page.text.endswith("\n\nclass Till\n    Takes money.\n\n    pay(amount, coin)\n        Pays.\n")
    assert count.title == "shop.Till.count"
    assert prose(2).splitlines()[-1] in count.text
    assert prose(2).splitlines()[-1] not in page.text


def test_docstrings_attached_to_compiled_functions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "docs.py"
    path.write_text(f'add_docstr(torch.abs, r"""{prose(3)}""")\nadd_newdoc("numpy", "cos", """{prose(4)}""")\n')
    assert [page.title for page in extract_pages(path, "docs")] == ["torch.abs", "docs.cos"]


@pytest.mark.parametrize(
    "source",
    [
        '"""Too short to say anything."""',
        '"""' + "0.25 1.50 [3, 4] == {5: 6};\n" * 100 + '"""',
        f'"""{prose(1)}"""\nprint "Python 2"',
    ],
    ids=["short", "numbers", "unparsable"],
)
def test_what_is_not_documentation_gives_no_page(tmp_path: Path, source: str) -> None:
    path = tmp_path / "noise.py"
    path.write_text(source)
    assert extract_pages(path, "noise") == []


def test_tests_and_copies_are_not_read(tmp_path: Path) -> None:
    for name in (
        "a/core.py",
        "a/tests/core.py",
        "a/_vendor/core.py",
        "a/test_core.py",
        "a/conftest.py",
        "a-1.0/core.py",
    ):
        Path(tmp_path, name).parent.mkdir(parents=True, exist_ok=True)
        Path(tmp_path, name).write_text("")
    assert [source.module for source in find_sources([tmp_path])] == ["a.core"]


def test_the_corpus_is_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    root = package(tmp_path / "site", 40)
    one, two = (build(root, tmp_path / f"w{count}", workers=count) for count in (1, 2))
    assert one == two
    for name in ("train.jsonl", "held_out.jsonl"):
        assert (tmp_path / "w1" / name).read_bytes() == (tmp_path / "w2" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "w1").iterdir()) == ["held_out.jsonl", "train.jsonl"]


def test_a_corpus_of_some_bytes_is_drawn_from_all_files_and_holds_some_out(tmp_path: Path) -> None:
    root = package(tmp_path / "site", 40)
    sources = list(find_sources([root]))
    some_bytes = sum(source.size for source in sources) // 4
    some = sample_sources(sources, some_bytes, seed=1234)
    assert some_bytes * 0.85 < sum(source.size for source in some) <= some_bytes
    assert (
        some == sample_sources(reversed(sources), some_bytes, seed=1234) != sample_sources(sources, some_bytes, seed=1)
    )
    assert sample_sources(sources, None, seed=1234) == sorted(sources, key=lambda source: source.module)
    build_corpus(tmp_path / "out", roots=[root], source_bytes=some_bytes, held_out=0.25)
    read, held_out = ({d["title"] for d in documents(tmp_path / f"out/{half}.jsonl")} for half in ("train", "held_out"))
    ours = {title for title in read | held_out if title.startswith("pack.")}
    assert ours == {source.module for source in some}
    assert 0 < len(ours & held_out) < len(ours) / 2


def test_every_new_page_is_kept_once_and_split_by_file(tmp_path: Path) -> None:
    root = package(tmp_path / "site", 40)
    alone = build(root, tmp_path / "alone")
    copy = prose(7).replace("ing ", "ing,  ")  # the same words in another layout
    Path(root, "pack", "z_copy.py").write_text(f'"""{copy}"""\n')
    copied = build(root, tmp_path / "copied")
    train, held_out = (documents(tmp_path / f"copied/{half}.jsonl") for half in ("train", "held_out"))
    titles = [document["title"] for document in (*train, *held_out)]
    ours = [title for title in titles if title.startswith("pack.")]
    assert sorted(ours) == [f"pack.m{k:03}" for k in range(40)]
    assert copied.repeated_documents == alone.repeated_documents + 1
    assert (copied.documents, copied.held_out_documents) == (len(train) + len(held_out), len(held_out))
    assert copied.characters == sum(len(document["text"]) for document in (*train, *held_out))


def test_an_environment_without_documentation_is_told_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must fill a training and a held-out file"):
        build(package(tmp_path / "site", 0), tmp_path / "out", held_out=0.0)
    assert not (tmp_path / "out").exists()


def test_shared_runs_are_counted_whatever_the_layout() -> None:
    words = [f"word{k}" for k in range(1000)]
    text, half = " ".join(words), " ".join(words[:500] + [f"other{k}" for k in range(500)])
    seen = NgramFilter()
    assert seen.seen_share(ngram_hashes(text)) == 0
    seen.add(ngram_hashes(text))
    assert seen.seen_share(ngram_hashes(text.replace(" ", ",\n    ").upper())) == 1
    assert seen.seen_share(ngram_hashes(half)) == pytest.approx(493 / 993, abs=0.005)
    assert len(ngram_hashes("only seven words are not a run")) == 0


def test_cloze_passages_end_in_a_word_the_reader_has_met(tmp_path: Path) -> None:
    clear = (
        "The parser reads a table of tokens and keeps each of them in a buffer of fixed size. When the file ends, "
        "the rest is filled with zeros and a warning is shown to whoever called it. Nothing else is kept in the buffer."
    )
    path = tmp_path / "held_out.jsonl"
    path.write_text(json.dumps({"text": clear}) + "\n" + json.dumps({"text": "x = parse(buffer)\n" * 30}) + "\n")
    assert build_cloze(path, tmp_path / "cloze.jsonl") == 1
    (example,) = documents(tmp_path / "cloze.jsonl")
    assert example["text"] == clear.rstrip(".")


def test_cloze_answers_are_lower_case_content_words() -> None:
    assert is_answerable("a buffer holds bytes, so read the buffer")
    assert not is_answerable("a buffer holds bytes, so read the table")
    assert not is_answerable("which one of them is it, if not which")
    assert not is_answerable("the Parser is slow, so use another Parser")
    assert not is_answerable("read the buffer buffer")


def test_cloze_passages_are_of_the_asked_length() -> None:
    sentence = "The quick parser reads every line of the file and then closes the file. "
    lengths = [len(passage.split()) for passage in find_passages(sentence * 12)]
    assert lengths
    assert all(30 <= length <= 80 for length in lengths)


def test_no_passage_at_all_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "held_out.jsonl"
    path.write_text(json.dumps({"text": "x = 1"}) + "\n")
    with pytest.raises(DataError, match="gives no cloze passage"):
        build_cloze(path, tmp_path / "cloze.jsonl")
