"""The sub-commands of `megahead`: one module each, whose `main` parses its arguments.

A new one is a module and a line here; code that does not handle arguments belongs into the packages below.
"""

from __future__ import annotations

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
        "finetune": "fine-tune models on GLUE, SuperGLUE and XNLI",
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
