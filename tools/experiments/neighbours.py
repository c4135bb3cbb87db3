"""The method's neighbours in the literature, headless: masked inputs, other scores, other masks, on small models.

Each variant is the plain objective with other settings, on the same text, seeds and tokens. Where a token costs more or
less than a plain one by more than MARGIN, it is trained once more with as many steps as take the same time. What it
costs is measured side by side: a few steps of both at once, so that what else keeps the machine busy slows both.
All are scored on the same held-out text, encoders on the same masked places of it, by the heads that need no training;
masked diffusion by an upper bound, so that it is a kind of model by itself, with the vanilla softmax as a variant, and
so is replaced-token detection, whose generators are scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experiments.laboratory import Laboratory
from experiments.measures import Row, over_seeds, relative_cost
from experiments.recipe import FIRST, settings_of
from megahead.report.read import RunMetrics

SEEDS = (0, 1)
MARGIN = 0.1
VOCABULARY = 16_384
PLAIN = "plain"
DECODERS: dict[str, tuple[str, ...]] = {
    PLAIN: (),
    "meap-15": ("masked_inputs.share=0.15",),
    "meap-30": ("masked_inputs.share=0.3",),
    "learned-temperature": ("objective.learned_temperature=true",),
    "learned-temperature-wide": ("objective.learned_temperature=true", "objective.group_samples=16"),
    "cosine": ("objective.score=cosine", "objective.temperature=0.07", "objective.learned_temperature=true"),
    "corrected": ("objective.bias=corrected",),
    "nearest-2": ("objective.bias=corrected", "objective.nearest=2"),
    "harmonic": ("objective.score=harmonic", f"objective.temperature={192**-0.5:.6g}"),
}
"""Settings beside those of `configs/demo-headless.yaml`. The mask token is an id behind the tokenizer's, in all of
them."""

# Settings beside those of `configs/encoder-small-headless.yaml`
ENCODERS: dict[str, tuple[str, ...]] = {
    PLAIN: (),
    "rate-40": ("masking.rate=0.4",),
    "rate-40-pure": ("masking.rate=0.4", "masking.mask_share=1", "masking.random_share=0"),
    "rate-40-late": (
        *("masking.rate=0.4", "masking.mask_share=1", "masking.random_share=0"),
        "masking.masks_from_layer=1",
    ),
    "rate-60-late": (
        *("masking.rate=0.6", "masking.mask_share=1", "masking.random_share=0"),
        "masking.masks_from_layer=1",
    ),
    "rate-40-decoder": (
        *("masking.rate=0.4", "masking.mask_share=1", "masking.random_share=0"),
        "masking.mask_decoder_layers=1",
    ),
    "dropping": ("masking.dropping.from_layer=0", "masking.adapt_every=25"),
    "rate-40-dropping": ("masking.rate=0.4", "masking.dropping.from_layer=0", "masking.adapt_every=25"),
    "dropping-rare": ("masking.dropping.from_layer=0", "masking.dropping.by=frequency"),
    "rate-falls": ("masking.rate=0.3", "masking.final_rate=0.02"),
    "rate-falls-cosine": ("masking.rate=0.3", "masking.final_rate=0.02", "masking.rate_course=cosine"),
    "frequency": ("masking.strategy=frequency",),
    "informative": ("masking.strategy=informative",),
    "hardest": ("masking.strategy=hardest", "masking.adapt_every=25"),
    "pmi": ("masking.strategy=pmi",),
    "rate-40-frequency": ("masking.rate=0.4", "masking.strategy=frequency"),
    "rate-40-informative": ("masking.rate=0.4", "masking.strategy=informative"),
    "learned-temperature": ("objective.learned_temperature=true",),
    "rate-40-informative-temperature": (
        *("masking.rate=0.4", "masking.strategy=informative"),
        "objective.learned_temperature=true",
    ),
    "similar": ("masking.mask_share=0.4", "masking.similar_share=0.4"),
    "phrases": ("objective.phrases.group_samples=64",),
    "causal-25": ("objective.schedule.causal_share=0.25",),
    "causal-50": ("objective.schedule.causal_share=0.5",),
}
BY_MASKS = "masking.diffusion=false"
FOUR_LAYERS: dict[str, tuple[str, ...]] = {
    PLAIN: (),
    **{
        f"{name}-of-4": ENCODERS[name]
        for name in (
            *("rate-40", "rate-40-pure", "informative", "frequency", "rate-40-informative"),
            *("learned-temperature", "similar", "causal-25", "causal-50"),
        )
    },
    "rate-60-of-4": ("masking.rate=0.6",),
    "rate-80-of-4": ("masking.rate=0.8",),
    "rate-40-late-of-4": (*ENCODERS["rate-40-pure"], "masking.masks_from_layer=2"),
    "dropping-of-4": ("masking.dropping.from_layer=1", "masking.adapt_every=25"),
}
"""Settings beside those of `configs/encoder-small-diffusion-headless.yaml` and BY_MASKS: where mask tokens alone
stand in for targets, two layers learn nothing in so few steps."""

DIFFUSIONS: dict[str, tuple[str, ...]] = {
    PLAIN: (),
    "diffusion-vanilla": ("objective.name=vanilla", "objective.tied=true"),
    "diffusion-frequency": ("masking.strategy=frequency",),
    "diffusion-corrected": ("objective.bias=corrected",),
}
"""Settings beside those of `configs/encoder-small-diffusion-headless.yaml`. Their perplexities are upper bounds, and
comparable with each other alone."""

DETECTIONS: dict[str, tuple[str, ...]] = {
    PLAIN: (),
    "electra-vanilla": ("objective.name=vanilla", "objective.tied=true"),
    "electra-corrected": ("objective.bias=corrected",),
    "electra-deeper": ("objective.replaced_tokens.generator_layers=2",),
}
"""Settings beside those of `configs/encoder-small-electra-headless.yaml`. Perplexities are their generators', and
comparable with each other alone; what the models are worth: `experiments/glue.py`."""

# (config, variants) of each model
KINDS = {
    "decoder": ("demo-headless", DECODERS),
    "encoder": ("encoder-small-headless", ENCODERS),
    "four-layers": ("encoder-small-diffusion-headless", FOUR_LAYERS),
    "diffusion": ("encoder-small-diffusion-headless", DIFFUSIONS),
    "detection": ("encoder-small-electra-headless", DETECTIONS),
}
STEPS = {"decoder": 300, "encoder": 400, "four-layers": 400, "diffusion": 800, "detection": 400}
WARMUP = 40
COST_STEPS = 60  # of each of two runs side by side


def compare_neighbours(laboratory: Laboratory, only: Sequence[str]) -> None:
    """Trains the plain models and all variants (or those of `only`) with every seed."""
    rows: list[Row] = []
    for kind, (_, variants) in KINDS.items():
        asked = {name: settings for name, settings in variants.items() if not only or name in only}
        if asked:
            rows += _compare(laboratory, kind, {PLAIN: (), **asked})
            laboratory.record("neighbours", over_seeds(rows, ("model", "variant", "at equal"), _VALUES))


_VALUES = ("tokens", "cost", "perplexity", "accuracy")  # `cost` is that of a token, where the plain one's is 1


def _compare(laboratory: Laboratory, kind: str, variants: Mapping[str, Sequence[str]]) -> list[Row]:
    given, rows = _given(laboratory, kind), []
    for seed in SEEDS:
        _train(laboratory, kind, f"{kind}-{PLAIN}-{seed}", seed, STEPS[kind], given)
        for name, settings in variants.items():
            settings = [*given, *settings, *nearest_ids(laboratory, f"{kind}-{PLAIN}-{SEEDS[0]}", settings)]
            relative = 1.0 if name == PLAIN else _relative(laboratory, kind, name, given, settings)
            run = _train(laboratory, kind, f"{kind}-{name}-{seed}", seed, STEPS[kind], settings)
            rows.append(_row(kind, name, "tokens", relative, run))
            if abs(relative - 1) > MARGIN:
                steps = round(STEPS[kind] / relative)
                run = _train(laboratory, kind, f"{kind}-{name}-{seed}-time", seed, steps, settings)
                rows.append(_row(kind, name, "time", relative, run))
    return rows


def _relative(laboratory: Laboratory, kind: str, name: str, given: Sequence[str], settings: Sequence[str]) -> float:
    """Cost of a token, where the plain one's is 1."""
    one, other = f"{kind}-{name}-beside-{PLAIN}", f"{kind}-{PLAIN}-beside-{name}"
    settings_of = {one: settings, other: given}

    def train(quiet: Laboratory, run: str) -> RunMetrics:
        return _train(quiet, kind, run, 0, COST_STEPS, settings_of[run])

    return relative_cost(laboratory, train, one, other)


