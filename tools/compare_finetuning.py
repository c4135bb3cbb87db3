"""Holds our fine-tuning against transformers' own Trainer: same model, tasks, settings and seeds, two programs.

tools/compare_finetuning.py --model MINILM --task superglue/cb glue/mrpc --data data --epochs 3 --learning-rate 5e-5

The Trainer gets its tokens from the tokenizer itself and draws its own order, so scores agree within the spread of
seeds, not exactly. Regular cross-entropy, which is the Trainer's. No multiple choice (COPA): it is another model there.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from megahead.errors import existing, run_command
from megahead.evaluate.glue_tasks import Example, FineTuning, Sources, TaskData, load_task, paper_settings
from megahead.report.tables import to_rich
from megahead.terminal import terminal

if TYPE_CHECKING:
    from transformers import TrainingArguments


def main() -> None:
    arguments = _parser().parse_args()
    console = terminal(soft_wrap=True)
    rows = []
    from megahead.evaluate.finetuning import FineTuningRun, InitialModel

    for name in arguments.task:
        data = load_task(name, Sources(arguments.data), max_train_rows=arguments.max_train_rows)
        if data.short:
            console.print(f"{name}: {data.short:,} lines lack a column and were left out")
        changes = {"epochs": arguments.epochs, "learning_rate": arguments.learning_rate}
        settings = paper_settings(name, "regular", **changes)
        task_run = FineTuningRun(InitialModel(str(arguments.model), arguments.model), data, settings)
        ours, theirs = [], []
        for seed in range(arguments.seeds):
            ours.append(max(next(iter(epoch.scores.values()))[data.task.metric] for epoch in task_run.run(seed)))
            theirs.append(trainer_score(arguments.model, data, settings, seed))
            console.print(f"{name}, seed {seed}: ours {100 * ours[-1]:.1f}, Trainer {100 * theirs[-1]:.1f}")
        rows.append(row(data, ours, theirs))
    console.print(to_rich(rows, title="percent, best epoch, mean ± deviation over seeds"))


def trainer_score(model: Path, data: TaskData, settings: FineTuning, seed: int) -> float:
    """The best epoch's score of a run by transformers' Trainer."""
    import torch
    from transformers import DataCollatorWithPadding, PrinterCallback, Trainer

    torch.manual_seed(seed)
    from megahead.hf.published import load_tokenizer_folder

    tokenizer = load_tokenizer_folder(model)
    (test,) = data.evaluation_sets.values()
    regression = not data.task.labels

    from megahead.evaluate.finetuning import measure

    def metrics(predicted: Any) -> dict[str, float]:
        outputs, labels = predicted
        predictions = outputs[:, 0] if regression else outputs.argmax(1)
        return {"score": measure(data.task.metric, np.asarray(labels, np.float64), predictions.astype(np.float64))}

    from megahead.hf.published import load_classifier

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            load_classifier(model, data.task.outputs(), tokenizer.pad_token_id),
            training_arguments(Path(folder), settings, seed),
            train_dataset=tokenized(data.train, tokenizer, settings, regression),
            eval_dataset=tokenized(test, tokenizer, settings, regression),
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=metrics,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return max(float(record["eval_score"]) for record in trainer.state.log_history if "eval_score" in record)


def training_arguments(folder: Path, settings: FineTuning, seed: int) -> TrainingArguments:
    """The Trainer's names for our settings."""
    import torch
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=2 * settings.batch_size,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.gradient_clipping,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=settings.warmup,
        seed=seed,
        eval_strategy="epoch",
        save_strategy="no",
        logging_strategy="no",
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )


def tokenized(
    examples: Sequence[Example], tokenizer: Any, settings: FineTuning, regression: bool
) -> list[dict[str, Any]]:
    """Examples as the tokenizer itself joins and cuts them."""
    cut = {"truncation": "longest_first", "max_length": settings.max_length, "return_token_type_ids": True}
    return [
        {
            **tokenizer(example.first, example.seconds[0], **cut),
            "labels": example.label if regression else int(example.label),
        }
        for example in examples
    ]


def row(data: TaskData, ours: Sequence[float], theirs: Sequence[float]) -> dict[str, object]:
    """One line of the table."""
    spread = max(deviation(ours), deviation(theirs))
    difference = fmean(ours) - fmean(theirs)
    return {
        "task": data.name,
        "metric": data.task.metric,
        "rows": len(data.train),
        "ours": f"{100 * fmean(ours):.1f} ± {100 * deviation(ours):.1f}",
        "Trainer": f"{100 * fmean(theirs):.1f} ± {100 * deviation(theirs):.1f}",
        "difference": f"{100 * difference:+.1f}",
        "within deviation": abs(difference) <= spread,
    }


def deviation(values: Sequence[float]) -> float:
    """Over seeds."""
    return stdev(values) if len(values) > 1 else 0.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Hold our fine-tuning against transformers' Trainer.")
    parser.add_argument(
        "--model", type=existing, required=True, metavar="DIR", help="Hugging Face folder of an encoder"
    )
    parser.add_argument("--task", nargs="+", required=True, metavar="T", help="glue/mrpc, superglue/cb ...")
    parser.add_argument(
        "--data", type=existing, metavar="DIR", help="folder with glue/ and superglue/ (default: the hub)"
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--epochs", type=int, default=3, metavar="N")
    parser.add_argument("--learning-rate", type=float, default=5e-5, metavar="X")
    parser.add_argument("--max-train-rows", type=int, metavar="N", help="train on N rows at most, drawn at random")
    return parser


if __name__ == "__main__":
    run_command(main)
