"""The sub-commands of `megahead`: one module each, whose `main` parses its arguments.

A new one is a module and a line here; code that does not handle arguments belongs into the packages below.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from megahead.errors import UserError, existing_path, print_error

COMMANDS: dict[str, dict[str, str]] = {
    "data": {
        "train_tokenizer": "train a tokenizer, or give one the tokens of encoders",
        "preprocess": "turn text into indexed datasets",
        "merge_datasets": "put several indexed datasets into one",
        "inspect_dataset": "show a dataset, warn of what would spoil training",
    },
    "run": {
        "start": "from a folder of text to a model that writes, in minutes",
        "doctor": "check this machine: what is missing, what to do about it",
        "estimate": "estimate whether a run fits, and how long it takes",
        "pretrain": "pretrain, fine-tune a head, or resume",
        "convert": "export a checkpoint to a Hugging Face folder, or import it",
        "generate": "continue prompts with a model",
        "embed": "write an encoder's vectors of texts",
    },
    "evaluate": {
        "eval_harness": "score models with lm-eval on local task files",
        "finetune": "fine-tune on GLUE, SuperGLUE, XNLI; encoders for retrieval",
        "pseudo_perplexity": "compare encoders by pseudo-perplexity on texts",
        "synonyms": "compare the similarity of synonyms in input embeddings",
    },
    "inspect": {
        "plot": "draw the curves of one or several runs into one PNG",
        "report": "make one HTML page of one or several runs",
        "inspect_checkpoint": "show the content of a checkpoint, verify its files",
    },
}
"""{group: {module: description}}, as in docs/quickstart.md."""


def has_other_ranks(environment: Mapping[str, str]) -> bool:
    """Whether a launcher's variables may mean several ranks; `read_launch`, which imports torch, tells for sure."""
    names = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
    return any(environment.get(name, "1") != "1" for name in names)


def report_once(message: str) -> None:
    """Prints a command's error on only one of the ranks that raised it, and writes it to torchrun's error file."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):  # a full disk may be the error
            Path(file).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))
    if not has_other_ranks(os.environ):
        print_error(message)  # without importing torch
        return
    from megahead.distributed.launch import print_error_once, read_launch

    try:
        launch = read_launch(os.environ)
    except UserError:
        print_error(message)
    else:
        print_error_once(launch, message)


def checkpoint_path(text: str) -> Path:
    """argparse's `type` for a model or checkpoint: an existing path, CHECKPOINTS/step-N or CHECKPOINTS/N for the newest
    one of a step, or a URL, whose newest valid checkpoint is fetched to this machine's cache, with its tokenizer and
    log. UserError if there is none."""
    from megahead.remote_files import is_remote

    if is_remote(text):
        from megahead.checkpoints.transfer import fetch_to_cache  # needs torch

        return fetch_to_cache(text)
    path = Path(text)
    if re.fullmatch(r"(step-)?\d+", path.name) and not path.exists() and path.parent.is_dir():
        from megahead.checkpoints.disk import find_checkpoint  # needs torch

        return find_checkpoint(path) or existing_path(text)
    return existing_path(text)
