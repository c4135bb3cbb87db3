"""The precisions that this machine computes in."""

from __future__ import annotations

import pytest
import torch

FP16_HERE = torch.ops.mkldnn._is_mkldnn_fp16_supported()
PRECISIONS = ["fp32", "bf16", *(["fp16"] if FP16_HERE else [])]
NEEDS_FP16 = pytest.mark.skipif(not FP16_HERE, reason="no fp16 arithmetic here")
FP16 = pytest.param("fp16", marks=NEEDS_FP16)
