"""What takes seconds to import, some of it only when an engine is built: once, before ranks are forked from here."""

from __future__ import annotations

import gc
import importlib
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported, which torch's own modules below may do

import torch._dynamo
import torch.testing
import torch.utils.tensorboard

from megahead.engine.start import load_deepspeed

torch.set_num_threads(1)
load_deepspeed(torch.device("cpu"))  # ranks of tests are CPU processes; GPU runs are processes of their own
importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
importlib.import_module("deepspeed.module_inject.auto_ep_layer")
gc.freeze()  # DeepSpeed collects garbage whenever it starts: forked ranks need not walk through all of torch for it
