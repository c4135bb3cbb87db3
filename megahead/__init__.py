"""megahead: headless language models at scale (contrastive weight tying on DeepSpeed)."""

__version__ = "0.1.0"
