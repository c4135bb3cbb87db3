"""Every attention backend gives what the formula gives, values and gradients; which is chosen where."""

from __future__ import annotations

import inspect
import sys
import types

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode

from megahead.errors import ConfigError
from megahead.models import attention_backends as attention_kernels
from megahead.models.attention_backends import BACKENDS, AttentionSpec, attend, choose_backend
from megahead.models.documents import Documents
from support.exact_attention import POSITIONS, random_qkv, relative_errors

CPU = AttentionSpec(torch.device("cpu"), torch.float64, head_size=8)
HERE = [backend.attend for backend in BACKENDS.values() if not backend.unsupported_reason(CPU)]


@pytest.mark.parametrize("way", [attend, *HERE])
@pytest.mark.parametrize("positions", [None, POSITIONS])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 6])
def test_every_way_equals_the_formula(way, positions: Tensor | None, causal: bool, window: int | None) -> None:
    assert max(relative_errors(way, random_qkv(), positions, causal, window)) < 1e-12


@pytest.mark.parametrize("way", [attend, *HERE])
@pytest.mark.parametrize("positions", [None, POSITIONS])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [2, 6])
def test_fewer_key_heads_serve_as_many_queries_in_turn(
    way, positions: Tensor | None, causal: bool, window: int
) -> None:
    q, k, v = random_qkv(shape=(2, 7, 6, 8))
    documents = (Documents.whole_rows(2, 7) if positions is None else Documents(positions)).with_window(window)
    k, v = k[:, :, :2], v[:, :, :2]
    whole = [x.repeat_interleave(3, 2) for x in (k, v)]
    found, expected = way(q, k, v, documents, causal=causal), way(q, *whole, documents, causal=causal)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("way", HERE)
@pytest.mark.parametrize("window", [None, 2])
def test_every_way_is_within_half_precisions_rounding(way, window: int | None) -> None:
    errors = relative_errors(way, random_qkv(dtype=torch.bfloat16), POSITIONS, True, window)
    assert max(errors) < torch.finfo(torch.bfloat16).eps


def test_a_cpu_goes_document_by_document_and_refuses_kernels() -> None:
    assert choose_backend("auto", CPU).name == "documents"
    assert choose_backend("auto", CPU._replace(masked=True)).name == "sdpa"
    assert choose_backend("sdpa", CPU).name == "sdpa"
    sentence = (
        "`engine.attention` must serve this run, but is `varlen` instead; it needs a CUDA device, not cpu; try `auto`."
    )
    with pytest.raises(ConfigError) as told:
        choose_backend("varlen", CPU)
    assert str(told.value) == sentence


@pytest.mark.parametrize(
    ("capability", "installed", "half", "dropout", "best"),
    [
        ((9, 0), {"flash_attn", "flash_attn_interface", "flash_attn.cute"}, True, 0.0, "flash3"),
        ((10, 0), {"flash_attn", "flash_attn_interface", "flash_attn.cute"}, True, 0.0, "flash4"),
        ((9, 0), {"flash_attn", "flash_attn_interface"}, True, 0.1, "flash2"),
        ((9, 0), set(), True, 0.0, "varlen"),
        ((8, 0), {"flash_attn_interface"}, True, 0.0, "varlen"),
        ((9, 0), set(), True, 0.1, "varlen"),
        ((9, 0), {"flash_attn"}, False, 0.0, "sdpa"),
        ((7, 5), {"flash_attn"}, True, 0.0, "sdpa"),
    ],
)
def test_the_best_way_for_a_gpu(monkeypatch, capability, installed: set[str], half: bool, dropout: float, best: str):
    from megahead.models import attention_backends as backends

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    there = {*installed, "torch.nn.attention.varlen"}
    monkeypatch.setattr(backends, "_import_error", lambda module, name: "" if module in there else f"no {module}")
    spec = AttentionSpec(torch.device("cuda"), torch.bfloat16 if half else torch.float32, 64, dropout)
    assert choose_backend.__wrapped__("auto", spec).name == best


def test_a_kernel_without_local_attention_leaves_it_to_the_next(monkeypatch) -> None:
    from megahead.models import attention_backends as backends

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(backends, "_import_error", lambda module, name: "")
    spec = AttentionSpec(torch.device("cuda"), torch.bfloat16, 64, local=True)
    assert choose_backend.__wrapped__("auto", spec).name == "flash2"
    with pytest.raises(ConfigError, match="but is `flash4` instead; it has no local attention; try `auto`"):
        choose_backend.__wrapped__("flash4", spec)


