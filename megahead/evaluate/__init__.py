"""How good a model is: held-out text during training, and the harness's tasks on exported models."""

from megahead.evaluate.perplexity import HeldOut, HeldOutText

__all__ = ["HeldOut", "HeldOutText"]
