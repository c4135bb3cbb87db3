"""A dataset of the Hub gives what its files give, goes on at its commit, and says what it lacks."""

from __future__ import annotations

import hashlib
import json
import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

import datasets.config
import huggingface_hub.constants
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megahead.commands import preprocess as preprocess_command
from megahead.data import shards
from megahead.data.indexed import IndexedDataset
from megahead.data.preprocess import Recipe, preprocess
from megahead.data.records import HubSplit, Selection
from megahead.data.shards import preprocess_shards
from megahead.data.sources import find_inputs
from megahead.errors import DataError, FieldError

NAME = "someone/tales"
URL = f"hf://datasets/{NAME}/plain?split=train"
README = '---\nconfigs:\n- config_name: {0}\n  data_files: [{{split: train, path: "{0}/*"}}]\n---\n'


@dataclass
class Hub:
    """The Hub's answers for one dataset, as its documented endpoints give them."""

    files: dict[str, bytes] = field(default_factory=dict)
    commit: str = "1" * 40
    requests: list[str] = field(default_factory=list)
    is_gated: bool = False

    def entries(self) -> list[dict[str, Any]]:
        folders = {name.rpartition("/")[0] for name in self.files} - {""}
        files = [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in self.files.items()
        ]
        return [*files, *({"type": "directory", "path": folder, "oid": "0" * 40} for folder in folders)]

    def answer(self, path: str, body: bytes) -> Any:
        """A JSON value, bytes of a file, or None: there is nothing."""
        self.requests.append(path)
        if path.startswith(f"/datasets/{NAME}/resolve/"):
            return self.files.get(path.split("/", 6)[-1])
        if not (path + "/").startswith(f"/api/datasets/{NAME}/"):
            return None
        if "/tree/" in path:
            folder = path.partition(f"/tree/{self.commit}")[2].strip("/")
            return [entry for entry in self.entries() if entry["path"].rpartition("/")[0] == folder]
        if "/paths-info/" in path:
            return [entry for entry in self.entries() if entry["path"] in json.loads(body)["paths"]]
        siblings = [{"rfilename": name} for name in self.files]
        return {"id": NAME, "sha": self.commit, "private": False, "gated": self.is_gated, "siblings": siblings}


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def reply(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = unquote(self.path.partition("?")[0])
        found = self.hub.answer(path, body)
        is_gated = self.hub.is_gated and "/resolve/" in path
        content = found if isinstance(found, bytes) else json.dumps(found).encode()
        status = 403 if is_gated else 404 if found is None else 200
        start, end = 0, len(content)
        if (requested := self.headers.get("range")) and status == 200:
            first, _, last = requested.removeprefix("bytes=").partition("-")
            start, end, status = int(first), min(int(last or end) + 1, end), 206
        self.send_response(status)
        if status >= 400:
            missing = "EntryNotFound" if NAME in path else "RepoNotFound"
            self.send_header("x-error-code", "GatedRepo" if is_gated else missing)
        if status == 206:
            self.send_header("content-range", f"bytes {start}-{end - 1}/{len(content)}")
        self.send_header("etag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("x-repo-commit", self.hub.commit)
        self.send_header("accept-ranges", "bytes")
        self.send_header("content-length", str(end - start))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[start:end])

    do_GET = do_POST = do_HEAD = reply

    def log_message(self, format: str, *arguments: object) -> None: ...


def texts(shard: int) -> list[str]:
    return [f"The cat number {i} of house {shard} had tea.\n" for i in range(150)]


def published_files(config: str) -> dict[str, bytes]:
    """A repository with one config, whose split has three files: of Parquet if it is `plain`, else of JSON lines."""
    files = {"README.md": README.format(config).encode()}
    for shard in range(3):
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"url": ["x"] * 150, "text": texts(shard)}), sink)
        lines = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts(shard)).encode()
        content = sink.getvalue().to_pybytes() if config == "plain" else zstandard.compress(lines)
        files[f"{config}/{shard}.{'parquet' if config == 'plain' else 'jsonl.zst'}"] = content
    return files


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    hub = Hub(published_files("plain"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OfHub", (Handler,), {"hub": hub}))
    Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", endpoint)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets-cache")
    yield hub
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("config", ["plain", "lines"])
def test_a_split_gives_what_its_files_give(config: str, hub: Hub, tokenizer_path: Path, tmp_path: Path) -> None:
    hub.files, files = published_files(config), list[Path]()
    for name, content in list(hub.files.items())[1:]:
        files.append(tmp_path / Path(name).name)
        files[-1].write_bytes(content)
    preprocess(files, tokenizer_path, tmp_path / "files", holdout=10)
    url = f"hf://datasets/{NAME}/{config}?split=train"
    report = preprocess(url, tokenizer_path, tmp_path / "hub", holdout=10)
    assert (report.documents, report.held_out) == (450, 45)
    info = IndexedDataset(tmp_path / "hub").info
    assert info is not None
    assert info.source == f"{url}&revision={hub.commit}"
    for part in (".bin", ".idx", "-validation.bin"):
        assert (tmp_path / f"hub{part}").read_bytes() == (tmp_path / f"files{part}").read_bytes()


def test_what_is_read_of_a_file_is_freed(hub: Hub) -> None:
    texts, sink = [random.Random(i).randbytes(1 << 13).hex() for i in range(4096)], pa.BufferOutputStream()
    pq.write_table(pa.table({"text": texts}), sink, row_group_size=64)
    hub.files["plain/0.parquet"] = sink.getvalue().to_pybytes()
    del sink
    (first, *_) = find_inputs(URL)
    tracemalloc.start()  # the buffers of a file that Python reads are Python's
    try:
        for _ in first.chunks(Selection()):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    size = len(hub.files["plain/0.parquet"])
    assert peak < size / 2


def test_a_stopped_run_continues_at_its_commit(
    hub: Hub, tokenizer_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, made, write = Recipe(tokenizer=tokenizer_path), list[str](), shards.write_dataset

    def write_one(chunks: Any, recipe: Recipe, output: Path, *rest: Any) -> Any:
        if len(made) == 1:
            raise KeyboardInterrupt
        made.append(output.name)
        return write(chunks, recipe, output, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(shards, "write_dataset", write_one)
        with pytest.raises(KeyboardInterrupt):
            preprocess_shards([URL], recipe, tmp_path / "out")
    hub.requests.clear()  # somebody pushes, of which the second run must not hear
    argv = ["preprocess", "--input", URL, "--tokenizer", str(tokenizer_path), "--output", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", [*argv, "--per-file"])
    preprocess_command.main()
    assert f"/api/datasets/{NAME}" not in hub.requests  # it would answer with the newest commit
    assert made == ["tales-plain-train-00000-of-00003"]
    manifest = orjson.loads((tmp_path / "out/manifest.json").read_bytes())
    assert manifest["pinned_urls"] == {URL: f"{URL}&revision={'1' * 40}"}
    assert [shard["input"]["path"] for shard in manifest["shards"].values()] == [
        f"{URL}&revision={'1' * 40}#{number}-of-3" for number in (1, 2, 3)
    ]
    assert all(len(IndexedDataset(tmp_path / "out" / name)) == 150 for name in manifest["shards"])


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        (f"hf://datasets/{NAME}/plain?split=dev", r"Available splits: .*train.*; name one of these as \?split="),
        (f"hf://datasets/{NAME}/fancy?split=train", r"must be a dataset .*fancy.*; name one as OWNER/NAME/CONFIG"),
        ("hf://datasets/someone/nothing?split=train", r"must be a dataset that the Hub gives.*check the name"),
    ],
)
def test_what_the_hub_lacks_is_one_sentence(url: str, sentence: str, hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=sentence) as caught:
        preprocess(url, tmp_path / "tokenizer.json", tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_a_missing_column_and_a_gated_dataset_are_named(
    hub: Hub, tokenizer_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"tales/plain.* must have a column for 'body', but has url, text"):
        preprocess(URL, tokenizer_path, tmp_path / "out", selection=Selection("body"))
    hub.is_gated = True
    with pytest.raises(DataError, match="accept its terms"):
        preprocess(f"hf://datasets/{NAME}?split=train&revision={'3' * 40}", tokenizer_path, tmp_path / "out")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="unset HF_HUB_OFFLINE"):
        preprocess(URL, tokenizer_path, tmp_path / "out")


@pytest.mark.parametrize("name", ["squad", "a/b", "a/b/c"])
def test_a_url_reads_back_as_it_is_written(name: str) -> None:
    """Also the name of a dataset without an owner."""
    url = f"hf://datasets/{name}?split=train&revision=main"
    assert HubSplit.parse(url).url == url


@pytest.mark.parametrize("url", ["hf://datasets/a/b", "hf://datasets/a/b/c/d?split=x", "hf://datasets/a?split=x&x=1"])
def test_another_form_of_url_is_refused(url: str) -> None:
    with pytest.raises(FieldError, match="must be hf://datasets/OWNER/NAME"):
        HubSplit.parse(url)
