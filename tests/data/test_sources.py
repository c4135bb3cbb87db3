"""Text files cut into chunks: nothing lost, and broken places named."""

from __future__ import annotations

import csv
import gzip
import io
import os
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
import zstandard

from megahead.data import compression, sources
from megahead.data.inspection import survey
from megahead.data.records import LineSelection, Selection
from megahead.data.sources import files_below, find_inputs, read_chunks, total_bytes
from megahead.errors import DataError

TEXTS = [f"text {i} " + "é" * (i % 50) for i in range(200)] + [""]


def read(path: Path, text_key: str | tuple[str, ...] = "text") -> list[str]:
    chunks = read_chunks(find_inputs([path]), Selection(text_key))
    return [text for chunk in chunks for text in chunk.parse().require_texts()]


def pack(path: Path, ending: str) -> Path:
    data = path.read_bytes()
    half = len(data) // 2
    packed = path.with_name(path.name + ending)
    frames = {"": [data], ".gz": map(gzip.compress, (data[:half], data[half:]))}
    frames[".zst"] = map(zstandard.ZstdCompressor().compress, (data[:half], data[half:]))  # two frames in one file
    packed.write_bytes(b"".join(frames[ending]))
    return packed


@pytest.mark.parametrize("block", [64, 1000, 1 << 22])
@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_reads_every_document(
    json_lines: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, ending: str, block: int
) -> None:
    for module in (compression, sources):
        monkeypatch.setattr(module, "BLOCK_BYTES", block)
    path = pack(json_lines(TEXTS, key="body"), ending)
    assert read(path, "body") == TEXTS[:-1]  # the last is empty
    assert sum(chunk.disk_bytes for chunk in read_chunks(find_inputs([path]), Selection("body"))) == path.stat().st_size


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_packed_file_that_was_cut_short_is_refused(json_lines: Callable[..., Path], ending: str) -> None:
    path = pack(json_lines(TEXTS), ending)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="readable to its end"):
        read(path)


@pytest.mark.parametrize("selection", [Selection, LineSelection])
def test_text_without_keys_meets_no_condition(selection: type[Selection], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "Tee", "lang": "de"}\n{"text": "tea", "lang": "en"}\n')
    (tmp_path / "README.md").write_text("about tea")
    (tmp_path / "b.txt").write_text("more tea")
    for chosen, texts in (
        (selection(keep=(("lang", "en"),)), ["tea"]),
        (selection(drop=(("lang", "en"),)), ["about tea", "Tee", "more tea"]),
    ):
        parsed = [chunk.parse() for chunk in read_chunks(find_inputs(tmp_path), chosen)]
        assert [text for chunk in parsed for text in chunk.texts] == texts
        assert sum(chunk.num_filtered for chunk in parsed) == 4 - len(texts)


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "novel.txt"
    path.write_bytes(b"\xef\xbb\xbfFirst line\n\nlast line")
    assert read(path) == ["First line\n\nlast line"]


def test_blank_lines_line_ends_and_byte_order_marks_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b"}')
    assert read(path) == ["a", "b"]


@pytest.mark.parametrize("block", [20, 1 << 22])
@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "cut sh', "must be one JSON object in UTF-8"),
        (b'{"text": "\xff\xfe"}', "must be one JSON object in UTF-8"),
        (b'{"body": "x"}', "must have the key `text`"),
        (b"[1, 2]", "must have the key `text`"),
        (b"17", "must have the key `text`"),
        (b'{"text": null}', "must have a string in `text`, but has NoneType"),
    ],
)
def test_names_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, says: str, block: int
) -> None:
    for module in (compression, sources):
        monkeypatch.setattr(module, "BLOCK_BYTES", block)
    path = tmp_path / "text.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' * 20 + line + b'\n{"text": "fine"}\n')
    with pytest.raises(DataError, match=rf"text\.jsonl:41` {says}"):
        read(path)


