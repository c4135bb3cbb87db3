"""Fine-tunes models on GLUE, SuperGLUE and XNLI, by default with the paper's settings, and encoders for retrieval.

megahead finetune --model exports/headless exports/vanilla --task glue superglue --data data --output glue.json
megahead finetune --model exports/headless --task xnli/en xnli/fr --data data --languages en,fr,de --epochs 3

Checkpoints of one or several runs give curves over tokens and hours:
megahead finetune --model runs/headless/checkpoints/step-* --task glue --data data --floor --curve glue.png

Encoders are tuned contrastively on pairs of a query and a text that answers it (jsonl, BEIR's folder), by one rank or
several (torchrun --nproc_per_node 2 -m megahead finetune ...), which share their candidates:
megahead finetune --model runs/encoder --task retrieval/pairs.jsonl --seeds 1 --save tuned

`glue`, `superglue` and `xnli` stand for all their tasks in `--data`. `xnli/fr` trains on French and is tested in every
available language. Runs with results in `--output` are not repeated: an interrupted call continues.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from megahead.commands import checkpoint_path, has_other_ranks, report_once
from megahead.errors import FieldError, existing_path, require_at_least, run_command
from megahead.evaluate.glue_tasks import (
    XNLI_LANGUAGES,
    FineTuningSettings,
    LossName,
    TaskData,
    expand_task_names,
    load_task,
    paper_settings,
)
from megahead.evaluate.results import Score
from megahead.evaluate.search_data import RETRIEVAL_PREFIX, ContrastiveSettings, load_pairs
from megahead.hf.other_programs import POOLINGS
from megahead.report.tables import terminal, to_rich
from megahead.wording import pluralize

if TYPE_CHECKING:
    from megahead.distributed.group import Group
    from megahead.evaluate.finetuning_comparison import FineTuningResult
    from megahead.report.figures import TrainingProgress

RANDOM_WEIGHTS = "random weights"
"""The model name under which results of `--floor` are listed."""

WAIT_SECONDS = 600.0
"""How long ranks wait for each other, for example while rank 0 exports a run."""


def main() -> None:
    """Runs the command; on several ranks an error exits immediately: threads may wait for other ranks."""
    if has_other_ranks(os.environ):
        run_command(run, immediate_exit=True, report=report_once)
    else:
        run()


def run() -> None:
    arguments = _parser().parse_args()
    require_at_least(1, seeds=arguments.seeds, max_train_rows=arguments.max_train_rows, threads=arguments.threads)
    names = expand_task_names(arguments.task, arguments.data, RETRIEVAL_PREFIX)
    refuse_unread_options(names, arguments)
    tasks = [load_with_settings(name, arguments) for name in names]
    runs = len(tasks) * (len(arguments.model) + arguments.floor) * arguments.seeds
    if arguments.save and (runs > 1 or not names[0].startswith(RETRIEVAL_PREFIX)):
        rule = f"be given with one --model, one --task {RETRIEVAL_PREFIX}PATH and --seeds 1"
        raise FieldError("--save", rule, got=f"given with {pluralize(runs, 'run')} of {names[0]}")
    if arguments.save and arguments.save.exists():
        raise FieldError("--save", "name a new folder", got=arguments.save)
    import torch

    from megahead.distributed.launch import choose_device, distributed_session, read_launch

    launch = read_launch(os.environ)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    with distributed_session(launch, choose_device("auto", launch.local_rank), WAIT_SECONDS) as group:
        compare(tasks, arguments, group)


def refuse_unread_options(names: Sequence[str], arguments: argparse.Namespace) -> None:
    """FieldError for an option that no task reads."""
    retrieval = f"{RETRIEVAL_PREFIX}PATH"
    if arguments.loss and all(name.startswith(RETRIEVAL_PREFIX) for name in names):
        raise FieldError("--loss", f"be left out with {retrieval}, which has no classes", got=arguments.loss)
    for option, prefix, task in (
        ("pooling", RETRIEVAL_PREFIX, retrieval),
        ("temperature", RETRIEVAL_PREFIX, retrieval),
        ("languages", "xnli/", "xnli"),
    ):
        value = getattr(arguments, option)
        if value is not None and not any(name.startswith(prefix) for name in names):
            raise FieldError(f"--{option}", f"be left out without --task {task}, which alone reads it", got=value)


def compare(tasks: Sequence[tuple[TaskData, FineTuningSettings]], arguments: argparse.Namespace, group: Group) -> None:
    """Fine-tunes all models on all tasks, prints the table, and writes what the options name; rank 0 exports runs and
    checkpoints. Collective; CheckpointError for decoders with tasks of retrieval."""
    from megahead.evaluate.finetuning import InitialModel
    from megahead.evaluate.finetuning_comparison import Comparison, FineTuningResults, comparison_table
    from megahead.hf.export import ensure_classifier_folder, ensure_encoder_folder

    if group.size > 1 and (others := [data.name for data, _ in tasks if not data.name.startswith(RETRIEVAL_PREFIX)]):
        raise FieldError("--task", f"be {RETRIEVAL_PREFIX}PATH on several ranks", got=others[0])
    console = terminal(soft_wrap=True, quiet=group.rank > 0)
    for data in (data for data, _ in tasks if data.num_skipped):
        console.print(f"{data.name}: {data.num_skipped:,} lines lack a column and were left out")
    has_retrieval = any(data.name.startswith(RETRIEVAL_PREFIX) for data, _ in tasks)
    ensure_folder = ensure_encoder_folder if has_retrieval else ensure_classifier_folder
    exported = {model: ensure_folder(model) for model in arguments.model} if group.rank == 0 else {}
    folders: dict[Path, Path] = group.broadcast_object(exported)
    progress: dict[Path, TrainingProgress] = {}
    if arguments.curve:
        from megahead.report.figures import checkpoint_progress

        progress = checkpoint_progress(folders)
    initial_models = [InitialModel(str(model), folder) for model, folder in folders.items()]
    if arguments.floor:
        initial_models.append(InitialModel(RANDOM_WEIGHTS, initial_models[0].folder, random_weights=True))
    results_file = FineTuningResults(arguments.output, is_writer=group.rank == 0)
    comparison = Comparison(initial_models, tasks, range(arguments.seeds), results_file, arguments.save)
    results = comparison.run(console.print)
    console.print(to_rich(comparison_table(results), title="percent, mean ± deviation over seeds (best epochs)"))
    console.print(f"\nwrote {arguments.output}{f' and {arguments.save}' if arguments.save else ''}", soft_wrap=True)
    if progress and group.rank == 0:
        console.print(f"wrote {write_curve(results, progress, arguments.curve)}", soft_wrap=True)


def write_curve(results: Sequence[FineTuningResult], progress: Mapping[Path, TrainingProgress], output: Path) -> Path:
    """Draws the scores of checkpoints along their runs, with standard errors over seeds, and those of random
    weights."""
    from megahead.evaluate.finetuning_comparison import summarize
    from megahead.report.figures import TaskPoint, draw_task_curves, save_figure

    by_model = {str(model): place for model, place in progress.items()}
    points, random_scores = [], {}
    for model in dict.fromkeys(result.model for result in results):
        for score in summarize([result for result in results if result.model == model]):
            panel = (score.full_name(), score.metric)
            if model == RANDOM_WEIGHTS:
                random_scores[panel] = score.mean()
            else:
                run, tokens, hours = by_model[model]
                stderr = Score.mean(score.metric, score.values).stderr
                points.append(TaskPoint(run, tokens, *panel, score.mean(), stderr, hours))
    return save_figure(draw_task_curves(points, random_scores=random_scores), output)


def load_with_settings(name: str, arguments: argparse.Namespace) -> tuple[TaskData, FineTuningSettings]:
    """A task's data and fine-tuning settings."""
    languages = list(XNLI_LANGUAGES) if arguments.languages is None else arguments.languages.split(",")
    unknown = [language for language in languages if language not in XNLI_LANGUAGES]
    if unknown:
        raise FieldError("--languages", f"name languages of {', '.join(XNLI_LANGUAGES)}", got=unknown[0])
    names = ("learning_rate", "weight_decay", "batch_size", "epochs", "max_length")
    changes = {key: value for key in names if (value := getattr(arguments, key)) is not None}
    if name.startswith(RETRIEVAL_PREFIX):
        changes |= {key: value for key in ("pooling", "temperature") if (value := getattr(arguments, key)) is not None}
        contrastive = ContrastiveSettings(**changes)  # reports its errors before the data is read
        return load_pairs(name, arguments.max_train_rows), contrastive
    settings = paper_settings(name, arguments.loss, **changes)
    return load_task(name, arguments.data, max_train_rows=arguments.max_train_rows, languages=languages), settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=checkpoint_path, nargs="+", required=True, metavar="DIR", help="HF folder, run, checkpoint")
    tasks = "glue/cola, superglue/boolq, xnli/en ..., a whole suite, or retrieval/PATH"
    add("--task", nargs="+", required=True, metavar="T", help=tasks)
    add("--data", type=existing_path, metavar="DIR", help="folder with glue/, superglue/, xnli/ (default: the hub)")
    add("--output", type=Path, default=Path("finetuning.json"), metavar="JSON", help="store results there")
    add("--seeds", type=int, default=3, metavar="N", help="runs per task, seeds 0 to N - 1 (default: 3)")
    add("--floor", action="store_true", help="also fine-tune the first model with random weights")
    add("--curve", type=Path, metavar="PNG", help="draw the scores of checkpoints against tokens and hours")
    add("--max-train-rows", type=int, metavar="N", help="train on at most N rows, drawn at random")
    add("--languages", metavar="A,B", help="test XNLI in these (default: all)")
    add("--loss", choices=get_args(LossName), help="`balanced` weighs classes equally (default; XNLI: regular)")
    add("--epochs", type=int, metavar="N", help="default: 10, retrieval 3; the best one is reported")
    add("--batch-size", type=int, metavar="N", help="default: 32, XNLI 128, retrieval 64")
    add("--learning-rate", type=float, metavar="X", help="default: 1e-5, regular 5e-6, XNLI 2e-5, retrieval 1e-4")
    add("--weight-decay", type=float, metavar="X", help="default: 0, regular and retrieval 0.01")
    add("--max-length", type=int, metavar="N", help="tokens of a sequence (default: 128)")
    add("--pooling", choices=POOLINGS, help="a text's vector under retrieval (default: mean)")
    add("--temperature", type=float, metavar="X", help="retrieval's initial temperature (default: 0.05)")
    add("--save", type=Path, metavar="DIR", help="write the encoder tuned for retrieval there")
    add("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
    return parser
