"""How good a model is: held-out text during training (here), a checkpoint's heads (`offline`), tasks (`harness`).

The latter two need transformers, whose import costs seconds: import them by name.
"""

from megahead.evaluate.perplexity import HeldOut, HeldOutText

__all__ = ["HeldOut", "HeldOutText"]
