"""Compares encoders by pseudo-perplexity on texts: each token is masked, and predicted from all others of its text.

megahead pseudo-perplexity --model exports/headless exports/vanilla --input held-out.jsonl --texts 200
"""

from __future__ import annotations

import argparse
from itertools import islice

from megahead.commands import checkpoint_path
from megahead.data.train_tokenizer import sample_texts
from megahead.errors import require_at_least
from megahead.report.tables import terminal, to_rich


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=checkpoint_path, nargs="+", required=True, metavar="DIR", help="masked language models")
    add("--input", nargs="+", required=True, metavar="F", help="text, as `megahead preprocess` takes it")
    add("--texts", type=int, default=100, metavar="N", help="the first N documents (default: 100)")
    add("--max-length", type=int, default=128, metavar="N", help="tokens of a document (default: 128)")
    add("--batch-size", type=int, default=64, metavar="N", help="masked copies at once (default: 64)")
    arguments = parser.parse_args()
    require_at_least(1, texts=arguments.texts, batch_size=arguments.batch_size)
    require_at_least(3, max_length=arguments.max_length)
    texts = list(islice(sample_texts(arguments.input), arguments.texts))
    from megahead.evaluate.language_models import pseudo_perplexity
    from megahead.hf.export import ensure_encoder_folder

    rows: list[dict[str, object]] = []
    limits = {"max_length": arguments.max_length, "batch_size": arguments.batch_size}
    for model in arguments.model:
        tokens, perplexity = pseudo_perplexity(ensure_encoder_folder(model), texts, **limits)
        rows.append({"model": str(model), "tokens": tokens, "pseudo-perplexity": perplexity})
    terminal().print(to_rich(rows))