def _given(laboratory: Laboratory, kind: str) -> list[str]:
    """What all runs of a kind are told; decoders are compared by the first recipe, not the one that was found since."""
    if kind != "decoder":
        return [*laboratory.encoder_data(), *([BY_MASKS] if kind == "four-layers" else [])]
    ids = f"model.vocab_size={VOCABULARY + 1}"
    return [*laboratory.data(VOCABULARY), ids, "training.evaluate_samples=256", *settings_of(FIRST)]


def uses_nearest_ids(settings: Sequence[str]) -> bool:
    return any("similar" in one or "nearest" in one for one in settings)


def nearest_ids(laboratory: Laboratory, model: str, settings: Sequence[str]) -> list[str]:
    """The setting that names the nearest ids in a trained model's embedding, where they are used."""
    if not uses_nearest_ids(settings):
        return []
    path = laboratory.folder / f"{model}.npy"
    laboratory.make(path, "nearest_ids.py", "--model", str(laboratory.folder / model), "--output", str(path))
    return [f"data.nearest_ids={path}"]


def _train(
    laboratory: Laboratory, kind: str, folder: str, seed: int, steps: int, settings: Sequence[str]
) -> RunMetrics:
    config, _ = KINDS[kind]
    masks = [f"masked_inputs.mask_token={VOCABULARY}"] if any("masked_inputs" in one for one in settings) else []
    course = [f"training.steps={steps}", f"training.checkpoint_every={steps}", f"schedule.warmup_steps={WARMUP}"]
    course.append(f"seed={seed}")
    return laboratory.train(config, folder, *settings, *masks, *course)


def _row(kind: str, name: str, equal: str, relative: float, run: RunMetrics) -> Row:
    last = run.validation[-1]
    row = {"model": kind, "variant": name, "at equal": equal, "tokens": run.training[-1]["tokens"], "cost": relative}
    return row | {"perplexity": last["perplexity"], "accuracy": last["accuracy"]}
