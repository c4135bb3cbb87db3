"""megahead: headless language models at scale (contrastive weight tying on DeepSpeed).

What scripts and notebooks need is here by name, imported when first asked for: `import megahead` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megahead.config import RunConfig, load_config
    from megahead.convert import export, load_backbone
    from megahead.corpus import IndexedDataset, IndexedDatasetWriter, preprocess
    from megahead.evaluate.offline import evaluate_checkpoint
    from megahead.objectives import cwt_loss
    from megahead.train import Run, pretrain

__version__ = "0.1.0"

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

_HOMES = {
    "IndexedDataset": "corpus",
    "IndexedDatasetWriter": "corpus",
    "Run": "train",
    "RunConfig": "config",
    "cwt_loss": "objectives",
    "evaluate_checkpoint": "evaluate.offline",
    "export": "convert",
    "load_backbone": "convert",
    "load_config": "config",
    "preprocess": "corpus",
    "pretrain": "train",
}
"""Name to the part of the package that has it."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
