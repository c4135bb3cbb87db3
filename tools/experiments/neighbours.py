"""The method's neighbours in the literature, headless: masked inputs, other scores, other masks, on small models.

Each variant is the plain objective with other settings, on the same text, seeds and tokens. Where a token costs more or
less than a plain one by more than MARGIN, it is trained once more with as many steps as take the same time. What it
costs is measured side by side: a few steps of both at once, so that what else keeps the machine busy slows both.
All are scored on the same held-out text, encoders on the same masked places of it, by the heads that need no training;
masked diffusion by an upper bound, so that it is a kind of model by itself, with the vanilla softmax as a variant, and
so is replaced-token detection, whose generators are scored.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.measures import Row, over_seeds
from experiments.recipe import FIRST
from experiments.runner import GRIDS, ExperimentRunner, settings_of

SEEDS = (0, 1)
MARGIN = 0.1
VOCABULARY = 16_384  # of decoders; their mask token is an id behind the tokenizer's
PLAIN = "plain"
WARMUP = 40
COST_STEPS = 60  # of each of two runs side by side


def compare_neighbours(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Trains the plain models and all variants (or those of `only`) with every seed. `cost` is that of a token, where
    the plain one's is 1."""
    rows: list[Row] = []
    for kind, grid in GRIDS["neighbours"].items():
        names = [name for name in grid["variants"] if not only or name in only]
        if names:
            rows += _compare(runner, kind, [PLAIN, *(name for name in names if name != PLAIN)])
            values = ("tokens", "cost", "perplexity", "accuracy")
            runner.record("neighbours", over_seeds(rows, ("model", "variant", "at equal"), values))


def settings_of_variant(kind: str, name: str) -> tuple[str, list[str]]:
    """Its config, and the settings beside its own."""
    grid = GRIDS["neighbours"][kind]
    return grid["config"], [*grid.get("settings", ()), *grid["variants"][name]]


def _compare(runner: ExperimentRunner, kind: str, names: Sequence[str]) -> list[Row]:
    config, total = GRIDS["neighbours"][kind]["config"], GRIDS["neighbours"][kind]["steps"]
    rows: list[Row] = []
    plain, brief = _settings(runner, kind, PLAIN), _course(0, COST_STEPS)
    for seed in SEEDS:
        for name in names:
            settings, relative = _settings(runner, kind, name), 1.0
            if name != PLAIN:
                pair = {f"{kind}-{name}-beside-{PLAIN}": [*settings, *brief]}
                relative = runner.relative_cost(config, pair | {f"{kind}-{PLAIN}-beside-{name}": [*plain, *brief]})
            courses = {"tokens": (f"{kind}-{name}-{seed}", total)}
            if abs(relative - 1) > MARGIN:
                courses["time"] = (f"{kind}-{name}-{seed}-time", round(total / relative))
            for equal, (folder, steps) in courses.items():
                run = runner.train(config, folder, *settings, *_course(seed, steps))
                last, tokens = run.validation[-1], run.training[-1]["tokens"]
                row = {"model": kind, "variant": name, "at equal": equal, "tokens": tokens, "cost": relative}
                rows.append(row | {"perplexity": last["perplexity"], "accuracy": last["accuracy"]})
    return rows


def _course(seed: int, steps: int) -> list[str]:
    course = {"training.steps": steps, "training.checkpoint_every": steps, "schedule.warmup_steps": WARMUP}
    return settings_of(course | {"seed": seed})


def _settings(runner: ExperimentRunner, kind: str, name: str) -> list[str]:
    """All that a variant's runs are given; decoders have the first recipe, not the one that was found since."""
    _, own = settings_of_variant(kind, name)
    if kind != "decoder":
        return [*runner.data(encoder=True), *own]
    masks = [f"masked_inputs.mask_token={VOCABULARY}"] if any("masked_inputs" in one for one in own) else []
    ids = [f"model.vocab_size={VOCABULARY + 1}", "training.evaluate_samples=256"]
    return [*runner.data(VOCABULARY), *ids, *settings_of(FIRST), *own, *masks]
