"""Files for contributors and machines name what exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml

from megahead.commands import COMMANDS
from support.commands import ROOT

TOOLS = ROOT / "tools"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
EXTENDING = (ROOT / "docs/extending.md").read_text()


def test_contributing_names_files_that_exist() -> None:
    paths = re.findall(r"`((?:megahead|tests|tools|docs)/[\w/]+(?:\.(?:py|md))?)[ `]", CONTRIBUTING)
    assert len(paths) > 20
    assert not [path for path in paths if "NAME" not in path and not (ROOT / path).exists()]


def test_contributing_names_parts_that_stand_where_it_says() -> None:
    """A name in backticks, and the file that the same step names."""
    named = {
        "NAMED_SIZES": "config/model.py",
        "FAMILY_DEFAULTS": "config/model.py",
        "FAMILY_FIXED": "config/model.py",
        "Backbone": "models/backbone.py",
        "encode": "models/backbone.py",
        "encode_at": "models/backbone.py",
        "initial_hidden": "models/backbone.py",
        "block_arguments": "models/backbone.py",
        "Documents": "models/documents.py",
        "SHARDING": "models/families.py",
        "_BACKBONES": "models/families.py",
        "Family": "hf/families.py",
        "compute_biases": "losses/candidates.py",
        "Objective": "losses/contrastive.py",
        "Candidates": "losses/candidates.py",
        "CandidateShard": "losses/softmax.py",
        "build_objective": "losses/contrastive.py",
        "training_free_bias": "losses/candidates.py",
        "ObjectiveConfig.head": "config/objective.py",
        "starts": "data/strategy.py",
        "STRATEGIES": "data/strategies.py",
        "TrainingText": "data/strategy.py",
        "SCORES": "losses/scores.py",
        "Score": "losses/scores.py",
        "COMMANDS": "commands/__init__.py",
    }
    for name, path in named.items():
        assert f"`{name}`" in CONTRIBUTING + EXTENDING, name
        source, bare = (ROOT / "megahead" / path).read_text(), name.split(".")[-1]
        assert re.search(rf"^\s*(def|class) {bare}\b|^{bare}\b.* = ", source, re.MULTILINE), f"{name} in {path}"


def test_pages_list_every_command_once() -> None:
    """The quickstart has those of `megahead` in their groups and order, CONTRIBUTING those that only a checkout has."""
    quickstart = (ROOT / "docs/quickstart.md").read_text()
    assert listed(quickstart, "megahead NAME") == {
        group: [name.replace("_", "-") for name in commands] for group, commands in COMMANDS.items()
    }
    others = [name for names in listed(CONTRIBUTING, "python tools/NAME.py").values() for name in names]
    of_megahead = {name for commands in COMMANDS.values() for name in commands}
    assert sorted(others) == sorted({path.stem for path in TOOLS.glob("*.py")} - of_megahead)


def listed(page: str, head: str) -> dict[str, list[str]]:
    """The rows of the table that begins so: group to names."""
    rows = [row.split("|") for row in page.partition(f"| `{head}` |")[2].partition("\n\n")[0].splitlines()[2:]]
    return {group.strip(): names.strip().split(", ") for _, group, names, _ in rows}


def test_what_commands_are_made_of_is_not_called_as_a_command() -> None:
    """A folder and a file of one name would shadow each other where both are imported."""
    packages = {path.parent.name for path in TOOLS.glob("*/*.py")}
    assert packages
    assert not [name for name in packages if Path(TOOLS, f"{name}.py").exists()]


def test_the_image_has_what_the_cluster_starts() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    copied = [source for line in re.findall(r"^COPY (.*) \S+$", dockerfile, re.MULTILINE) for source in line.split()]
    assert {"megahead", "launch", "configs", "setup.py", "Makefile"} <= {*copied}
    assert all((ROOT / source).exists() for source in copied)
    _, job = yaml.safe_load_all((ROOT / "launch/kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert f"WORKDIR {container['workingDir']}\n" in dockerfile


def test_hooks_are_what_make_check_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    makefile = (ROOT / "Makefile").read_text()
    (parts,) = re.findall(r"^check: (.*)$", makefile, re.MULTILINE)
    recipes = [re.findall(rf"^{part}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)[0] for part in parts.split()]
    checked = [line.strip().removeprefix("$(BIN)/").removesuffix(" .") for line in "".join(recipes).splitlines()]
    assert [hook["entry"].removeprefix(".venv/bin/") for hook in hooks] == checked


def would_run(*words: str) -> list[str]:
    """The recipes that make would run, with `python3` as the interpreter that has torch."""
    command = ["make", "-n", "GPU_PYTHON=python3", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def test_make_test_gpu_runs_every_file_with_such_tests_and_installs_nothing_where_told() -> None:
    (line,) = would_run("test-gpu", "GPU_WHEELS=")
    path, _, command = line.partition(" ")
    assert path.startswith(f"PYTHONPATH={ROOT}:")  # where what tests start finds the package
    assert command.startswith("python3 -m pytest -m gpu ")
    folders = [ROOT / word for word in line.split() if word.startswith("tests/")]
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if re.search(r"mark\.gpu\b(?!\()", path.read_text())]
    assert len(marked) > 3
    assert not [path for path in marked if path != Path(__file__) and not any(path.is_relative_to(f) for f in folders)]


def test_carried_wheels_are_laid_beside_what_the_interpreter_has() -> None:
    for target in ("test-gpu", "gpu-report"):
        *laid, run = would_run(
            target, "GPU_WHEELS=gpu-wheels/a.whl", "GPU_SITE=/nowhere/site", "-W", "gpu-wheels/a.whl"
        )
        (install,) = [line for line in laid if "pip" in line]
        assert install == (
            "python3 -m pip install -q --no-index --no-deps --no-compile --target /nowhere/site gpu-wheels/a.whl"
        )
        assert "nowhere/site" in run
