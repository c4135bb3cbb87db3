"""What a run learns: the module that maps a batch to a loss, and the batches it is given."""

from megahead import lazy_getattr

__getattr__ = lazy_getattr("megahead", {"losses.contrastive": ("cwt_loss",)})
