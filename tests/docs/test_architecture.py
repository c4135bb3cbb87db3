"""The list of packages in docs/architecture.md has all, in the order in which import-linter lets imports flow."""

from __future__ import annotations

import re
import tomllib

from support.commands import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text()
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())


def listed() -> list[str]:
    """Packages and modules of the page's list, from its top."""
    (block,) = re.findall(r"^## Packages\n.*?^```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [name for line in block.splitlines() for name in re.findall(r"(?:^| )(\w+)(?:/|\.py)(?= |$)", line)]


def test_the_page_lists_every_package_and_module_once() -> None:
    inside = (ROOT / "megahead").iterdir()
    modules = {path.stem for path in inside if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert sorted(listed()) == sorted(modules - {"__init__"})


def test_imports_flow_down_the_page() -> None:
    """No package stands above one that may import it."""
    (contract,) = [c for c in SETTINGS["tool"]["importlinter"]["contracts"] if c["type"] == "layers"]
    layers = {name: depth for depth, layer in enumerate(contract["layers"]) for name in layer.split(" | ")}
    depths = [layers[name] for name in listed()]
    assert depths == sorted(depths)


def test_files_of_the_page_exist() -> None:
    files = re.findall(r"`(\w+/\w+\.py)`", PAGE)
    assert len(files) > 10
    assert not [path for path in files if not (ROOT / "megahead" / path).is_file()]
