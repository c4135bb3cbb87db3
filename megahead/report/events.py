"""What happened to a run beside its steps: sessions that resumed, damaged checkpoints, bad steps and rollbacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megahead.report.metrics import Record
from megahead.report.runs import Run
from megahead.wording import counted, listed, span

_DONE = {"apply": "applied all the same", "skip": "skipped", "rollback": "rolled back", "stop": "ended the run"}


@dataclass(frozen=True)
class Event:
    """A moment of a run, and a sentence about it."""

    step: int
    tokens: int
    seconds: float
    text: str

    wrong: bool
    """Whether it is a problem, which someone should look at."""


def events_of(run: Run) -> list[Event]:
    """The events of a run in their order; that it began is none."""
    return [
        Event(record["step"], record["tokens"], record["seconds"], text, wrong)
        for record in run.metrics.events
        for kind, describe in _DESCRIPTIONS.items()
        if kind in record
        for text, wrong in describe(record[kind])
    ]


def _session(session: Record) -> Iterator[tuple[str, bool]]:
    for sentence in session.get("damaged", ()):
        yield f"passed over a damaged checkpoint: {sentence}", True
    if session.get("resumed") is not None:
        gone_over = session.get("new_phase", False)
        yield f"{'the next phase went on' if gone_over else 'resumed'} from {session['resumed']}", False
    mirror = session.get("mirror", {})
    if "fetched" in mirror:
        yield "the checkpoint came from the mirror", False
    for sentence in mirror.get("problems", ()):
        yield f"passed over a damaged checkpoint of the mirror: {sentence}", True
    memory = session.get("memory", {})
    if "newer_by" in memory:
        yield f"the checkpoint came from memory, {counted(memory['newer_by'], 'step')} newer than the disk's", False
    for sentence in memory.get("problems", ()):
        yield f"passed over a copy in memory: {sentence}", True
    if "mesh_before" in session:
        now, before = (_ranks(session[key]) for key in ("mesh", "mesh_before"))
        yield f"went on with {now} instead of {before}", False


def _ranks(mesh: Mapping[str, int]) -> str:
    tensor = f" x {mesh['tensor']} tensor ranks" if mesh["tensor"] > 1 else ""
    waiting = f" ({mesh['waiting']} waiting)" if mesh["waiting"] else ""
    return f"{counted(mesh['data'], 'data rank')}{tensor}{waiting}"


def _fault(fault: Record) -> Iterator[tuple[str, bool]]:
    where = fault.get("where", ())
    ranks = sorted({place["rank"] for place in where if place["rank"] is not None})
    rows = ", ".join(span("row", range(place["first"], place["last"] + 1)) for place in where[:3])
    on = f" on {listed('rank', ranks)}" if ranks else ""
    yield (
        (
            f"{fault['kind']} (loss {fault['loss']}, gradient norm {fault['gradient_norm']}){on}, {rows}: "
            f"{_DONE[fault['action']]}"
        ),
        fault["kind"] != "overflow",
    )


def _rollback(rollback: Record) -> Iterator[tuple[str, bool]]:
    yield f"went back to {rollback['checkpoint']}", False


def _slow(slow: Record) -> Iterator[tuple[str, bool]]:
    times = slow["seconds"] / slow["usual"]
    yield f"rank {slow['rank']} on {slow['host']} took {times:.1f} times as long as the others", True


def _replica(replica: Record) -> Iterator[tuple[str, bool]]:
    what = {"note": "noted", "rollback": "rolled back", "stop": "ended the run"}[replica["action"]]
    yield f"weights of {listed('rank', replica['ranks'])} differed from the other replicas': {what}", True


def _copy(copy: Record) -> Iterator[tuple[str, bool]]:
    if "off" in copy:
        yield f"kept no more copies in memory: {copy['off']}", True
    if copy.get("skipped") == 1:
        yield "a copy in memory was left out, since the last one was still on its way", True


def _mirror(mirror: Record) -> Iterator[tuple[str, bool]]:
    if "failed" in mirror:
        what = f"step {mirror['step']:,}" if "step" in mirror else "the log"
        yield f"{what} did not get to the mirror: {mirror['failed']}", True
    if "skipped" in mirror:
        yield (
            f"step {mirror['step']:,} was not copied to the mirror, since an older checkpoint was still on its way",
            True,
        )


_DESCRIPTIONS = {
    "session": _session,
    "fault": _fault,
    "rollback": _rollback,
    "slow": _slow,
    "replica": _replica,
    "copy": _copy,
    "mirror": _mirror,
}
