"""Every command tells its options, and that a path is wrong, before it imports what takes seconds."""

from __future__ import annotations

import pytest

from megahead.commands import COMMANDS
from support.asked import ROOT, Answer, ask

NAMES = [name for commands in COMMANDS.values() for name in commands]
CONSOLE = [f"megahead {name}" for name in NAMES]
SCRIPTS = ["launch/pretrain.py", *(f"tools/{path.name}" for path in sorted((ROOT / "tools").glob("*.py")))]
OWN = [script for script in SCRIPTS if not any(script.endswith(f"/{name}.py") for name in NAMES)]
"""Scripts that are no console command's other form."""

WRONG: dict[str, str] = {
    "megahead convert": "to-hf --checkpoint nowhere --output out --head pmi",
    "megahead doctor": "",
    "megahead embed": "--model nowhere --input nowhere.txt --output v.npy",
    "megahead estimate": "--config nowhere.yaml",
    "megahead eval_harness": "--model nowhere --data .",
    "megahead finetune": "--model . --task glue/rte --data .",
    "megahead generate": "--model nowhere --prompt x",
    "megahead inspect_checkpoint": "nowhere",
    "megahead inspect_dataset": "nowhere",
    "megahead merge_datasets": "--input nowhere --output out",
    "megahead plot": "nowhere",
    "megahead preprocess": "--input nowhere.jsonl --tokenizer t.json --output out",
    "megahead pretrain": "--config nowhere.yaml",
    "megahead pseudo_perplexity": "--model . --input nowhere.jsonl",
    "megahead report": "nowhere",
    "megahead start": "nowhere",
    "megahead synonyms": "--model nowhere --wordnet .",
    "megahead train_tokenizer": "--input nowhere.jsonl --output t.json --vocab-size 300",
    "tools/bench_engine.py": "",
    "tools/bench_link.py": "",
    "tools/bench_loss.py": "--data nowhere",
    "tools/bench_preprocess.py": "--input nowhere.jsonl --tokenizer t.json",
    "tools/bench_step.py": "--preset pythia-14m --data nowhere",
    "tools/configuration_page.py": "",
    "tools/demo.py": "",
    "tools/gpu_report.py": "--dataset nowhere",
    "tools/gpu_wheels.py": "",
    "tools/pictures.py": "",
    "tools/paper.py": "decoders --text nowhere.jsonl",
    "tools/profile_step.py": "--config nowhere.yaml",
}
"""Arguments of which a path does not exist; none for a command that reads nothing it is told of."""

MOST_CPU_SECONDS = 1.2
"""About what torch alone takes to import; measured: 0.02 to 0.2, and 0.3 of what all commands share."""


DRY_RUN = ("megahead pretrain", f"--config {ROOT}/configs/pythia-70m-headless.yaml --dry-run")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Answer]:
    """By command and arguments."""
    asked = [(command, "--help") for command in ("megahead", *CONSOLE, *SCRIPTS)]
    asked += [(command, arguments) for command, arguments in WRONG.items() if arguments]
    asked.append(DRY_RUN)
    words = [[*command.split(), *arguments.split()] for command, arguments in asked]
    return dict(zip(asked, ask(words, tmp_path_factory.mktemp("asked")), strict=True))


def test_every_command_is_asked() -> None:
    assert sorted([*CONSOLE, *OWN]) == sorted(WRONG), "a new command belongs into the table"


@pytest.mark.parametrize("command", ["megahead", *CONSOLE, *SCRIPTS])
def test_options_are_told_at_once(answers: dict[tuple[str, str], Answer], command: str) -> None:
    answer = answers[command, "--help"]
    name = command.replace("_", "-") if command in CONSOLE else command.rpartition("/")[2]
    assert (answer.code, answer.said.startswith(f"usage: {name} "), answer.heavy) == (0, True, []), answer.said
    assert answer.cpu_seconds < MOST_CPU_SECONDS


@pytest.mark.parametrize("command", [command for command, arguments in WRONG.items() if arguments])
def test_a_wrong_path_is_told_at_once(answers: dict[tuple[str, str], Answer], command: str) -> None:
    answer = answers[command, WRONG[command]]
    assert (answer.code, answer.heavy) == (2, []), answer.said
    assert answer.said.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in answer.said
    assert answer.cpu_seconds < MOST_CPU_SECONDS


def test_a_dry_run_needs_nothing_that_trains(answers: dict[tuple[str, str], Answer]) -> None:
    answer = answers[DRY_RUN]
    assert (answer.code, answer.heavy) == (0, []), answer.said
    assert "GiB a rank" in answer.said
