"""Fine-tuning on GLUE, SuperGLUE and XNLI: tasks and their files, encoding, a plain loop, results over seeds.

Needs transformers, whose import costs seconds: imported by name, not with `megahead.evaluate`.
"""

from megahead.evaluate.finetuning.comparison import Comparison
from megahead.evaluate.finetuning.loading import Sources, TaskData, expand, load_task
from megahead.evaluate.finetuning.loop import EpochScores
from megahead.evaluate.finetuning.results import FineTuningResult, FineTuningResults, Summary, summarise
from megahead.evaluate.finetuning.run import FineTuningRun, StartModel
from megahead.evaluate.finetuning.settings import FineTuning, paper_settings
from megahead.evaluate.finetuning.task_table import TASKS, XNLI_LANGUAGES

__all__ = [
    "TASKS",
    "XNLI_LANGUAGES",
    "Comparison",
    "EpochScores",
    "FineTuning",
    "FineTuningResult",
    "FineTuningResults",
    "FineTuningRun",
    "Sources",
    "StartModel",
    "Summary",
    "TaskData",
    "expand",
    "load_task",
    "paper_settings",
    "summarise",
]
