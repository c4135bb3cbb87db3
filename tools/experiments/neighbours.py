"""Related methods of the literature with headless models: masked inputs, other scores, other masks, on small models.

Each variant is the plain objective with other settings, on the same text, seeds and tokens. If a token costs more or
less than a plain one by more than MARGIN, the variant is trained once more for the time of the plain run. Cost is
measured by a few steps of both at the same time, so that other load slows both. All are scored on the same held-out
text, encoders on the same masked positions, by training-free heads. Masked diffusion, scored by an upper bound, and
replaced-token detection, whose generators are scored, are kinds of their own, with the vanilla softmax as a variant.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.measures import Row, aggregate_seeds
from experiments.recipe import INITIAL_RECIPE
from experiments.runner import GRIDS, ExperimentRunner, to_overrides

SEEDS = (0, 1)
MARGIN = 0.1
VOCABULARY = 16_384  # of decoders; their mask token is the next id
PLAIN = "plain"
WARMUP = 40
COST_STEPS = 60  # of each of two runs side by side


def compare_neighbours(runner: ExperimentRunner, only: Sequence[str]) -> None:
    """Trains the plain models and all variants (or those of `only`) with every seed; `cost` of a token is relative to
    the plain one."""
    rows: list[Row] = []
    for kind, grid in GRIDS["neighbours"].items():
        names = [name for name in grid["variants"] if not only or name in only]
        if names:
            rows += _compare(runner, kind, [PLAIN, *(name for name in names if name != PLAIN)])
            values = ("tokens", "cost", "perplexity", "accuracy")
            runner.record("neighbours", aggregate_seeds(rows, ("model", "variant", "at equal"), values))


def settings_of_variant(kind: str, name: str) -> tuple[str, list[str]]:
    """The name of a variant's config, and its overrides."""
    grid = GRIDS["neighbours"][kind]
    return grid["config"], [*grid.get("settings", ()), *grid["variants"][name]]


def _compare(runner: ExperimentRunner, kind: str, names: Sequence[str]) -> list[Row]:
    config, num_steps = GRIDS["neighbours"][kind]["config"], GRIDS["neighbours"][kind]["steps"]
    rows: list[Row] = []
    plain_overrides, cost_overrides = _variant_overrides(runner, kind, PLAIN), _schedule_overrides(0, COST_STEPS)
    for seed in SEEDS:
        for name in names:
            settings, relative = _variant_overrides(runner, kind, name), 1.0
            if name != PLAIN:
                pair = {f"{kind}-{name}-beside-{PLAIN}": [*settings, *cost_overrides]}
                relative = runner.relative_cost(
                    config, pair | {f"{kind}-{PLAIN}-beside-{name}": [*plain_overrides, *cost_overrides]}
                )
            run_by_equal = {"tokens": (f"{kind}-{name}-{seed}", num_steps)}
            if abs(relative - 1) > MARGIN:
                run_by_equal["time"] = (f"{kind}-{name}-{seed}-time", round(num_steps / relative))
            for equal, (folder, steps) in run_by_equal.items():
                run = runner.train(config, folder, *settings, *_schedule_overrides(seed, steps))
                last, tokens = run.validation[-1], run.training[-1]["tokens"]
                row = {"model": kind, "variant": name, "at equal": equal, "tokens": tokens, "cost": relative}
                rows.append(row | {"perplexity": last["perplexity"], "accuracy": last["accuracy"]})
    return rows


def _schedule_overrides(seed: int, steps: int) -> list[str]:
    settings = {"training.steps": steps, "training.checkpoint_every": steps, "schedule.warmup_steps": WARMUP}
    return to_overrides(settings | {"seed": seed})


def _variant_overrides(runner: ExperimentRunner, kind: str, name: str) -> list[str]:
    """All overrides of a variant's runs; decoders have the initial recipe, not the one found by `recipe`."""
    _, variant_settings = settings_of_variant(kind, name)
    if kind != "decoder":
        return [*runner.data(encoder=True), *variant_settings]
    mask_token = (
        [f"masked_inputs.mask_token={VOCABULARY}"] if any("masked_inputs" in one for one in variant_settings) else []
    )
    ids = [f"model.vocab_size={VOCABULARY + 1}", "training.evaluate_samples=256"]
    return [*runner.data(VOCABULARY), *ids, *to_overrides(INITIAL_RECIPE), *variant_settings, *mask_token]
