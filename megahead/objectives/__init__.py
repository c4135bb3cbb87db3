"""What a run learns: the module that maps a batch to a loss, and the batches it is given."""

from megahead.lazy import on_first_use

__getattr__ = on_first_use("megahead", {"losses.contrastive": ("cwt_loss",)})
