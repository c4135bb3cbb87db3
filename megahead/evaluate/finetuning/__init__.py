"""Fine-tuning on GLUE, SuperGLUE and XNLI: tasks and their files, encoding, a plain loop, results over seeds.

What trains needs transformers: imported with the first use of a name, not with the package.
"""

from typing import TYPE_CHECKING

from megahead import on_first_use
from megahead.evaluate.finetuning.loading import Sources, TaskData, expand, load_task
from megahead.evaluate.finetuning.settings import FineTuning, LossName, paper_settings
from megahead.evaluate.finetuning.tasks import TASKS, XNLI_LANGUAGES

if TYPE_CHECKING:
    from megahead.evaluate.finetuning.comparison import Comparison, told
    from megahead.evaluate.finetuning.loop import EpochScores
    from megahead.evaluate.finetuning.outcome import Outcome, Outcomes, Summary, summarise
    from megahead.evaluate.finetuning.run import Contest, Starting
    from megahead.evaluate.finetuning.scoring import measure

__all__ = [
    "TASKS",
    "XNLI_LANGUAGES",
    "Comparison",
    "Contest",
    "EpochScores",
    "FineTuning",
    "LossName",
    "Outcome",
    "Outcomes",
    "Sources",
    "Starting",
    "Summary",
    "TaskData",
    "expand",
    "load_task",
    "measure",
    "paper_settings",
    "summarise",
    "told",
]

__getattr__ = on_first_use(
    __name__,
    comparison=("Comparison", "told"),
    loop=("EpochScores",),
    outcome=("Outcome", "Outcomes", "Summary", "summarise"),
    run=("Contest", "Starting"),
    scoring=("measure",),
)
