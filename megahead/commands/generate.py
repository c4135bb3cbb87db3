"""Continues prompts with a model: a Hugging Face folder, a run or a checkpoint (with a trained head where it has one,
else one that needs no training).

megahead generate --model runs/headless --prompt "The capital of France" "Once upon a time"
megahead generate --model runs/headless --file prompts.txt    # a prompt a line
megahead generate --model runs/headless --interactive         # you and the model by turns, until an empty line

In --interactive each line that you type continues what stands there; `/new` begins a text, `/temperature 0.5` changes
how words are drawn.

An encoder (one trained by masked diffusion) writes --max-new-tokens tokens after a prompt, in random order, in --passes
passes through the model.

`--output runs/headless/samples.jsonl` keeps them where `megahead report` finds them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from rich.console import Console

from megahead.checkpoints.arguments import existing_or_fetched
from megahead.errors import DataError, FieldError, UserError, existing_path, require_at_least
from megahead.terminal import terminal


def main() -> None:
    arguments = _parser().parse_args()
    require_at_least(1, max_new_tokens=arguments.max_new_tokens)
    if not 0 <= arguments.seed < 2**63:
        raise FieldError("--seed", "be from 0 to 2^63 - 1", got=arguments.seed)
    from megahead.evaluate.generation import sampling_options

    sampling = sampling_options(arguments.temperature, arguments.top_k, arguments.top_p)
    console = terminal(soft_wrap=True)
    if arguments.interactive:
        by_turns(console, load_model(arguments.model, arguments.seed, arguments.passes), arguments)
        return
    prompts = given_prompts(arguments.prompt, arguments.file)
    go_on = load_model(arguments.model, arguments.seed, arguments.passes)
    for prompt in prompts:
        console.print(prompt, style="bold", end="")
        text = go_on(prompt, arguments.max_new_tokens, sampling)
        console.print(text, end="\n\n")
        keep(arguments.output, prompt, text)


def by_turns(console: Console, go_on: Callable[..., str], arguments: argparse.Namespace) -> None:
    """Each line that is typed continues the text so far, and the model continues that, printing as it writes."""
    from megahead.evaluate.generation import sampling_options

    text, temperature = "", arguments.temperature
    for typed in typed_lines(console):
        if typed == "/new":
            text = ""
            continue
        if typed.startswith("/"):
            try:
                temperature = new_temperature(typed)
            except UserError as error:
                console.print(str(error))
            continue
        text += typed
        sampling = sampling_options(temperature, arguments.top_k, arguments.top_p)
        written = go_on(text, arguments.max_new_tokens, sampling, stream=partial(console.print, end=""))
        console.print("\n")
        keep(arguments.output, text, written)
        text += written


def new_temperature(typed: str) -> float:
    """Of `/temperature X`; UserError for another word, or a number that it cannot be."""
    from megahead.evaluate.generation import sampling_options

    command, _, value = typed.partition(" ")
    if command != "/temperature":
        raise FieldError("what begins with /", "be /new or /temperature X", got=typed)
    try:
        temperature = float(value)
    except ValueError:
        raise FieldError("/temperature", "be followed by a number", got=value or "nothing") from None
    sampling_options(temperature, 0, 1)
    return temperature


def keep(output: Path | None, prompt: str, text: str) -> None:
    """Adds a line to `output`."""
    if output is not None:
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False) + "\n")


def load_model(model: Path, seed: int, passes: int | None) -> Callable[..., str]:
    """What continues (prompt, most tokens, how to sample; `stream` receives the text as it is written) with the model,
    on a GPU if there is one; seeds torch's random numbers with `seed`. A run or checkpoint is exported first, unless it
    has been (RUN/exports)."""
    import torch

    from megahead.evaluate.generation import generate_by_unmasking, generate_continuation
    from megahead.hf.export import ensure_hf_folder
    from megahead.hf.published import is_encoder, load_causal, load_masked, load_tokenizer_folder

    folder = ensure_hf_folder(model)
    encoder = is_encoder(folder)
    if passes is not None and not encoder:
        raise FieldError("--passes", "be left out for a decoder, which writes a token in each", got=passes)
    loaded = (load_masked if encoder else load_causal)(folder)
    loaded.to("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    tokenizer = load_tokenizer_folder(folder)
    report = terminal(stderr=True, soft_wrap=True).print
    if encoder:
        return partial(generate_by_unmasking, loaded, tokenizer, passes=passes, report=report)
    return partial(generate_continuation, loaded, tokenizer, report=report)


def given_prompts(prompts: Sequence[str] | None, file: Path | None) -> list[str]:
    """The prompts of the command line, or the lines of `file`."""
    if file is None:
        for prompt in prompts or ():
            try:
                prompt.encode()
            except UnicodeEncodeError:
                raise FieldError("--prompt", "be UTF-8 text", got=ascii(prompt)) from None
        return list(prompts or [])
    try:
        lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError):
        raise DataError(f"`{file}` must be a readable text file, but is not; check the path.") from None
    if not any(line.strip() for line in lines):
        raise DataError(f"`{file}` must hold a prompt a line, but has none; --prompt '' begins a document.")
    return lines


def typed_lines(console: Console) -> Iterator[str]:
    """Lines as they are typed, until an empty one or the end of input; arrows bring earlier ones back."""
    with suppress(ImportError):
        import readline  # noqa: F401 - importing it is enough
    with suppress(EOFError):
        while line := console.input("> "):
            yield line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=existing_or_fetched, required=True, metavar="DIR", help="Hugging Face folder, run, checkpoint")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", nargs="+", metavar="TEXT", help="each is continued by itself")
    prompts.add_argument("--file", type=existing_path, metavar="FILE", help="a prompt a line")
    prompts.add_argument("--interactive", action="store_true", help="you and the model by turns, until an empty line")
    most = "longest continuation (default: 64)"
    add("--max-new-tokens", "--max-tokens", type=int, default=64, metavar="N", help=most)
    add("--passes", type=int, metavar="N", help="encoders: fewer are faster (default: one a token)")
    add("--temperature", type=float, default=0.8, help="0: always the likeliest token (default: 0.8)")
    add("--top-k", type=int, default=50, metavar="K", help="sample from the K likeliest; 0: from all")
    add("--top-p", type=float, default=0.95, metavar="P", help="nucleus sampling with probability P")
    add("--output", type=Path, metavar="FILE", help="adds prompts and texts to it, a JSON object a line")
    add("--seed", type=int, default=0, help="the same seed gives the same text (default: 0)")
    return parser
