"""A run's checkpoints, copied to an object store while it trains, and fetched from there where a disk is empty.

The *mirror* has the layout of a run's folder. A checkpoint in it is *named* once its `checkpoint.json` is there, which
is sent last, when all else was read back: stores rename nothing, but put one small file whole or not at all. *Remains*:
files of a checkpoint without a name.
"""

from typing import TYPE_CHECKING

from megahead.on_first_use import on_first_use

if TYPE_CHECKING:
    from megahead.mirror.arguments import far_or_existing
    from megahead.mirror.downloading import Terms
    from megahead.mirror.far_run import FarRun, patience_with
    from megahead.mirror.fetching import Fetched, fetch_named, fetch_newer
    from megahead.mirror.news import News
    from megahead.mirror.ownership import Claim, announce, refuse_another_mirror
    from megahead.mirror.upload import Mirror

__all__ = [
    "Claim",
    "FarRun",
    "Fetched",
    "Mirror",
    "News",
    "Terms",
    "announce",
    "far_or_existing",
    "fetch_named",
    "fetch_newer",
    "patience_with",
    "refuse_another_mirror",
]

__getattr__ = on_first_use(
    __name__,
    arguments=("far_or_existing",),
    downloading=("Terms",),
    far_run=("FarRun", "patience_with"),
    fetching=("Fetched", "fetch_named", "fetch_newer"),
    news=("News",),
    ownership=("Claim", "announce", "refuse_another_mirror"),
    upload=("Mirror",),
)
