"""Preprocesses many input files into one dataset (*shard*) each, in a folder with a manifest; resumes a killed run.

    FOLDER/manifest.json    the recipe; for each finished shard its report, and the size and time of its input; for each
                            dataset of the Hub the commit that is read
    FOLDER/NAME.bin .idx .json    (and NAME-validation.*) of the input file NAME.jsonl.zst

A shard is written under temporary names, renamed, and then recorded in the manifest. Shards that the manifest does not
list are made again: at most one shard's work is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from megahead.data.compression import STANDARD_INPUT
from megahead.data.indexed import IndexedDataset
from megahead.data.preprocess import END_TOKEN, PreprocessReport, Recipe, encoding_pool, write_dataset
from megahead.data.records import is_hub_url
from megahead.data.sources import Input, find_inputs, pin_hub_revisions, total_bytes
from megahead.data.tokenizer import load_tokenizer
from megahead.data.writer import NO_PROGRESS, ProgressBar
from megahead.errors import DataError
from megahead.files import AtomicFile, sha256_of, write_atomically

FORMAT = "megahead-shards/1"
MANIFEST = "manifest.json"


def preprocess_shards(
    inputs: Sequence[str | Path],
    recipe: Recipe,
    folder: str | Path,
    *,
    workers: int = 1,
    progress: ProgressBar = NO_PROGRESS,
) -> PreprocessReport:
    """Writes one dataset per input file to `folder`; skips shards that its manifest lists as finished.

    Returns the report of all shards together, those of earlier runs included. InUseError if another process writes to
    `folder`. DataError if it was begun with another recipe, or if two inputs would write the same files.
    """
    folder = Path(folder)
    known_urls = ShardManifest.open(folder, recipe).pinned_urls  # an unfinished folder stays at its first commit
    urls = [str(item) for item in inputs if is_hub_url(str(item))]
    pinned_urls = {url: known_urls.get(url) or str(pin_hub_revisions(url)[0]) for url in urls}
    shards = _find_shards([pinned_urls.get(str(item), item) for item in inputs], recipe)
    for shard in shards:
        recipe.require_distinct_names(folder / shard.name, shard.files)
    lock = AtomicFile(folder / "in-use")
    try:
        manifest = ShardManifest.open(folder, recipe)
        manifest.pinned_urls.update(pinned_urls)
        total = PreprocessReport()
        progress.start(total_bytes(shards))
        with encoding_pool(workers) as encode:
            for shard in shards:
                report = manifest.report(shard, recipe)
                if report is None:
                    chunks, source = shard.chunks(recipe.selection), shard.url or shard.path.name
                    report = write_dataset(chunks, recipe, folder / shard.name, encode, progress, source)
                    manifest.record(shard, report)
                else:
                    report.require_documents(folder / shard.name, recipe)
                    progress.advance(shard.bytes, report.text_bytes)
                total.add(report)
    finally:
        lock.discard()
    return total


@dataclass(frozen=True)
class ShardManifest:
    """The finished shards of a folder, and their recipe."""

    folder: Path
    recipe: dict[str, Any]
    shards: dict[str, Any]
    pinned_urls: dict[str, str] = field(default_factory=dict)
    """For the URL of each dataset of the Hub, the URL of the commit that is read."""

    @staticmethod
    def open(folder: Path, recipe: Recipe) -> ShardManifest:
        """The manifest in `folder`, or a new one; DataError if it has another recipe."""
        recipe_json, path = _recipe_as_json(recipe), folder / MANIFEST
        if not path.exists():
            return ShardManifest(folder, recipe_json, {})
        try:
            content = orjson.loads(path.read_bytes())
            if content["format"] != FORMAT:
                raise ValueError("another format")
            saved_recipe, shards, pinned_urls = content["recipe"], content["shards"], content.get("pinned_urls", {})
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"`{path}` must be a manifest of shards ({FORMAT}), but is not ({error}).") from None
        differing = [name for name in (*recipe_json, "tail") if recipe_json.get(name) != saved_recipe.get(name)]
        if differing:
            raise DataError(
                f"`{folder}` must have been begun with the same settings, but differs in {', '.join(differing)}; "
                "give another folder, or remove this one."
            )
        return ShardManifest(folder, recipe_json, shards, pinned_urls)

    def report(self, shard: Input, recipe: Recipe) -> PreprocessReport | None:
        """The report of a finished shard; None if it must be made (again): it is not listed, its input has changed, its
        files are incomplete, or its texts spell end tokens, which the recipe now refuses."""
        entry = self.shards.get(shard.name)
        if entry is None or entry["input"] != _fingerprint(shard):
            return None
        if entry["report"].get("end_inside") and recipe.end_inside == "fail":
            return None
        try:
            for name in recipe.outputs(shard.name):
                if IndexedDataset(self.folder / name).info is None:  # PREFIX.json is missing: it is incomplete
                    return None
        except DataError:
            return None
        return PreprocessReport(**entry["report"])

    def record(self, shard: Input, report: PreprocessReport) -> None:
        """Lists a shard as finished; on disk when this returns."""
        self.shards[shard.name] = {"input": _fingerprint(shard), "report": asdict(report)}
        content: dict[str, Any] = {"format": FORMAT, "recipe": self.recipe, "shards": self.shards}
        content |= {"pinned_urls": self.pinned_urls} if self.pinned_urls else {}
        write_atomically(self.folder / MANIFEST, orjson.dumps(content, option=orjson.OPT_INDENT_2))


def _find_shards(inputs: Sequence[str | Path], recipe: Recipe) -> list[Input]:
    shards = find_inputs(inputs)
    owner_by_name: dict[str, str] = {Path(MANIFEST).stem: "the list of shards"}
    for shard in shards:
        if shard.path == STANDARD_INPUT:
            raise DataError("with one dataset per input every input must be a file, but `-` is standard input.")
        for name in recipe.outputs(shard.name):
            if name in owner_by_name:
                raise DataError(
                    f"with one dataset per input, input names must differ, but {owner_by_name[name]} and "
                    f"`{shard.path}` would both write {name}; preprocess them into different output folders."
                )
            owner_by_name[name] = f"`{shard.path}`"
    return shards


def _fingerprint(shard: Input) -> dict[str, Any]:
    changed = max((file.stat().st_mtime_ns for file in shard.files), default=0)
    return {"path": shard.url or str(shard.path), "bytes": shard.bytes, "changed": changed}


def _recipe_as_json(recipe: Recipe) -> dict[str, Any]:
    """The recipe as JSON values, with the tokenizer's SHA-256 in place of its path."""
    selection = orjson.loads(orjson.dumps(asdict(recipe.selection)))
    if len(selection["text_key"]) == 1:
        (selection["text_key"],) = selection["text_key"]  # as in the manifests of earlier versions
    return {
        "tokenizer": sha256_of(load_tokenizer(recipe.tokenizer).path),
        "selection": selection,
        "end_token": recipe.end_token or END_TOKEN,
        "holdout": None if recipe.holdout is None else str(recipe.holdout),
        **({} if recipe.holdout_tail is None else {"tail": str(recipe.holdout_tail)}),
        "on_error": recipe.on_error,
    }
