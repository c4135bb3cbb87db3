"""The commands of README and docs: each is run by a test or marked with why not, and each names what exists.

Commands stand in fences named `bash`, or behind `$` in `console` ones. A comment `<!-- not run: WHY -->` on the line
above a fence marks all of it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from megahead.config.run import RunConfig
from support.commands import ROOT
from support.forked import run_script

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
JOURNEY = ROOT / "docs/own-text.md"

RUN_BY = {
    r"python tools/convert\.py revocabulary ": "hf/test_new_vocabulary.py",
    r"python tools/(train_tokenizer|preprocess|inspect_dataset|convert|generate)\.py": "docs/test_pages.py",
    r"python tools/(report|estimate)\.py": "docs/test_pages.py",
    r"(python|deepspeed|torchrun) .*launch/pretrain\.py": "launch/test_pretrain_command.py",
    r"deepspeed --hostfile|torchrun --nnodes": "launch/test_two_nodes.py",
    r"python tools/merge_datasets\.py": "commands/test_data.py",
    r"megahead start ": "runs/test_start.py",
    r"megahead generate ": "commands/test_models.py",
    r"python tools/doctor\.py": "commands/test_doctor.py",
    r"python tools/plot\.py": "report/test_curves.py",
    r"python tools/eval_harness\.py": "commands/test_models.py",
    r"python tools/paper\.py": "tools/experiments/test_runner.py",
    r"megahead (preprocess|pretrain|convert|report) ": "docs/test_python_page.py",
    r"python tools/finetune\.py": "commands/test_finetune.py",
    r"python tools/synonyms\.py": "evaluate/test_synonyms.py",
    r"python tools/embed\.py": "docs/test_retrieval_page.py",
    r"python tools/bench_step\.py": "tools/test_bench_step.py",
    r"(source|export|cat|for|done) ?|tensorboard --logdir": "",
}
"""From a command's beginning to the test file that runs it in tiny form; "" for what is not ours."""

PROGRAM = re.compile(
    r"^(\$ )?((python|megahead|deepspeed|torchrun|make|git|sbatch|kubectl) |(tools|launch)/\w+\.)", re.MULTILINE
)


@dataclass(frozen=True)
class Command:
    page: Path
    text: str
    why_not: str | None

    def __str__(self) -> str:
        return f"{self.page.name}: {self.text}"


