"""How good a model is: perplexity of held-out text, tasks of lm-eval, fine-tuning, synonyms, generated text.

*Head*: what turns hidden states into scores of tokens; `pmi` is the training-free head (the input embeddings and a bias
of counted log-frequencies), `tied` the embeddings alone, `trained` a matrix of its own. *Harness*: lm-eval. *Row*: the
tokens of one forward pass, and the places whose outputs are scored. *Result cache*: a file of results, in which an
interrupted comparison finds those that it has.

Most of it needs torch, some of it transformers: imported at the first use of a name, not with the package.
"""

from typing import TYPE_CHECKING

from megahead.on_first_use import on_first_use

if TYPE_CHECKING:
    from megahead.evaluate.generation import continuation, sampling_options
    from megahead.evaluate.geometry import Geometry, measure_geometry
    from megahead.evaluate.harness import evaluate_harness, evaluate_tasks
    from megahead.evaluate.offline import evaluate_checkpoint
    from megahead.evaluate.perplexity import ValidationResult, ValidationSet
    from megahead.evaluate.pseudo import PseudoPerplexity, pseudo_perplexity
    from megahead.evaluate.synonyms import Similarities, similarities, synonym_pairs
    from megahead.evaluate.unmasking import unmasked_continuation

__all__ = [
    "Geometry",
    "PseudoPerplexity",
    "Similarities",
    "ValidationResult",
    "ValidationSet",
    "continuation",
    "evaluate_checkpoint",
    "evaluate_harness",
    "evaluate_tasks",
    "measure_geometry",
    "pseudo_perplexity",
    "sampling_options",
    "similarities",
    "synonym_pairs",
    "unmasked_continuation",
]

__getattr__ = on_first_use(
    __name__,
    geometry=("Geometry", "measure_geometry"),
    generation=("continuation", "sampling_options"),
    harness=("evaluate_harness", "evaluate_tasks"),
    offline=("evaluate_checkpoint",),
    perplexity=("ValidationResult", "ValidationSet"),
    pseudo=("PseudoPerplexity", "pseudo_perplexity"),
    synonyms=("Similarities", "similarities", "synonym_pairs"),
    unmasking=("unmasked_continuation",),
)
