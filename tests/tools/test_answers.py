"""Every command tells its options, and that a path is wrong, before it imports what takes seconds."""

from __future__ import annotations

import pytest
from asked import ROOT, Answer, ask

COMMANDS = ["launch/pretrain.py", *(f"tools/{path.name}" for path in sorted((ROOT / "tools").glob("*.py")))]

WRONG: dict[str, str] = {
    "launch/pretrain.py": "--config nowhere.yaml",
    "tools/bench_engine.py": "",
    "tools/bench_loss.py": "--data nowhere",
    "tools/bench_preprocess.py": "--input nowhere.jsonl --tokenizer t.json",
    "tools/bench_step.py": "--preset pythia-14m --data nowhere",
    "tools/compare_finetuning.py": "--model nowhere --task glue/rte",
    "tools/configuration_page.py": "",
    "tools/convert.py": "to-hf --checkpoint nowhere --output out --head pmi",
    "tools/count_waits.py": "--config nowhere.yaml",
    "tools/demo.py": "",
    "tools/doctor.py": "",
    "tools/estimate.py": "--config nowhere.yaml",
    "tools/eval_harness.py": "--model nowhere --data .",
    "tools/finetune.py": "--model . --task glue/rte --data .",
    "tools/generate.py": "--model nowhere --prompt x",
    "tools/headless_picture.py": "",
    "tools/import_diagram.py": "",
    "tools/inspect_checkpoint.py": "nowhere",
    "tools/inspect_dataset.py": "nowhere",
    "tools/merge_datasets.py": "--input nowhere --output out",
    "tools/paper.py": "decoders --text nowhere.jsonl",
    "tools/plot.py": "nowhere",
    "tools/preprocess.py": "--input nowhere.jsonl --tokenizer t.json --output out",
    "tools/profile_step.py": "--config nowhere.yaml",
    "tools/pseudo_perplexity.py": "--model . --input nowhere.jsonl",
    "tools/report.py": "nowhere",
    "tools/synonyms.py": "--model nowhere --wordnet .",
    "tools/train_tokenizer.py": "--input nowhere.jsonl --output t.json --vocab-size 300",
}
"""Arguments of which a path does not exist; none for a command that reads nothing it is told of."""

MOST_CPU_SECONDS = 1.2
"""About what torch alone takes to import; measured: 0.02 to 0.2, and 0.3 of what all commands share."""


DRY_RUN = ("launch/pretrain.py", f"--config {ROOT}/configs/pythia-70m-headless.yaml --dry-run")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Answer]:
    """By command and arguments."""
    asked = [(command, "--help") for command in COMMANDS]
    asked += [(command, WRONG[command]) for command in COMMANDS if WRONG.get(command)]
    asked.append(DRY_RUN)
    found = ask([[command, *arguments.split()] for command, arguments in asked], tmp_path_factory.mktemp("asked"))
    return dict(zip(asked, found, strict=True))


def test_every_command_is_asked() -> None:
    assert sorted(COMMANDS) == sorted(WRONG), "a new command belongs into the table"


@pytest.mark.parametrize("command", COMMANDS)
def test_options_are_told_at_once(answers: dict[tuple[str, str], Answer], command: str) -> None:
    answer = answers[command, "--help"]
    assert (answer.code, answer.said[:6], answer.heavy) == (0, "usage:", []), answer.said
    assert answer.cpu_seconds < MOST_CPU_SECONDS


@pytest.mark.parametrize("command", [command for command in COMMANDS if WRONG.get(command)])
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
