"""What `make dist` builds has all that is shipped; what the project says of itself to PyPI and GitHub holds."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import yaml

from megahead import __version__
from megahead.commands import COMMANDS
from support.commands import ROOT
from support.installed import copied_sources, succeed

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def shipped() -> set[str]:
    """The files of the package and of the configs, as they lie in an installation."""
    files = [
        *(ROOT / "megahead").rglob("*.py"),
        ROOT / "megahead/py.typed",
        *(ROOT / "megahead/report/template").iterdir(),
        *(ROOT / "configs").rglob("*.yaml"),
        *(ROOT / "configs").rglob("*.json"),
    ]
    return {str(path.relative_to(ROOT)).replace("configs/", "megahead/configs/", 1) for path in files}


@pytest.mark.slow
def test_the_sdist_and_the_wheel_that_is_made_of_it_have_all_that_is_shipped(tmp_path: Path) -> None:
    source, built = copied_sources(tmp_path), tmp_path / "dist"
    succeed(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built), str(source))
    name = f"megahead-{__version__}"
    with tarfile.open(built / f"{name}.tar.gz") as archive:
        in_sdist = {member.name.removeprefix(f"{name}/") for member in archive if member.isfile()}
    sources = {path.replace("megahead/configs/", "configs/", 1) for path in shipped()}
    assert sources | {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= in_sdist
    with zipfile.ZipFile(built / f"{name}-py3-none-any.whl") as wheel:
        in_wheel = {path for path in wheel.namelist() if not path.startswith(f"{name}.dist-info/")}
        about = message_from_string(wheel.read(f"{name}.dist-info/METADATA").decode())
        assert wheel.read(f"{name}.dist-info/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert in_wheel == shipped()
    assert (about["License-Expression"], about["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert about["Description-Content-Type"] == "text/markdown"
    assert about.get_payload() == (ROOT / "README.md").read_text()


def test_make_dist_clears_what_was_built_before_and_git_ignores_it() -> None:
    done = subprocess.run(["make", "-n", "dist", "ARGS=--wheel"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["rm -rf dist", ".venv/bin/python -m build --wheel"]
    assert "/dist" in (ROOT / ".gitignore").read_text().splitlines()


def test_versions_are_one_and_classifiers_name_those_that_are_accepted() -> None:
    assert PROJECT["version"] == __version__
    sections = re.findall(r"^## ([\w.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[sections[0] == "Unreleased"] == __version__
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert named == ["3.11", "3.12", "3.13"]
    assert PROJECT["requires-python"] == f">={named[0]}"
    assert not [name for name in PROJECT["classifiers"] if name.startswith("License")]  # PEP 639: `license` says it


def test_the_citation_has_the_software_and_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= {*citation}  # what Citation File Format 1.2 asks for
    assert (citation["type"], citation["version"], citation["license"]) == ("software", __version__, PROJECT["license"])
    (paper,) = citation["references"]
    assert {"type", "title", "authors", "year", "url"} <= {*paper}
    names = [author["family-names"] for author in paper["authors"]]
    assert (names, paper["year"]) == (["Godey", "Clergerie", "Sagot"], 2024)
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"*{paper['title']}*" in readme
    assert paper["url"] == PROJECT["urls"]["Paper"]
    assert paper["url"] in readme


FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_one_that_github_shows(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= {*form} <= {"name", "description", "title", "labels", "body"}
    kinds = {field["type"] for field in form["body"]}
    assert kinds <= {"checkboxes", "dropdown", "input", "markdown", "textarea"}
    assert kinds != {"markdown"}
    asked = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in asked)
    assert len({field["id"] for field in asked}) == len(asked)
    commands = set(re.findall(r"`megahead (?!-)([\w-]+)", path.read_text()))
    assert commands <= {name.replace("_", "-") for group in COMMANDS.values() for name in group}


def test_there_are_forms_and_a_way_to_report_in_private() -> None:
    assert len(FORMS) == 2
    assert "Report a vulnerability" in (ROOT / ".github/SECURITY.md").read_text()


def test_the_workflow_calls_make_test_on_every_version_that_is_accepted() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    assert {*workflow[True]} == {"push", "pull_request"}  # YAML 1.1 reads `on` as true
    (job,) = workflow["jobs"].values()
    assert job["strategy"]["matrix"]["python"] == re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    (step,) = [step for step in job["steps"] if "run" in step]
    assert step["run"] == "make test"
    assert {*step["env"]} == {"TORCH_INDEX"}
    assert "TORCH_INDEX ?=" in (ROOT / "Makefile").read_text()  # the environment's is taken
