"""The settings of a run: a frozen, documented schema, read from YAML and `--set` overrides. Imports no torch.

*Headless*: trained by contrastive weight tying, a softmax over the input embeddings of the targets of a candidate
group; *vanilla*: by the usual softmax over the whole vocabulary. *Candidate group*: consecutive samples of a global
batch whose targets are candidates for each other. *Plan*: a config and its number of ranks, with all that follows from
both.
"""

from megahead.config.batch import BatchConfig
from megahead.config.data import DataConfig
from megahead.config.deepspeed import deepspeed_config
from megahead.config.dropping import DroppingConfig
from megahead.config.families import ENCODERS, NAMED_SIZES
from megahead.config.init import InitConfig
from megahead.config.loading import config_from_checkpoint, config_from_dict, load_config
from megahead.config.masked_inputs import MaskedInputsConfig
from megahead.config.masking import MaskingConfig
from megahead.config.model import ModelConfig
from megahead.config.objective import HeadName, ObjectiveConfig, resolve_candidate_group_samples
from megahead.config.parallel import ParallelConfig
from megahead.config.phases import Phase, learn_alike, names_of, phase_at, phase_that_saved, phases_of
from megahead.config.phrases import PhrasesConfig
from megahead.config.plan import RunPlan
from megahead.config.resilience import FaultsConfig, ResumeConfig
from megahead.config.rotary import RotaryScalingConfig
from megahead.config.run import RunConfig
from megahead.config.tasks import TasksConfig
from megahead.config.training import EngineConfig, OptimizerConfig, ScheduleConfig, TrainingConfig

__all__ = [
    "ENCODERS",
    "NAMED_SIZES",
    "BatchConfig",
    "DataConfig",
    "DroppingConfig",
    "EngineConfig",
    "FaultsConfig",
    "HeadName",
    "InitConfig",
    "MaskedInputsConfig",
    "MaskingConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Phase",
    "PhrasesConfig",
    "ResumeConfig",
    "RotaryScalingConfig",
    "RunConfig",
    "RunPlan",
    "ScheduleConfig",
    "TasksConfig",
    "TrainingConfig",
    "config_from_checkpoint",
    "config_from_dict",
    "deepspeed_config",
    "learn_alike",
    "load_config",
    "names_of",
    "phase_at",
    "phase_that_saved",
    "phases_of",
    "resolve_candidate_group_samples",
]
