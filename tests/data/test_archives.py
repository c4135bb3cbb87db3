"""Archives of text, and lm_dataformat's files, give what their texts give as JSON lines."""

from __future__ import annotations

import gzip
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from megahead.data.records import LineSelection, Selection
from megahead.data.sources import find_inputs, read_chunks
from megahead.errors import DataError

TEXTS = ["A cat had tea.\nThen it slept.", "Zwei Katzen: größer", "", "three"]


def texts_of(path: Path, selection: Selection = Selection()) -> list[str]:  # noqa: B008 # frozen
    return [text for chunk in read_chunks(find_inputs(path), selection) for text in chunk.parse().require_texts()]


def test_lines_may_be_the_texts_of_an_archive_too(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "texts.zip", "w") as archive:
        archive.writestr("a.txt", "one\ntwo\n")
        archive.writestr("b.jsonl", json.dumps({"text": "three"}))
    assert texts_of(tmp_path / "texts.zip", LineSelection()) == ["one", "two", "three"]


@pytest.fixture
def members(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "members"
    folder.mkdir()
    for index in range(2):
        lines = "".join(json.dumps({"text": f"{index}: {text}"}) + "\n" for text in TEXTS)
        (folder / f"data_{index}.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    (folder / "README").write_text("no text of a model")
    (folder / "last.txt").write_text("one document")
    return [folder / name for name in ("data_0.jsonl.zst", "README", "data_1.jsonl.zst", "last.txt")]


@pytest.mark.parametrize("name", ["all.tar", "all.tar.gz", "all.jsonl.zst.tar", "all.zip"])
def test_an_archive_is_its_members_in_order(name: str, members: list[Path], tmp_path: Path) -> None:
    archive = tmp_path / name
    if name.endswith(".zip"):
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
            for member in members:
                zipped.write(member, f"inside/{member.name}")
    else:
        with tarfile.open(archive, "w:gz" if name.endswith("gz") else "w") as tar:
            for member in members:
                tar.add(member, f"inside/{member.name}")
    texts = [text for member in members if member.name != "README" for text in texts_of(member)]
    assert texts_of(archive) == texts
    assert len(texts) == 9
    chunks = read_chunks(find_inputs(archive), Selection())
    assert 0 < sum(chunk.disk_bytes for chunk in chunks) <= archive.stat().st_size
    archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 3])
    with pytest.raises(DataError, match=f"{name}` must "):
        texts_of(archive)


@pytest.fixture
def tar(members: list[Path], tmp_path: Path) -> tuple[bytes, int]:
    """An archive, and where the header of its second member begins."""
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        for member in members:
            tar.add(member, member.name)
    with tarfile.open(tmp_path / "all.tar") as tar:
        return (tmp_path / "all.tar").read_bytes(), tar.getmembers()[1].offset


@pytest.mark.parametrize(
    "damage",
    [
        lambda content, second: content[:second],
        lambda content, second: content[: second + 100],
        lambda content, second: content[:second] + b"?" + content[second + 1 :],
        lambda content, second: content[:second] + bytes(512) + content[second + 512 :],
        lambda content, second: content + content,
    ],
    ids=["cut between members", "cut in a header", "damaged header", "header of zeros", "two archives"],
)
def test_a_tar_that_is_not_whole_is_refused(
    damage: Callable[[bytes, int], bytes], tar: tuple[bytes, int], tmp_path: Path
) -> None:
    for name, pack in (("all.tar", bytes), ("all.tar.gz", gzip.compress)):
        (tmp_path / name).write_bytes(pack(damage(*tar)))
        with pytest.raises(DataError, match=f"{name}` must be readable to its end"):
            texts_of(tmp_path / name)


def test_the_parts_of_a_gzip_file_are_one_archive_and_its_checksum_counts(
    tar: tuple[bytes, int], tmp_path: Path
) -> None:
    content, second = tar
    packed = gzip.compress(content[:second]) + gzip.compress(content[second:])
    (tmp_path / "all.tgz").write_bytes(packed)
    assert len(texts_of(tmp_path / "all.tgz")) == 9
    (tmp_path / "all.tgz").write_bytes(packed[:-4])
    with pytest.raises(DataError, match="must be readable to its end"):
        texts_of(tmp_path / "all.tgz")


def test_hidden_folders_of_an_archive_are_ignored_and_errors_name_its_members(tmp_path: Path) -> None:
    (tmp_path / "a.tsv.csv").write_text("text,id\n1\t2,3\n")
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        for name in ("./a.tsv.csv", ".git/a.csv", "sub/.cache/a.csv"):
            tar.add(tmp_path / "a.tsv.csv", name)
    assert texts_of(tmp_path / "all.tar") == ["1\t2"]
    (tmp_path / "bad.csv").write_bytes(b"text\n\xff\n")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.write(tmp_path / "bad.csv", "sub/bad.csv")
    with pytest.raises(DataError, match=r"all\.zip/sub/bad\.csv` must be a table in UTF-8"):
        texts_of(tmp_path / "all.zip")


def test_names_that_are_not_utf8_are_escaped_or_refused(tmp_path: Path) -> None:
    (tmp_path / "blank.txt").touch()
    with tarfile.open(tmp_path / "all.tar", "w", encoding="latin-1", format=tarfile.GNU_FORMAT) as tar:
        tar.add(tmp_path / "blank.txt", "café.txt")
    (chunk,) = read_chunks(find_inputs(tmp_path / "all.tar"), Selection())
    assert chunk.parse().empty_locations == [rf"{tmp_path}/all.tar/caf\xe9.txt"]
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("é.txt", "text")
    (tmp_path / "all.zip").write_bytes((tmp_path / "all.zip").read_bytes().replace("é".encode(), b"\xe9a"))
    with pytest.raises(DataError, match=r"all\.zip` must be readable to its end"):
        texts_of(tmp_path / "all.zip")


def test_a_folder_ignores_archives_as_other_unknown_files(members: list[Path]) -> None:
    (members[0].parent / "images.zip").write_bytes(b"")
    assert "images.zip" not in [item.path.name for item in find_inputs(members[0].parent)]


def test_an_archive_without_text_is_refused(members: list[Path], tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        tar.add(members[1], "README")
    with pytest.raises(DataError, match=r"all\.tar` must hold visible files that end in one of"):
        texts_of(tmp_path / "all.tar")


@pytest.mark.parametrize("block", [64, 4 << 20])
def test_lengths_of_lm_dataformat_delimit_texts(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("compression", "sources"):
        monkeypatch.setattr(f"megahead.data.{module}.BLOCK_BYTES", block)
    encoded = [text.encode() for text in TEXTS]
    content = b"".join(b"%016d" % len(text) + text for text in encoded)
    file = tmp_path / "data_0_time1_default.dat.zst"
    file.write_bytes(zstandard.compress(content))
    assert texts_of(file) == [text for text in TEXTS if text]
    for broken, rule in (
        (content[:-1], "must have as many bytes"),
        (b"no length at all", "must begin with 16 digits"),
        (b"9" * 16, "must be shorter"),
    ):
        file.write_bytes(zstandard.compress(broken))
        with pytest.raises(DataError, match=rf"dat\.zst:\d` {rule}"):
            texts_of(file)