def test_a_kernel_that_is_not_installed_is_named(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    told = BACKENDS["flash3"].unsupported_reason(AttentionSpec(torch.device("cuda"), torch.bfloat16, 64))
    assert "flash_attn_interface.flash_attn_varlen_func cannot be imported (No module named" in told


def stand_in(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, deterministic, window_size=(-1, -1), **_
):
    """What flash-attn's function computes, sequence by sequence, with a second result as some versions have."""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k >= max(cu_seqlens_q.diff())
    left, right = (len(q) if size < 0 else size for size in window_size)
    parts = zip(*(x.split(cu_seqlens_q.diff().tolist()) for x in (q, k, v)), strict=True)
    outputs = []
    for part in parts:
        mask = torch.ones(len(part[0]), len(part[0]), dtype=torch.bool).triu(-left).tril(0 if causal else right)
        heads = (x.transpose(0, 1) for x in part)
        outputs.append(F.scaled_dot_product_attention(*heads, mask, enable_gqa=True).transpose(0, 1))
    return torch.cat(outputs), None


@pytest.mark.parametrize("name", ["flash2", "flash3", "flash4"])
@pytest.mark.parametrize("positions", [None, POSITIONS])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 2])
def test_flash_attention_is_told_where_documents_begin_and_how_far_tokens_see(
    monkeypatch, name: str, positions: Tensor | None, causal: bool, window: int | None
):
    module, function = BACKENDS[name].kernel
    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**{function: stand_in}))
    assert max(relative_errors(BACKENDS[name].attend, random_qkv(), positions, causal, window)) < 1e-12


@pytest.mark.parametrize("name", ["flash2", "flash3", "flash4"])
def test_flash_attention_gets_fewer_key_heads_as_they_are(monkeypatch, name: str) -> None:
    module, function = BACKENDS[name].kernel
    heads = []

    def noting(q, k, v, **told):
        heads.append((q.shape[-2], k.shape[-2], v.shape[-2]))
        return stand_in(q, k, v, **told)

    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**{function: noting}))
    q, k, v = random_qkv(shape=(2, 7, 6, 8))
    shared = k[:, :, :2], v[:, :, :2]
    whole = [x.repeat_interleave(3, 2) for x in shared]
    found = BACKENDS[name].attend(q, *shared, Documents(POSITIONS))
    torch.testing.assert_close(found, attend(q, *whole, Documents(POSITIONS)), rtol=0, atol=1e-12)
    assert heads == [(6, 2, 2)]


class Called(TorchDispatchMode):
    """Knows which operators were called, with what."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: dict[str, tuple[object, ...]] = {}
        self.named: dict[str, dict[str, object]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operators[function._schema.name], self.named[function._schema.name] = args, kwargs or {}
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dropout", "operator"), [(0.0, "torch_attn::_varlen_attn"), (0.1, "aten::_flash_attention_forward")]
)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 2])
def test_torchs_kernel_takes_rows_of_documents_with_dropout_and_without(
    dropout: float, operator: str, causal: bool, window: int | None
):
    """Shapes alone, on no device; what is computed needs a GPU."""
    qkv = torch.randn(3, 2, 7, 3, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
    documents = Documents(POSITIONS.to("meta"), torch.empty(6, dtype=torch.int32, device="meta"), window=window)
    with Called() as called:
        output = BACKENDS["varlen"].attend(*qkv, documents, dropout, causal=causal)
        (gradient,) = torch.autograd.grad(output.sum(), qkv)
    assert (output.shape, gradient.shape) == ((2, 7, 3, 8), qkv.shape)
    given = called.operators[operator]
    assert all(x is documents.cu_seqlens for x in given[3:5])
    assert given[5:7] == (7, 7)
    assert not dropout or given[7:9] == (dropout, causal)
    left, right = -1 if window is None else window, 0 if causal else (-1 if window is None else window)
    if dropout and window is not None:
        assert called.named[operator] == {"window_size_left": left, "window_size_right": right}
    if not dropout:
        assert given[9] == [left, right]


def test_torchs_kernel_is_asked_for_shared_keys_only_where_there_are_some_and_it_knows_them(monkeypatch) -> None:
    """That of torch 2.11 has no `enable_gqa`: there each head gets keys of its own."""
    heads: list[int] = []

    def of_torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
        heads.extend((query.shape[1], key.shape[1], value.shape[1]))
        return query

    monkeypatch.setattr(varlen, "varlen_attn", of_torch_2_11)
    documents = Documents(POSITIONS, torch.empty(6, dtype=torch.int32))
    q, k = torch.randn(2, 7, 4, 8), torch.randn(2, 7, 2, 8)
    BACKENDS["varlen"].attend(q, q, q, documents)
    monkeypatch.setattr(attention_kernels, "VARLEN_HAS_GQA", False)
    BACKENDS["varlen"].attend(q, k, k, documents)
    assert heads == [4] * 6
    asked: list[bool] = []

    def of_torch_2_12(query, key, *rest, enable_gqa=False, **options):
        asked.append(enable_gqa)
        heads.append(key.shape[1])
        return query

    monkeypatch.setattr(varlen, "varlen_attn", of_torch_2_12)
    monkeypatch.setattr(attention_kernels, "VARLEN_HAS_GQA", True)
    BACKENDS["varlen"].attend(q, k, k, documents)
    assert (asked, heads[6:]) == ([True], [2])


def test_torchs_kernel_knows_shared_keys_where_we_think_so() -> None:
    known = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
    assert known == attention_kernels.VARLEN_HAS_GQA
