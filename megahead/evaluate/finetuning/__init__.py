"""Fine-tuning on GLUE, SuperGLUE and XNLI: tasks and their files, encoding, a plain loop, results over seeds.

Training needs transformers, which is imported at the first use of a name, not with the package.
"""

from typing import TYPE_CHECKING

from megahead.evaluate.finetuning.loading import Sources, TaskData, expand, load_task
from megahead.evaluate.finetuning.settings import FineTuning, LossName, paper_settings
from megahead.evaluate.finetuning.task_table import TASKS, XNLI_LANGUAGES
from megahead.on_first_use import on_first_use

if TYPE_CHECKING:
    from megahead.evaluate.finetuning.comparison import Comparison
    from megahead.evaluate.finetuning.loop import EpochScores
    from megahead.evaluate.finetuning.results import FineTuningResult, FineTuningResults, Summary, summarise
    from megahead.evaluate.finetuning.run import FineTuningRun, InitialModel
    from megahead.evaluate.finetuning.scoring import measure
    from megahead.evaluate.finetuning.table import comparison_table

__all__ = [
    "TASKS",
    "XNLI_LANGUAGES",
    "Comparison",
    "EpochScores",
    "FineTuning",
    "FineTuningResult",
    "FineTuningResults",
    "FineTuningRun",
    "InitialModel",
    "LossName",
    "Sources",
    "Summary",
    "TaskData",
    "comparison_table",
    "expand",
    "load_task",
    "measure",
    "paper_settings",
    "summarise",
]

__getattr__ = on_first_use(
    __name__,
    comparison=("Comparison",),
    loop=("EpochScores",),
    results=("FineTuningResult", "FineTuningResults", "Summary", "summarise"),
    run=("FineTuningRun", "InitialModel"),
    scoring=("measure",),
    table=("comparison_table",),
)
