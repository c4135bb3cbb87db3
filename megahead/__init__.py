"""megahead: headless language models at scale (contrastive weight tying on DeepSpeed).

The public names for scripts and notebooks, imported when first used: `import megahead` imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megahead.config.loading import load_config
    from megahead.config.run import RunConfig
    from megahead.data.indexed import IndexedDataset
    from megahead.data.preprocess import preprocess
    from megahead.data.writer import IndexedDatasetWriter
    from megahead.evaluate.perplexity import evaluate_checkpoint
    from megahead.hf.export import export
    from megahead.hf.loading import load_backbone
    from megahead.losses.contrastive import cwt_loss
    from megahead.quickstart import start
    from megahead.train.run import Run, pretrain

__version__ = "0.2.0"

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


def lazy_getattr(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A package's `__getattr__`, which imports a submodule when a name of it is used. `names`: {submodule: public
    names}."""
    module_by_name = {name: module for module, exported in names.items() for name in exported}

    def import_name(name: str) -> Any:
        if name not in module_by_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module_by_name[name]}"), name)

    return import_name


__getattr__ = lazy_getattr(
    __name__,
    {
        "config.loading": ("load_config",),
        "config.run": ("RunConfig",),
        "data.indexed": ("IndexedDataset",),
        "data.preprocess": ("preprocess",),
        "data.writer": ("IndexedDatasetWriter",),
        "evaluate.perplexity": ("evaluate_checkpoint",),
        "hf.export": ("export",),
        "hf.loading": ("load_backbone",),
        "losses.contrastive": ("cwt_loss",),
        "quickstart": ("start",),
        "train.run": ("Run", "pretrain"),
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
