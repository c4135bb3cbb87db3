"""What DeepSpeed imports only when an engine is built: once here, instead of for seconds in every forked rank."""

from __future__ import annotations

import gc
import importlib

import torch

from megahead.engine.start import load_deepspeed

load_deepspeed(torch.device("cpu"))
importlib.import_module("deepspeed.runtime.zero.muon.original_muon")  # 3 s
importlib.import_module("deepspeed.module_inject.auto_ep_layer")
gc.freeze()  # DeepSpeed collects garbage whenever it starts: forked ranks need not walk through all of torch for it