def commands(page: Path, text: str) -> Iterator[Command]:
    """The commands of a page; a fence that hides some under another name fails."""
    fences = re.finditer(r"(?:^<!-- not run: (.*?) -->\n)?^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for why_not, kind, body in (fence.groups() for fence in fences):
        if kind not in ("bash", "console"):
            hidden = None if kind else PROGRAM.search(body)
            assert hidden is None, f"{page.name}: commands must stand in a `bash` fence, but {hidden[0]!r} does not"
            continue
        for line in body.replace("\\\n", " ").splitlines():
            if kind == "console" and not line.startswith("$ "):
                continue
            bare = " ".join(re.sub(r"(^|\s)#.*", "", line).removeprefix("$ ").split())
            if bare:
                yield Command(page, bare, why_not)


def run_page(page: Path, folder: Path, settings: Sequence[str]) -> str:
    """Runs a page's commands in `folder`, trainings with `settings`; returns what they print."""
    for name in ("tools", "launch", "configs"):
        (folder / name).symlink_to(ROOT / name)
    smaller, shown = [word for setting in settings for word in ("--set", setting)], ""
    for command in commands(page, page.read_text()):
        _, *words = shlex.split(command.text)
        done = run_script(*words, *(smaller if "launch/pretrain.py" in words else []), cwd=folder)
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
        shown += done.stdout
    return shown


def all_commands() -> list[Command]:
    return [command for page in PAGES for command in commands(page, page.read_text())]


def inline_commands() -> Iterator[Command]:
    """Those inside sentences."""
    for page in PAGES:
        for found in re.finditer(
            r"`((?:(?:python )?(?:tools|launch)/\w+\.py|megahead [a-z][\w-]+) [^`]+)`", page.read_text()
        ):
            yield Command(page, " ".join(found[1].split()), "in a sentence")


def runner(command: Command) -> str | None:
    """The test file that runs it; None when there is none."""
    return next((test for pattern, test in RUN_BY.items() if re.match(pattern, command.text)), None)


def mistakes(command: Command) -> list[str]:
    """Files, options and settings that the command names and that do not exist."""
    scripts = re.findall(r"(?:tools|launch)/\w+\.(?:py|sh|txt)|configs/[\w-]+\.yaml", command.text)
    wrong = [path for path in scripts if "NAME" not in path and not (ROOT / path).is_file()]
    called = re.search(r"(?:tools|launch)/(\w+)\.py|\bmegahead ([a-z][\w-]+)", command.text)
    if called is not None and called[0] not in wrong:
        source = code_of(called[1] or called[2].replace("-", "_"))
        own = command.text[called.end() :]
        wrong += [option for option in re.findall(r" (--[\w-]+)", own) if f'"{option}"' not in source]
    for setting in re.findall(r"--set '?([\w.]+)=", command.text):
        section: type = RunConfig
        for name in setting.split("."):
            fields = getattr(section, "model_fields", {})
            wrong += [] if name in fields else [setting]
            kinds = (
                [fields[name].annotation, *getattr(fields[name].annotation, "__args__", ())] if name in fields else []
            )
            section = next((kind for kind in kinds if hasattr(kind, "model_fields")), object)
    return wrong


def code_of(name: str) -> str:
    """The source that parses a command's arguments."""
    places = (ROOT / "megahead/commands", ROOT / "tools")
    return next((path.read_text() for place in places if (path := place / f"{name}.py").is_file()), "")


def test_every_command_is_run_by_a_test_or_says_why_not() -> None:
    found = all_commands()
    assert len(found) > 40
    unknown = [str(command) for command in found if command.why_not is None and runner(command) is None]
    assert not unknown, "neither run by a test nor marked:\n" + "\n".join(unknown)
    for pattern, test in RUN_BY.items():
        called = [command.text for command in found if re.match(pattern, command.text)]
        assert called, f"no page has {pattern}"
        for name in re.findall(r"(?:(?:tools|launch)/|megahead )([\w-]+)", " ".join(called)) if test else ():
            assert re.search(rf"\b({name}|run_page)\b", (ROOT / "tests" / test).read_text()), (
                f"{test} does not run {name}"
            )


def test_every_command_names_files_options_and_settings_that_exist() -> None:
    named = [*all_commands(), *inline_commands()]
    wrong = [f"{command}: {', '.join(found)}" for command in named if (found := mistakes(command))]
    assert not wrong, "\n".join(wrong)


def test_what_is_neither_run_nor_marked_is_found() -> None:
    def first(text: str) -> Command:
        return next(commands(Path("page.md"), text))

    assert runner(first("```bash\npython tools/unheard_of.py --x\n```\n")) is None
    assert first("<!-- not run: a reason -->\n```bash\nmake demo\n```\n").why_not == "a reason"
    assert first("text\n```console\nan answer\n$ ls -l # all\n```\n").text == "ls -l"
    assert mistakes(first("```bash\npython tools/plot.py runs/x --colour red\n```\n")) == ["--colour"]
    assert mistakes(first("```bash\nmegahead train-tokenizer --type bpe --colour red\n```\n")) == ["--colour"]
    assert mistakes(first("```bash\nmegahead plott --output x.png\n```\n")) == ["--output"]
    assert mistakes(
        first("```bash\npython launch/pretrain.py --config configs/no.yaml --set model.width=3\n```\n")
    ) == [
        "configs/no.yaml",
        "model.width",
    ]
    with pytest.raises(AssertionError, match="must stand in a `bash` fence"):
        first("```\n$ python tools/plot.py runs/x\n```\n")


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_links_to_a_heading_find_it() -> None:
    lost = [
        f"{page.name}: {file}#{heading}"
        for page in PAGES
        for file, heading in re.findall(r"\]\((?!https?:)([^)#]*\.md|)#([^)]+)\)", page.read_text())
        if heading not in headings(page.parent / file if file else page)
    ]
    assert not lost, "\n".join(lost)


def headings(page: Path) -> set[str]:
    """As links name them: in lower case, without punctuation, words joined by hyphens."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_pages_results_and_the_notebook_behind_them_stay_short() -> None:
    assert words(*PAGES) <= 33_000
    assert words(ROOT / "docs/results.md") <= 900
    assert words(*(ROOT / "docs/research").glob("*.md")) <= 9_200


def words(*pages: Path) -> int:
    return sum(len(page.read_text().split()) for page in pages)


def test_tables_are_whole() -> None:
    """No blank line between two rows, which would end the table."""
    for page in PAGES:
        broken = re.search(r"\|\n\n+(\|.*)\n(?!\|-)", page.read_text())
        assert broken is None, f"{page.name}: {broken and broken[1]}"


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900


@pytest.mark.slow
def test_own_text_from_its_first_to_its_last_command(tmp_path: Path) -> None:
    """In their order, in a folder with this checkout's commands, on little text and with a tiny model."""
    for name in ("tools", "launch", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    stories = [f"the cat {verb} the {noun} and the dog saw it {k} times" for k in range(60) for verb, noun in STORY]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": story * 3}) + "\n" for story in stories))
    text = JOURNEY.read_text()
    (config,) = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.yaml").write_text(tiny(config))
    for command in commands(JOURNEY, text):
        if command.text.startswith("tensorboard"):
            continue
        program, *words = shlex.split(tiny(command.text))
        assert program in ("python", "deepspeed")  # which would start as many ranks as there are devices
        done = run_script(*words, cwd=tmp_path)
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    assert {"report.html", "runs", "models", "data", "text.jsonl"} <= {path.name for path in tmp_path.iterdir()}
    assert "2 runs compared" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "models/mine-head/model.safetensors").is_file()


STORY = [("saw", "rat"), ("sat on", "mat"), ("met", "bird")]
TINY = {
    "vocab-size 16384": "vocab-size 300",
    "size: pythia-70m": "num_layers: 1, hidden_size: 32, num_heads: 2",
    "sequence_length: 512": "sequence_length: 16",
    "global_size: 64, micro_size: 8": "global_size: 8, micro_size: 2",
    "steps: 5000, evaluate_every: 250, checkpoint_every: 500": "steps: 6, evaluate_every: 3, checkpoint_every: 3",
    "warmup_steps: 100": "warmup_steps: 2",
    "precision: bf16": "precision: fp32",
    "training.steps=300": "training.steps=4",
    "world-size 4": "world-size 2",
}
"""What is made smaller; each stands somewhere on the page."""


def tiny(text: str) -> str:
    for large, small in TINY.items():
        text = text.replace(large, small)
    return text


def test_what_is_made_smaller_stands_on_the_page() -> None:
    assert not [large for large in TINY if large not in JOURNEY.read_text()]
