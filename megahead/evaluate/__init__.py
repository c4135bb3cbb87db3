"""How good a model is: held-out text during and after training, and the harness's tasks on exported models."""

from megahead.evaluate.offline import evaluate_checkpoint
from megahead.evaluate.perplexity import HeldOut, HeldOutText

__all__ = ["HeldOut", "HeldOutText", "evaluate_checkpoint"]