def test_names_the_line_of_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"one\ntwo\ncaf\xe9\n")
    with pytest.raises(DataError, match=r"latin\.txt:3` must be UTF-8"):
        read(tmp_path / "latin.txt")


def test_unknown_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "table.doc").touch()
    with pytest.raises(DataError, match=r"must end in one of \.jsonl"):
        read(tmp_path / "table.doc")


def test_globs_are_sorted_and_may_be_deep(json_lines: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "b" / "c").mkdir(parents=True)
    names = ["z.jsonl", "a.jsonl", "b/c/m.jsonl"]
    for name in names:
        json_lines([name], name=name)
    found = find_inputs([tmp_path / "**" / "*.jsonl", tmp_path / "z.jsonl"])
    assert [item.name for item in found] == ["a", "m", "z", "z"]
    odd = tmp_path / "part[1].jsonl"
    odd.write_bytes(b"")
    assert [item.path for item in find_inputs([odd])] == [odd]  # a file's own name is no pattern
    with pytest.raises(DataError, match=r"x\*\.jsonl` must match a file"):
        find_inputs([tmp_path / "x*.jsonl"])


@pytest.mark.parametrize("pattern", ["*", "**", "**/*", "sub*"])
def test_a_folder_that_a_glob_matches_is_what_is_in_it(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "sub" / "pictures").mkdir(parents=True)
    (tmp_path / "sub" / "b.txt").write_text("in the folder")
    found = find_inputs(tmp_path / pattern)
    assert [item.name for item in found] == ["b"]  # once


def test_a_zst_file_may_refer_far_back(tmp_path: Path) -> None:
    """As of `zstd --long=31`, in which large corpora are published; without its size in the header."""
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.jsonl.zst").write_bytes(frame.compress(b'{"text": "a"}') + frame.flush())
    assert read(tmp_path / "a.jsonl.zst") == ["a"]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "a"}\n{"text": "b"}')))
    inputs = find_inputs(["-"])
    assert total_bytes(inputs) is None
    chunks = list(read_chunks(inputs, Selection()))
    assert [text for chunk in chunks for text in chunk.parse().require_texts()] == ["a", "b"]
    assert sum(chunk.disk_bytes for chunk in chunks) == 27


def test_broken_and_empty_places_are_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": " "}\nbroken\n\n{"text": "b"}\n{"text": 3}\n')
    parsed = next(read_chunks(find_inputs([path]), Selection())).parse()
    assert parsed.texts == ["a", "b"]
    assert parsed.empty_locations == [f"{path}:2"]
    assert [problem.split("`")[1] for problem in parsed.errors] == [f"{path}:3", f"{path}:6"]


ROWS = [
    ("one, with a comma", "a"),
    ('two\nlines, and "quotes"', "b"),
    ("vertical\x0b and \u2028 too", "c"),
    ("é" * 90, "d"),
]


@pytest.mark.parametrize("block", [64, 1 << 22])
@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".csv", ".tsv", ".json"])
def test_tables_and_arrays_give_every_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, packed: str, block: int
) -> None:
    path = tmp_path / f"table{kind}"
    if kind == ".json":
        path.write_bytes(orjson.dumps([{"id": name, "body": text} for text, name in ROWS]))
    else:
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            csv.writer(file, delimiter="\t" if kind == ".tsv" else ",").writerows([("body", "id"), *ROWS])
    for module in (compression, sources):
        monkeypatch.setattr(module, "BLOCK_BYTES", block)
    path = pack(path, packed)
    assert read(path, ("text", "body")) == [text for text, _ in ROWS]
    chunks = read_chunks(find_inputs([path]), Selection("body", keep=(("id", "b"),)))
    assert [text for chunk in chunks for text in chunk.parse().require_texts()] == [ROWS[1][0]]
    assert sum(chunk.disk_bytes for chunk in read_chunks(find_inputs([path]), Selection("body"))) == path.stat().st_size


