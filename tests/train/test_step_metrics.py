"""What the micro-batches of a step measured, as all ranks are told it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import pytest
import torch

from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.engine.engine import ForwardTimer
from megahead.train import loop
from megahead.train.run import pretrain
from megahead.train.step import GatheredMetrics, StepMetrics
from support.on_ranks import on_ranks
from support.small_run import small_config, write_text

CPU = torch.device("cpu")


def noted_of(k: int) -> dict[str, torch.Tensor]:
    """Of a batch of data rank k."""
    return {"loss": torch.tensor(1.5 + k), "count": torch.tensor(10), "found": torch.tensor(1 + k)}


def told(group: Group, tensor_ranks: int) -> list[GatheredMetrics]:
    """Of two steps: the first has two micro-batches, the second one."""
    step_metrics, time = StepMetrics(group, tensor_ranks), ForwardTimer(CPU)
    steps = []
    for count in (2, 1):
        for _ in range(count):
            step_metrics.record(noted_of(group.rank // tensor_ranks))
        with time.measure():
            losses = [torch.tensor(10.0 * group.rank + micro) for micro in range(count)]
        steps.append(step_metrics.gather(losses, time))
    return steps


@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_all_ranks_are_told_the_same_and_each_batch_counts_once(tensor_ranks: int) -> None:
    for first, second in on_ranks(4, told, tensor_ranks):
        assert first.losses_WA.tolist() == [[10.0 * rank, 10.0 * rank + 1] for rank in range(4)]
        assert second.losses_WA.tolist() == [[10.0 * rank] for rank in range(4)]
        assert len(first.forward_seconds) == 4
        assert all(seconds > 0 for seconds in first.forward_seconds)
        data_ranks = 4 // tensor_ranks
        once = {name: sum(float(noted_of(k)[name]) for k in range(data_ranks)) for name in noted_of(0)}
        for measured, batches in ((first, 2), (second, 1)):
            assert measured.auxiliary_sums == {name: batches * value for name, value in once.items()}


class Event:
    """Of a device beside the host: what it took is known once the host has waited for it."""

    waited = False

    def __init__(self, enable_timing: bool) -> None: ...

    def record(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        if not Event.waited:
            raise RuntimeError("device not ready")
        return 250.0


def test_times_of_a_device_are_read_once_its_losses_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second wait would be for nothing."""
    to_host = torch.Tensor.cpu

    def waiting(tensor: torch.Tensor) -> torch.Tensor:
        Event.waited = True
        return to_host(tensor)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "cpu", waiting)
    forward_time = ForwardTimer(torch.device("cuda"))
    for _ in range(2):
        with forward_time.measure():
            pass
    assert StepMetrics(Group(), 1).gather([torch.tensor(3.0)] * 2, forward_time).forward_seconds == [0.5]


def test_where_nothing_is_noted_nothing_is_told() -> None:
    measured = StepMetrics(Group(), 1).gather([torch.tensor(3.0)], ForwardTimer(CPU))
    assert (measured.losses_WA.tolist(), measured.auxiliary_sums) == ([[3.0]], {})


def messages(group: Group, config: RunConfig) -> Counter[str]:
    """What a rank sends within its steps, but for its loader and DeepSpeed."""
    sent: Counter[str] = Counter()
    inside: list[bool] = []
    advance = loop._advance

    def noted(name: str) -> Any:
        send = getattr(Group, name)

        def sending(group: Group, *arguments: Any) -> Any:
            sent[name] += bool(inside) and group.size > 1 and current_thread() is main_thread()
            return send(group, *arguments)

        return sending

    def advancing(*arguments: Any) -> bool:
        inside.append(True)
        applied = advance(*arguments)
        inside.clear()
        return applied

    for name in ("all_gather", "all_reduce_", "all_reduce_max_"):
        setattr(Group, name, noted(name))
    loop._advance = advancing
    pretrain(config, Launch())
    return +sent


def test_a_step_sends_one_message_also_where_replaced_tokens_are_found(tmp_path: Path) -> None:
    write_text(tmp_path)
    encoder = {"model.family": "bert", "model.vocab_size": 63, "model.max_positions": 32, "training.steps": 3}
    masking = {"masking": {"mask_token": 60, "cls_token": 61, "sep_token": 62}}
    replaced = {"objective.replaced_tokens": {"generator_layers": 1}}
    config = small_config(tmp_path, encoder | masking | replaced)
    assert on_ranks(2, messages, config) == [{"all_gather": 3}] * 2
