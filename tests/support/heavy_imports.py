"""What takes seconds to import, some of it only when an engine is built: once, before ranks are forked from here."""

from __future__ import annotations

import gc
import importlib
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported, which torch's own modules below may do

import torch._dynamo
import torch.distributed.elastic.rendezvous.dynamic_rendezvous
import torch.testing
import torch.utils.tensorboard

from megahead.engine.deepspeed import load_deepspeed
from support.huge_pages import collapse_at_forks

torch.set_num_threads(1)
load_deepspeed(torch.device("cpu"))  # ranks of tests are CPU processes; GPU runs are processes of their own
for on_first_use in (
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.original_muon",
    "deepspeed.utils.pin_memory",
    "torch._subclasses.schema_check_mode",
):
    importlib.import_module(on_first_use)

# torchrun names the method of each of its steps, for which it looks through all modules: here 0.1 to 0.4 s
torch.distributed.elastic.rendezvous.dynamic_rendezvous.get_method_name = lambda depth=2: ""

# DeepSpeed collects garbage whenever it starts: a fork need not walk through, and thereby copy, all it was born with
gc.freeze()
os.register_at_fork(after_in_child=gc.freeze)
collapse_at_forks(every=16)
