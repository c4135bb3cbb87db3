"""Continues prompts with a model: a Hugging Face folder, a run or a checkpoint (with the best head it has).

tools/generate.py --model runs/headless --prompt "The capital of France" "Once upon a time"
tools/generate.py --model runs/headless --file prompts.txt    # a prompt a line
tools/generate.py --model runs/headless --interactive         # a prompt at a time, until an empty line

`--output runs/headless/samples.jsonl` keeps them where tools/report.py finds them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megahead import convert
from megahead.errors import DataError, FieldError, existing, run_command


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.max_tokens < 1:
        raise FieldError("--max-tokens", "be at least 1", got=arguments.max_tokens)
    sampling = sampling_options(arguments.temperature, arguments.top_k, arguments.top_p)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    prompts = typed(console) if arguments.interactive else given(arguments.prompt, arguments.file)
    model, tokenizer = opened(arguments.model, arguments.seed)
    for prompt in prompts:
        if not arguments.interactive:
            console.print(prompt, style="bold", end="")
        text = continuation(model, tokenizer, prompt, arguments.max_tokens, sampling)
        console.print(text, end="\n\n")
        if arguments.output is not None:
            with arguments.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False) + "\n")


def opened(model: Path, seed: int) -> tuple[Any, Any]:
    """The model, on a GPU where there is one, and its tokenizer; what is drawn follows from `seed`."""
    import torch

    folder = convert.hf_folder(model)
    loaded = convert.load_causal(folder).to("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    return loaded, convert.load_tokenizer_folder(folder)


def given(prompts: Sequence[str] | None, file: Path | None) -> list[str]:
    """The prompts of the command line, or the lines of `file`."""
    if file is None:
        return list(prompts or [])
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise DataError(f"`{file}` must be a readable text file, but is not; check the path.") from None
    if not lines:
        raise DataError(f"`{file}` must hold a prompt a line, but is empty.")
    return lines


def typed(console: Console) -> Iterator[str]:
    """Prompts as they are typed, until an empty line or the end of input."""
    while True:
        try:
            prompt = console.input("> ")
        except EOFError:
            return
        if not prompt:
            return
        yield prompt


def continuation(model: Any, tokenizer: Any, prompt: str, max_tokens: int, sampling: dict[str, Any]) -> str:
    """Up to `max_tokens` tokens after `prompt`, up to the end of the document; an empty prompt begins one.

    A prompt longer than the model's context less `max_tokens` loses its beginning.
    """
    import torch

    room = model.config.max_position_embeddings - max_tokens
    if room < 1:
        raise FieldError("--max-tokens", f"be below the model's context ({room + max_tokens})", got=max_tokens)
    ids = tokenizer(prompt)["input_ids"][-room:] or [tokenizer.bos_token_id]
    inputs = torch.tensor([ids], device=model.device)
    options = {"max_new_tokens": max_tokens, "pad_token_id": tokenizer.pad_token_id, **sampling}
    output = model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
    text: str = tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
    return text


def sampling_options(temperature: float, top_k: int, top_p: float) -> dict[str, Any]:
    """Options of transformers' generate; temperature 0 takes the likeliest token each time."""
    if temperature < 0:
        raise FieldError("--temperature", "be at least 0", got=temperature)
    if top_k < 0:
        raise FieldError("--top-k", "be at least 0 (0: all tokens)", got=top_k)
    if not 0 < top_p <= 1:
        raise FieldError("--top-p", "be above 0 and at most 1", got=top_p)
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Continue prompts with a model.")
    parser.add_argument(
        "--model", type=existing, required=True, metavar="DIR", help="Hugging Face folder, run, checkpoint"
    )
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", nargs="+", metavar="TEXT", help="each is continued by itself")
    prompts.add_argument("--file", type=existing, metavar="FILE", help="a prompt a line")
    prompts.add_argument("--interactive", action="store_true", help="ask for prompts, until an empty line")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="longest continuation (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=50, metavar="K", help="draw among the K likeliest; 0: all")
    parser.add_argument("--top-p", type=float, default=0.95, metavar="P", help="draw among the likeliest P of mass")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="adds prompts and texts to it, a JSON object a line"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (default: 0)")
    return parser


if __name__ == "__main__":
    run_command(main)
