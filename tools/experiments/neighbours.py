"""Compares related methods of the literature on small headless models: masked inputs, other scores, other masks, a
softmax beside the loss, more predicted tokens.

Each variant is the plain objective with other settings, on the same text, seeds and tokens. If a token costs more or
less than a plain one by more than MARGIN, the variant is also trained for the time of the plain run; for kinds of model
with `at_equal: [time]` in grids.yaml, only for that time. Cost is measured by a few steps of both at the same time, so
that other load slows both. All are scored on the same held-out text, encoders on the same masked positions, by
training-free heads. Masked diffusion, scored by an upper bound, and replaced-token detection, whose generators are
scored, are kinds of their own, with the vanilla softmax as a variant.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.measures import Row, aggregate_seeds
from experiments.recipe import INITIAL_RECIPE
from experiments.runner import GRIDS, ExperimentRunner, select_names, to_overrides
from megahead.config.loading import load_config

SEEDS = (0, 1)
MARGIN = 0.1
VOCABULARY = 16_384  # of decoders; their mask token is the next id
PLAIN = "plain"
WARMUP = 40
COST_STEPS = 16  # of each of two runs side by side


def compare_neighbours(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Trains the plain model and all variants of each kind of model (or the variants and kinds that `only` names) with
    every seed; `cost` of a token is relative to the plain one's."""
    kinds = GRIDS["neighbours"]
    select_names(only, [name for kind in kinds for name in (kind, *kinds[kind]["variants"])])
    rows: list[Row] = []
    for kind, grid in kinds.items():
        names = [name for name in grid["variants"] if not only or {kind, name}.intersection(only)]
        if names:
            rows += _compare(runner, kind, [PLAIN, *(name for name in names if name != PLAIN)])
            values = ("tokens", "cost", "perplexity", "accuracy")
            runner.record("neighbours", aggregate_seeds(rows, ("model", "variant", "at equal"), values))


def settings_of_variant(kind: str, name: str) -> tuple[str, list[str]]:
    """The name of a variant's config, and its overrides."""
    grid = GRIDS["neighbours"][kind]
    return grid["config"], [*grid.get("settings", ()), *grid["variants"][name]]


def _compare(runner: ExperimentRunner, kind: str, names: Sequence[str]) -> list[Row]:
    grid, rows = GRIDS["neighbours"][kind], list[Row]()
    costs = {name: _relative_cost(runner, kind, name) for name in names}
    for seed in grid.get("seeds", SEEDS):
        for name in names:
            run_by_basis = {"tokens": (f"{kind}-{name}-{seed}", grid["steps"])}
            if abs(costs[name] - 1) > MARGIN:
                run_by_basis["time"] = (f"{kind}-{name}-{seed}-time", round(grid["steps"] / costs[name]))
                run_by_basis = {equal: run_by_basis[equal] for equal in grid.get("at_equal", run_by_basis)}
            for equal, (folder, steps) in run_by_basis.items():
                settings = [*_variant_overrides(runner, kind, name), *_schedule_overrides(seed, steps)]
                run = runner.train(grid["config"], folder, *settings)
                last, tokens = run.validation[-1], run.training[-1]["tokens"]
                row = {"model": kind, "variant": name, "at equal": equal, "tokens": tokens, "cost": costs[name]}
                rows.append(row | {"perplexity": last["perplexity"], "accuracy": last["accuracy"]})
    return rows


def _relative_cost(runner: ExperimentRunner, kind: str, name: str) -> float:
    """Cost of a variant's token, relative to the plain one's."""
    if name == PLAIN:
        return 1.0
    pair = {f"{kind}-{name}-beside-{PLAIN}": name, f"{kind}-{PLAIN}-beside-{name}": PLAIN}
    short = _schedule_overrides(0, COST_STEPS)
    overrides = {run: [*_variant_overrides(runner, kind, variant), *short] for run, variant in pair.items()}
    return runner.relative_cost(GRIDS["neighbours"][kind]["config"], overrides)


def _schedule_overrides(seed: int, steps: int) -> list[str]:
    settings = {"training.steps": steps, "training.checkpoint_every": steps, "seed": seed}
    return to_overrides(settings | {"schedule.warmup_steps": min(WARMUP, steps // 2)})


def _variant_overrides(runner: ExperimentRunner, kind: str, name: str) -> list[str]:
    """All overrides of a variant's runs; those of `decoder` have the initial recipe, not the one found by `recipe`."""
    config, settings = settings_of_variant(kind, name)
    if kind != "decoder":
        is_encoder = not load_config(f"configs/{config}.yaml").model.is_causal
        return [*runner.data(GRIDS["neighbours"][kind].get("vocabulary"), encoder=is_encoder), *settings]
    mask_token = [f"masked_inputs.mask_token={VOCABULARY}"] if any("masked_inputs" in one for one in settings) else []
    ids = [f"model.vocab_size={VOCABULARY + 1}", "training.evaluate_samples=256"]
    return [*runner.data(VOCABULARY), *ids, *to_overrides(INITIAL_RECIPE), *settings, *mask_token]
