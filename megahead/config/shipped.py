"""Finds config files by name; the last place to look is the `configs/` that ships with megahead."""

from __future__ import annotations

from pathlib import Path


def shipped_folder() -> Path:
    """`configs/`: inside of an installed package, beside the package in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def shipped_configs() -> list[str]:
    """Names of the configs that ship, such as `demo-headless`."""
    return sorted(path.stem for path in shipped_folder().glob("*.yaml"))


def may_be_shipped(path: Path) -> bool:
    """Whether `path` could mean a shipped config: `demo-headless` or `configs/demo-headless.yaml`."""
    return path.parent in (Path(), Path("configs"))


def find_config(path: Path) -> Path:
    """The file `path`, or if there is none, the shipped config of that name."""
    bare = path.name.removesuffix(".yaml")
    if may_be_shipped(path) and not path.is_file() and bare in shipped_configs():
        return shipped_folder() / f"{bare}.yaml"
    return path


def find_named(name: str, by: Path | None = None) -> Path:
    """The file that the config file `by` calls `name`, or `name` itself if there is none.

    Looks for it from the working directory, then from the folder of `by` and those above it, then in the shipped
    `configs/`.
    """
    path = Path(name)
    above = [] if by is None else by.absolute().parents
    places = [path, *(folder / path for folder in above), shipped_folder() / _within_configs(path)]
    return next((place for place in places if place.is_file()), path)


def _within_configs(path: Path) -> Path:
    return Path(*path.parts[1:]) if path.parts[:1] == ("configs",) else path
