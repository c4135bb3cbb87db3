"""Finds files by the names that configs and people give them, the last place being what ships with megahead."""

from __future__ import annotations

from pathlib import Path


def shipped_folder() -> Path:
    """`configs/`: within the package where that is installed, beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def shipped_configs() -> list[str]:
    """Names of the configs that ship, such as `demo-headless`."""
    return sorted(path.stem for path in shipped_folder().glob("*.yaml"))


def may_be_shipped(path: Path) -> bool:
    """Whether `path` is what a shipped config may be called: `demo-headless`, `configs/demo-headless.yaml`."""
    return path.parent in (Path(), Path("configs"))


def find_config(path: Path) -> Path:
    """The file `path`; where there is none, the shipped config of that name."""
    bare = path.name.removesuffix(".yaml")
    if may_be_shipped(path) and not path.is_file() and bare in shipped_configs():
        return shipped_folder() / f"{bare}.yaml"
    return path


def find_named(name: str, by: Path | None = None) -> Path:
    """The file that a config calls `name`; `name` itself where there is none.

    From the working directory, else from the folder of that config (`by`) or one above it, else among what ships, which
    calls its own folder `configs`.
    """
    path = Path(name)
    above = [] if by is None else by.absolute().parents
    places = [path, *(folder / path for folder in above), shipped_folder() / _within_configs(path)]
    return next((place for place in places if place.is_file()), path)


def _within_configs(path: Path) -> Path:
    return Path(*path.parts[1:]) if path.parts[:1] == ("configs",) else path
