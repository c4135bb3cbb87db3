"""Continues prompts with a model: a Hugging Face folder, a run or a checkpoint, with its trained head or else the
training-free one.

megahead generate --model runs/headless --prompt "The capital of France" "Once upon a time"
megahead generate --model runs/headless --file prompts.txt    # a prompt a line
megahead generate --model runs/headless --interactive         # you and the model take turns, until an empty line

With --interactive each line that you type continues the text so far; `/new` starts a new text, `/temperature 0.5`
changes the temperature.

An encoder (one trained by masked diffusion) writes --max-new-tokens tokens after a prompt, in random order, in --passes
forward passes.

`--output runs/headless/samples.jsonl` saves prompts and texts for `megahead report`.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from megahead.commands import checkpoint_path
from megahead.errors import DataError, FieldError, UserError, existing_path, require_at_least
from megahead.files import as_write_error
from megahead.report.tables import terminal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=checkpoint_path, required=True, metavar="DIR", help="Hugging Face folder, run, checkpoint")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", nargs="+", metavar="TEXT", help="each is continued by itself")
    given.add_argument("--file", type=existing_path, metavar="FILE", help="a prompt a line")
    given.add_argument("--interactive", action="store_true", help="take turns with the model, until an empty line")
    tokens = "longest continuation (default: 64)"
    add("--max-new-tokens", "--max-tokens", type=int, default=64, metavar="N", help=tokens)
    add("--passes", type=int, metavar="N", help="encoders: fewer are faster (default: one a token)")
    add("--temperature", type=float, default=0.8, help="0: always the likeliest token (default: 0.8)")
    add("--top-k", type=int, default=50, metavar="K", help="sample from the K likeliest; 0: from all")
    add("--top-p", type=float, default=0.95, metavar="P", help="nucleus sampling with probability P")
    add("--output", type=Path, metavar="FILE", help="append prompts and texts to it as JSON lines")
    add("--seed", type=int, default=0, help="the same seed gives the same text (default: 0)")
    arguments = parser.parse_args()
    require_at_least(1, max_new_tokens=arguments.max_new_tokens)
    if not 0 <= arguments.seed < 2**63:
        raise FieldError("--seed", "be from 0 to 2^63 - 1", got=arguments.seed)
    from megahead.evaluate.language_models import sampling_options

    sampling = sampling_options(arguments.temperature, arguments.top_k, arguments.top_p)
    console, prompts = terminal(soft_wrap=True), read_prompts(arguments.prompt, arguments.file)
    append_to(arguments.output, "")  # an error before the model is loaded
    continue_text = load_model(arguments.model, arguments.seed, arguments.passes)
    if arguments.interactive:
        run_interactive(console, continue_text, sampling, arguments)
    for prompt in prompts:
        console.print(prompt, style="bold", end="")
        text = continue_text(prompt, arguments.max_new_tokens, sampling)
        console.print(text, end="\n\n")
        append_sample(arguments.output, prompt, text)


def run_interactive(
    console: Console, continue_text: Callable[..., str], sampling: Mapping[str, Any], arguments: argparse.Namespace
) -> None:
    """Alternates between the user and the model: each appends to the text; prints tokens as they are generated."""
    text, stream = "", partial(console.print, end="")
    for line in input_lines(console):
        if line == "/new":
            text = ""
        elif line.startswith("/"):
            try:
                sampling = change_temperature(line, arguments)
            except UserError as error:
                console.print(str(error))
        else:
            text += line
            continuation = continue_text(text, arguments.max_new_tokens, sampling, stream=stream)
            console.print("\n")
            append_sample(arguments.output, text, continuation)
            text += continuation


def change_temperature(line: str, arguments: argparse.Namespace) -> Mapping[str, Any]:
    """The options of sampling after `/temperature X`; UserError for another command, or an invalid number."""
    from megahead.evaluate.language_models import sampling_options

    command, _, value = line.partition(" ")
    if command != "/temperature":
        raise FieldError("what begins with /", "be /new or /temperature X", got=line)
    try:
        temperature = float(value)
    except ValueError:
        raise FieldError("/temperature", "be followed by a number", got=value or "nothing") from None
    return sampling_options(temperature, arguments.top_k, arguments.top_p)


def append_sample(output: Path | None, prompt: str, text: str) -> None:
    """Appends a JSON line to `output`, if there is one."""
    append_to(output, json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False) + "\n")


def append_to(output: Path | None, text: str) -> None:
    """Appends `text` to `output`, if there is one; WriteError for an OSError."""
    if output is not None:
        with as_write_error(output):
            output.parent.mkdir(parents=True, exist_ok=True)
            with output.open("a", encoding="utf-8") as file:
                file.write(text)


def load_model(model: Path, seed: int, passes: int | None) -> Callable[..., str]:
    """Returns continue_text(prompt, max_new_tokens, sampling, stream=callback for text) of the model, on a GPU if there
    is one. Seeds torch with `seed`. Exports a run or checkpoint unless RUN/exports has it."""
    import torch

    from megahead.evaluate.language_models import generate_by_unmasking, generate_continuation
    from megahead.hf.export import ensure_hf_folder, holds_encoder
    from megahead.hf.loading import load_causal, load_masked, load_tokenizer_folder

    encoder = holds_encoder(model)
    if passes is not None and not encoder:
        raise FieldError("--passes", "be left out for a decoder, which writes a token in each", got=passes)
    folder = ensure_hf_folder(model)
    network = (load_masked if encoder else load_causal)(folder)
    network.to("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    tokenizer = load_tokenizer_folder(folder)
    report = terminal(stderr=True, soft_wrap=True).print
    if encoder:
        return partial(generate_by_unmasking, network, tokenizer, passes=passes, report=report)
    return partial(generate_continuation, network, tokenizer, report=report)


def read_prompts(prompts: Sequence[str] | None, file: Path | None) -> list[str]:
    """The prompts of the command line, or the lines of `file`."""
    if file is None:
        for prompt in prompts or ():
            require_utf8("--prompt", prompt)
        return list(prompts or [])
    from megahead.evaluate.harness_tasks import read_text

    lines = read_text(file).removesuffix("\n").split("\n")
    if not any(line.strip() for line in lines):
        raise DataError(f"`{file}` must hold a prompt a line, but has none; --prompt '' begins a document.")
    return lines


def require_utf8(field: str, text: str) -> None:
    """FieldError for text with bytes that are not UTF-8, which Python reads as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise FieldError(field, "be UTF-8 text", got=ascii(text)) from None


def input_lines(console: Console) -> Iterator[str]:
    """Lines of input until an empty one or the end, with a history by arrow keys; prints why one that is not UTF-8 is
    left out."""
    with suppress(ImportError):
        import readline  # noqa: F401 - importing it is enough
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # in most locales such a line is an error of its own
    with suppress(EOFError):
        while line := console.input("> "):
            try:
                require_utf8("a line", line)
            except FieldError as error:
                console.print(str(error))
            else:
                yield line