def test_an_array_may_hold_strings_and_a_json_file_lines(tmp_path: Path) -> None:
    (tmp_path / "strings.json").write_text('["one", "two"]')
    (tmp_path / "lines.json").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert read(tmp_path / "strings.json") == read(tmp_path / "lines.json") == ["one", "two"]
    (tmp_path / "mixed.json").write_text('["one", 2]')
    with pytest.raises(DataError, match=r"mixed\.json:2` must have the key `text`"):
        read(tmp_path / "mixed.json")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a,b\n1,2\n", r"must have a column for 'text', but has a, b; see --text-key\."),
        (b"", "must have a column for 'text', but has none;"),
        (b'text,n\na,1\n\n"b,2\nc,3\n', r"is not \(the quotes that begin in line 4 do not end\)"),
        (b"text\n" + b"a" * 300, r"is not \(line 2 is longer than 1 GiB\)"),
        (b"text\n\xff\n", "must be a table in UTF-8 text, but is not"),
        (b"a,text\n1\n", r"t\.csv:1` must have a string in `text`, but has NoneType"),
    ],
)
def test_a_table_without_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, says: str
) -> None:
    monkeypatch.setattr(sources, "MAX_TEXT_BYTES", 200)
    for module in (compression, sources):
        monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(DataError, match=says):
        read(tmp_path / "t.csv")


def test_a_path_of_other_bytes_than_utf_8_is_told(tmp_path: Path) -> None:
    """Descriptions of datasets and manifests could not name it."""
    path = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    path.write_text('{"text": "a"}\n' * 1000)
    (tmp_path / "té.txt").write_text("fine " * 3000)
    for pattern in (path, tmp_path, tmp_path / "*"):
        with pytest.raises(DataError, match="must have a path in UTF-8, but has not; rename it"):
            find_inputs(pattern)
    lines = "".join(survey(tmp_path).lines()).encode().decode()
    assert "caf\\udce9.jsonl must have a path in UTF-8" in lines


def test_a_file_of_json_lines_is_not_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_TEXT_BYTES", 100)
    (tmp_path / "lines.json").write_bytes(b'\xef\xbb\xbf\n{"text": "a"}\n{"text": "b"}\n' + b'{"text": "c"}\n' * 20)
    assert read(tmp_path / "lines.json") == ["a", "b", *"c" * 20]
    (tmp_path / "object.json").write_bytes(b'{\n"text":\n"a"}')
    assert read(tmp_path / "object.json") == ["a"]
    (tmp_path / "array.json").write_bytes(orjson.dumps([{"text": "a"}] * 20))
    with pytest.raises(DataError, match=r"as a \.json file is read at once"):
        read(tmp_path / "array.json")


def test_a_folder_is_what_can_be_read_in_it(tmp_path: Path) -> None:
    for name in ("b/c/m.txt", "a.md", "z.jsonl", ".git/no.txt", "b/.no.txt", "photo.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "one"}')
    assert [str(item.path.relative_to(tmp_path)) for item in find_inputs(tmp_path)] == ["a.md", "z.jsonl", "b/c/m.txt"]
    assert files_below(tmp_path)[1] == [tmp_path / "photo.jpg"]
    (tmp_path / "z-again.jsonl").symlink_to(tmp_path / "z.jsonl")  # documents held out would be trained on
    (tmp_path / "d").symlink_to(tmp_path / "b")
    (tmp_path / "a-link").symlink_to(tmp_path / "a.md")
    assert [item.name for item in find_inputs(tmp_path)] == ["a", "z-again", "m"]
    assert [item.name for item in find_inputs(tmp_path / "*.jsonl")] == ["z-again", "z"]  # as they are named
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"must hold files that end in one of \.jsonl, .*, but holds none"):
        find_inputs(empty)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n\r\n", b"\n\n"])
def test_blank_lines_of_a_table_are_no_rows(tmp_path: Path, end: bytes) -> None:
    (tmp_path / "t.csv").write_bytes(b'\n\ntext,n\n\na,1\n"b\n\n",2' + end)
    assert read(tmp_path / "t.csv") == ["a", "b\n\n"]
