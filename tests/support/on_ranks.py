"""Runs a function on N forked ranks over gloo: a fraction of a second where spawning takes many."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megahead.distributed.group import Group
from megahead.distributed.launch import scheduled_as_batch


def on_ranks(count: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """`function(group, *args)` on `count` ranks; the results (torch-saved, hence small) in rank order.

    Ranks that raise fail the caller with their tracebacks, the first one's first.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=_rank, args=(r, count, folder, function, args)) for r in range(count)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout)
        hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            process.kill()
            process.join()
        failures = sorted(Path(folder).glob("failure-*"), key=lambda path: path.stat().st_mtime_ns)
        if failures:
            raise AssertionError("\n".join(f"{failure.name}:\n{failure.read_text()}" for failure in failures))
        ended = [process.exitcode for process in ranks]
        if hung or any(ended):
            raise AssertionError(f"ranks ended with {ended}; {hung} hung for {timeout} s")
        return [torch.load(Path(folder, f"result-{r}"), weights_only=False) for r in range(count)]


def _rank(rank: int, count: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        for handler in logging.getLogger("DeepSpeed").handlers:
            if type(handler) is logging.StreamHandler:  # opened by the parent, before the test's capture
                handler.setStream(sys.stdout)
        torch.set_num_threads(1)
        store = dist.FileStore(f"{folder}/store", count)
        with scheduled_as_batch():
            dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=60))
            torch.save(function(Group.world(), *args), f"{folder}/result-{rank}")
            dist.barrier()
        code = 0
    except BaseException:
        Path(folder, f"failure-{rank}").write_text(traceback.format_exc())
        code = 1
    os._exit(code)
