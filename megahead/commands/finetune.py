"""Fine-tunes models on GLUE, SuperGLUE and XNLI, with the paper's settings unless others are given.

megahead finetune --model exports/headless exports/vanilla --task glue superglue --data data --output glue.json
megahead finetune --model exports/headless --task xnli/en xnli/fr --data data --languages en,fr,de --epochs 3

`glue`, `superglue` and `xnli` stand for all their tasks that `--data` holds. `xnli/fr` trains on French and is tested
in every language at hand. Runs whose results are in `--output` are not repeated: an interrupted call continues.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from megahead.checkpoints.arguments import far_or_existing
from megahead.errors import FieldError, existing
from megahead.evaluate.glue_tasks import (
    XNLI_LANGUAGES,
    FineTuning,
    LossName,
    Sources,
    TaskData,
    expand,
    load_task,
    paper_settings,
)
from megahead.report.tables import to_rich
from megahead.terminal import terminal


def main() -> None:
    arguments = _parser().parse_args()
    for name in ("seeds", "max_train_rows", "threads"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise FieldError(f"--{name.replace('_', '-')}", "be at least 1", got=value)
    sources = Sources(arguments.data)
    console = terminal(soft_wrap=True)
    tasks = [load(name, sources, arguments) for name in expand(arguments.task, sources)]
    for data, _ in tasks:
        if data.short:
            console.print(f"{data.name}: {data.short:,} lines lack a column and were left out")
    if arguments.threads:
        use_threads(arguments.threads)
    from megahead.evaluate.finetuning import InitialModel
    from megahead.hf.export import hf_folder_to_classify

    initial_models = [InitialModel(str(model), hf_folder_to_classify(model)) for model in arguments.model]
    if arguments.floor:
        initial_models.append(InitialModel("random weights", initial_models[0].folder, random_weights=True))
    from megahead.evaluate.finetuning import FineTuningResults

    kept = FineTuningResults(arguments.output)
    from megahead.evaluate.finetuning import Comparison

    results = Comparison(initial_models, tasks, range(arguments.seeds), kept).run(console.print)
    from megahead.evaluate.finetuning import comparison_table

    console.print(to_rich(comparison_table(results), title="percent, mean ± deviation over seeds (best epochs)"))
    console.print(f"\nwrote {arguments.output}")


def use_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)


def load(name: str, sources: Sources, arguments: argparse.Namespace) -> tuple[TaskData, FineTuning]:
    """A task with its settings."""
    languages = arguments.languages.split(",")
    unknown = [language for language in languages if language not in XNLI_LANGUAGES]
    if unknown:
        raise FieldError("--languages", f"name languages of {', '.join(XNLI_LANGUAGES)}", got=unknown[0])
    names = ("learning_rate", "weight_decay", "batch_size", "epochs", "max_length")
    settings = paper_settings(name, arguments.loss, **{key: getattr(arguments, key) for key in names})
    return load_task(name, sources, max_train_rows=arguments.max_train_rows, languages=languages), settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=far_or_existing, nargs="+", required=True, metavar="DIR", help="HF folder, run, checkpoint"
    )
    parser.add_argument(
        "--task",
        nargs="+",
        required=True,
        metavar="T",
        help="glue/cola, superglue/boolq, xnli/en ..., or a whole suite",
    )
    parser.add_argument(
        "--data", type=existing, metavar="DIR", help="folder with glue/, superglue/, xnli/ (default: the hub)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("finetuning.json"), metavar="JSON", help="store results there"
    )
    parser.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="runs per task, seeds 0 to N - 1 (default: 3)"
    )
    parser.add_argument("--floor", action="store_true", help="also fine-tune the first model with random weights")
    parser.add_argument("--max-train-rows", type=int, metavar="N", help="train on at most N rows, drawn at random")
    parser.add_argument("--languages", default=",".join(XNLI_LANGUAGES), metavar="A,B", help="test XNLI in these")
    parser.add_argument(
        "--loss", choices=get_args(LossName), help="cross-entropy (default: balanced; regular for XNLI)"
    )
    parser.add_argument("--epochs", type=int, metavar="N", help="default: 10; the best one is reported")
    parser.add_argument("--batch-size", type=int, metavar="N", help="default: 32, XNLI 128")
    parser.add_argument("--learning-rate", type=float, metavar="X", help="default: 1e-5, regular 5e-6, XNLI 2e-5")
    parser.add_argument("--weight-decay", type=float, metavar="X", help="default: 0, regular 0.01, XNLI 0")
    parser.add_argument("--max-length", type=int, metavar="N", help="tokens of a sequence (default: 128)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
    return parser
