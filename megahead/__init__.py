"""megahead: headless language models at scale (contrastive weight tying on DeepSpeed).

What scripts and notebooks need is here by name, imported when first asked for: `import megahead` needs no torch.
"""

from typing import TYPE_CHECKING

from megahead.on_first_use import on_first_use as _on_first_use
from megahead.version import __version__ as __version__

if TYPE_CHECKING:
    from megahead.config import RunConfig, load_config
    from megahead.convert import export, load_backbone
    from megahead.corpus import IndexedDataset, IndexedDatasetWriter, preprocess
    from megahead.evaluate import evaluate_checkpoint
    from megahead.objectives import cwt_loss
    from megahead.train import Run, pretrain

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
]

__getattr__ = _on_first_use(
    __name__,
    config=("RunConfig", "load_config"),
    convert=("export", "load_backbone"),
    corpus=("IndexedDataset", "IndexedDatasetWriter", "preprocess"),
    evaluate=("evaluate_checkpoint",),
    objectives=("cwt_loss",),
    train=("Run", "pretrain"),
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
