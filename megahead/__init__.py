"""megahead: headless language models at scale (contrastive weight tying on DeepSpeed).

What scripts and notebooks need is here by name, imported when first asked for: `import megahead` needs no torch.
"""

from typing import TYPE_CHECKING

from megahead.lazy import on_first_use as _on_first_use
from megahead.version import __version__ as __version__

if TYPE_CHECKING:
    from megahead.config.loading import load_config
    from megahead.config.run import RunConfig
    from megahead.data.indexed import IndexedDataset
    from megahead.data.preprocess import preprocess
    from megahead.data.writer import IndexedDatasetWriter
    from megahead.evaluate.perplexity import evaluate_checkpoint
    from megahead.hf.export import export
    from megahead.hf.published import load_backbone
    from megahead.losses.contrastive import cwt_loss
    from megahead.quickstart import start
    from megahead.train.run import Run, pretrain

__all__ = [
    "IndexedDataset",
    "IndexedDatasetWriter",
    "Run",
    "RunConfig",
    "cwt_loss",
    "evaluate_checkpoint",
    "export",
    "load_backbone",
    "load_config",
    "preprocess",
    "pretrain",
    "start",
]

__getattr__ = _on_first_use(
    __name__,
    {
        "config.loading": ("load_config",),
        "config.run": ("RunConfig",),
        "data.indexed": ("IndexedDataset",),
        "data.preprocess": ("preprocess",),
        "data.writer": ("IndexedDatasetWriter",),
        "evaluate.perplexity": ("evaluate_checkpoint",),
        "hf.export": ("export",),
        "hf.published": ("load_backbone",),
        "losses.contrastive": ("cwt_loss",),
        "quickstart": ("start",),
        "train.run": ("Run", "pretrain"),
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
