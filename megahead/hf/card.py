"""The model card of an export, README.md: what the model is, how it was trained, how it is loaded and served."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCardData

from megahead import __version__
from megahead.checkpoints.reading import Checkpoint
from megahead.config.auxiliary import AuxiliarySettings
from megahead.config.objective import ObjectiveConfig
from megahead.config.run import RunConfig
from megahead.data.indexed import DatasetInfo, dataset_paths
from megahead.errors import DataError
from megahead.files import read_if_exists
from megahead.hf.heads import ExportTarget, Head
from megahead.hf.other_programs import serving_support
from megahead.hf.trained import HEAD, TrainedModel
from megahead.hf.verify import Parity
from megahead.wording import format_duration, pluralize


@dataclass(frozen=True)
class CardMetadata:
    """Settings of a card that the checkpoint does not have."""

    path: str
    """Path or Hub repository that the example code loads the model from."""

    license: str | None = None
    """License of the weights, by its name on the Hub: apache-2.0."""

    languages: tuple[str, ...] = ()
    """Languages of the text, as ISO 639 codes."""

    pooling: str | None = None
    """How sentence-transformers pools an encoder's hidden states; None without its files."""


def serving_support_of(target: ExportTarget) -> str:
    """Returns whether vLLM and llama.cpp serve this export, see `serving_support`."""
    head = target.head
    has_bias = head.folded_bias is not None or head.bias_V is not None
    return serving_support(target.model.config, head.name, has_bias=has_bias)


def model_card(target: ExportTarget, parity: Parity, metadata: CardMetadata, num_parameters: int) -> str:
    """Returns the card, without the sample and curves that `megahead convert` adds."""
    use, is_headless = _use(target, metadata), _is_headless(target.model.config)
    path = json.dumps(metadata.path, ensure_ascii=False)
    return _CARD_TEMPLATE.format(
        name=target.model.config.name,
        header=_header(use, metadata, is_headless=is_headless),
        family=target.family.title,
        parameters=f"{num_parameters:,}",
        ability=use.ability,
        origin="pretrained" if target.model.checkpoint.step else "imported",
        training=_table(_training_facts(target.model)),
        export=_table(_export_facts(target, parity)),
        code=use.code.format(auto_class=use.auto_class, path=path),
    ) + (_METHOD if is_headless else "")


def _is_headless(config: RunConfig) -> bool:
    """Whether the model is headless, or may continue a headless one: it has initial weights (`init`), or an output
    bias, which a vanilla phase after a headless one has."""
    return config.objective.name == "headless" or config.init is not None or config.objective.output_bias


def _header(use: _Use, metadata: CardMetadata, *, is_headless: bool) -> str:
    """Returns the card's metadata for the Hub, as YAML."""
    tags = [*(_SENTENCE_TAGS if metadata.pooling else ()), *(_TAGS if is_headless else ())]
    model: dict[str, Any] = {"library_name": use.library, "pipeline_tag": use.tag or None, "tags": tags or None}
    return ModelCardData(**model, license=metadata.license, language=[*metadata.languages] or None).to_yaml()


class _Use(NamedTuple):
    """What a model is for, as its card says it."""

    tag: str
    """The Hub's task; empty where it has none."""

    ability: str
    auto_class: str
    code: str
    library: str = "transformers"


def _use(target: ExportTarget, metadata: CardMetadata) -> _Use:
    if metadata.pooling is not None:
        ability = "turns texts to vectors, whose products are their similarities"
        return _Use("sentence-similarity", ability, "", _SENTENCES_EXAMPLE, "sentence-transformers")
    if not target.has_head():
        use = _Use("feature-extraction", "turns tokens to vectors", "AutoModel", _EMBED_EXAMPLE)
    elif target.is_masked_lm():
        use = _Use("fill-mask", "fills in masked tokens", "AutoModelForMaskedLM", _FILL_MASK_EXAMPLE)
    else:
        use = _Use("text-generation", "predicts the next token", "AutoModelForCausalLM", _GENERATE_EXAMPLE)
    if target.model.config.reads_items():
        return use._replace(tag="", ability="predicts the next item of a sequence", code=_IDS_EXAMPLE)
    has_tokenizer = target.model.tokenizer_path() is not None
    return use._replace(code=f"{_LOAD_CODE}\n{use.code}" if has_tokenizer else _IDS_EXAMPLE)


def _table(rows: Mapping[str, str]) -> str:
    cells = {key: value.replace("|", r"\|") for key, value in rows.items()}
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in cells.items())])


def _training_facts(model: TrainedModel) -> dict[str, str]:
    config, tokens = model.config, model.checkpoint.state.get("tokens")
    sizes, batch, optimizer = config.model, config.batch, config.optimizer
    objective = "contrastive weight tying (headless)" if config.objective.name == "headless" else "vanilla softmax"
    vanilla_weight = config.objective.vanilla_weight
    mixed = [f"{vanilla_weight:g} vanilla softmax"] if vanilla_weight else []
    seconds = model.checkpoint.state.get("seconds")
    trained_for = [pluralize(model.checkpoint.step, "step")]
    trained_for += [] if tokens is None else [pluralize(tokens, "token")]
    trained_for += [format_duration(seconds)] if isinstance(seconds, int | float) and seconds >= 36 else []
    auxiliary = config.objective.auxiliary()
    described = [text] if auxiliary is not None and (text := auxiliary.describe()) else []
    layers, heads = pluralize(sizes.num_layers, "layer"), pluralize(sizes.num_heads, "head")
    facts = {
        "Objective": ", ".join([objective, *mixed, *described, f"temperature {model.temperature():g}"]),
        "Shape": f"{layers}, width {sizes.hidden_size}, {heads}",
        "Vocabulary": f"{sizes.vocab_size:,} ids",
        "Trained for": ", ".join(trained_for),
        "Batch": f"{pluralize(batch.global_size, 'row')} of {pluralize(config.data.sequence_length, 'token')}",
        "Optimizer": f"{optimizer.name}, peak rate {optimizer.learning_rate:g}, {config.schedule.name} schedule, "
        f"weight decay {optimizer.weight_decay:g}, {config.engine.precision}",
        "Data": describe_data(model),
        "Held-out text": last_evaluation(model) or "not evaluated",
    }
    if config.init is not None:
        source = Path(config.init.from_hf or config.init.from_checkpoint or "")
        facts["Began from"] = f"{source.name} ({config.init.mode})"
    if not model.checkpoint.step:  # imported: its config says nothing of how it was trained
        return {name: facts[name] for name in ("Shape", "Vocabulary")} | {"Trained for": "0 steps after its import"}
    return facts


def _export_facts(target: ExportTarget, parity: Parity) -> dict[str, str]:
    errors = ", ".join(f"{error:.1e} in {dtype}" for dtype, error in parity.largest_error.items())
    return {
        "Head": _describe_head(target.head, target.model.config.objective),
        "Stored as": target.dtype,
        "Largest error": f"{errors}, of {parity.compared} up to {parity.largest_output:.1f}, against the checkpoint",
        "Other programs": serving_support_of(target),
        "Exported by": code_version(),
    }


_HEAD_DESCRIPTIONS = {
    "none": "none: the backbone alone, outputs are hidden states",
    "tied": "`E h`, the input embedding itself",
    "pmi": "`E h + log q`, training-free: q is the distribution of the training targets (of all candidates, where the "
    "objective has others), ",
    "trained": "the one that was trained",
}


def _describe_head(head: Head, objective: ObjectiveConfig) -> str:
    description = _HEAD_DESCRIPTIONS[head.name]
    is_stored = head.bias_V is not None or head.transform is not None
    bias = "the head's own" if is_stored else "folded into the head's own weights"
    if head.name == "pmi":
        return description + ("with E the candidates' own table; the bias is " if head.matrix == HEAD else "") + bias
    if head.folded_bias is None and head.bias_V is None:
        return description
    padding = "and rows of padding that are never probable: their bias is"
    return f"{description}, {'with a bias for each token, which is' if objective.output_bias else padding} {bias}"


_LOAD_CODE = """from transformers import AutoTokenizer, {auto_class}

tokenizer = AutoTokenizer.from_pretrained({path})
model = {auto_class}.from_pretrained({path})"""
_GENERATE_EXAMPLE = """inputs = tokenizer("Once upon a time", return_tensors="pt")
output = model.generate(inputs["input_ids"], max_new_tokens=50, do_sample=True)
print(tokenizer.decode(output[0], skip_special_tokens=True))"""
_FILL_MASK_EXAMPLE = """inputs = tokenizer(f"A small {{tokenizer.mask_token}}.", return_tensors="pt")
masked = (inputs["input_ids"] == tokenizer.mask_token_id).nonzero()[0, 1]
print(tokenizer.decode(model(**inputs).logits[0, masked].argmax()))"""
_EMBED_EXAMPLE = """inputs = tokenizer("Once upon a time", return_tensors="pt")
print(model(inputs["input_ids"]).last_hidden_state.shape)"""
_SENTENCES_EXAMPLE = """from sentence_transformers import SentenceTransformer

model = SentenceTransformer({path})
vectors = model.encode(["Once upon a time", "There was a time"])
print(vectors[0] @ vectors[1])"""
_IDS_EXAMPLE = """import torch
from transformers import {auto_class}

model = {auto_class}.from_pretrained({path})
print(model(torch.tensor([[1, 2, 3]]))[0].shape)  # ids: it has no tokenizer"""

_TAGS = ("headless", "contrastive-weight-tying")
_SENTENCE_TAGS = ("sentence-transformers", "sentence-similarity", "feature-extraction")
_CARD_TEMPLATE = """---
{header}
---
# {name}

A {family} model of {parameters} parameters that {ability}, {origin} and exported with megahead.

## Training

{training}

## This export

{export}

## Use

```python
{code}
```

"""
_METHOD = """## Method

N. Godey, E. de la Clergerie, B. Sagot, *Headless Language Models: Learning without Predicting with
Contrastive Weight Tying*, ICLR 2024, arXiv 2309.08351.
"""


# Facts about the training: data, code, and the last evaluation.

_CHECKOUT = Path(__file__).parents[2]


def describe_data(model: TrainedModel) -> str:
    """Describes the training datasets, with the weights of a blend: the names and sizes of their texts, or the
    datasets' names if the files have changed or are gone."""
    fingerprints = model.checkpoint.state_value("texts", dict, default={}).get("data.train")
    texts = []
    for part in model.config.data.parts():
        text = Path(part.prefix).name
        with suppress(DataError):
            info = DatasetInfo.load(dataset_paths(part.prefix)[2])
            if fingerprints is None or any(saved.startswith(info.fingerprint()) for saved in fingerprints):
                sizes = f"{pluralize(info.documents, 'document')}, {pluralize(info.tokens, 'token')}"
                text = f"{info.source or text}, {sizes}"
        texts.append(text if part.weight is None else f"{text} (weight {part.weight:g})")
    return "; ".join(texts)


def code_version() -> str:
    """Returns the version of megahead, with its commit if `.git` is directly above the package: an installed copy may
    be inside another project's repository."""
    command = ["git", "-C", str(_CHECKOUT), "describe", "--always", "--dirty", "--abbrev=12"]
    with suppress(OSError, subprocess.SubprocessError):
        if (_CHECKOUT / ".git").exists():
            process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
            return f"megahead {__version__}, commit {process.stdout.strip()}"
    return f"megahead {__version__}"


def last_evaluation(model: TrainedModel) -> str | None:
    """Describes the last evaluation before the checkpoint, from the run's metrics.jsonl; None if there is none. The
    file may also hold evaluations of orphaned steps, after which the run resumed from an older checkpoint."""
    summary = None
    for line in (read_if_exists(model.run_folder().metrics) or b"").split(b"\n"):
        try:
            record = json.loads(line)
            if _belongs_to_checkpoint(record["step"], record["validation"].get("loss"), model.checkpoint):
                auxiliary = model.config.objective.auxiliary()
                summary = _describe_evaluation(record["step"], record["validation"], auxiliary)
        except (ValueError, KeyError, TypeError):  # another kind of record, or a line cut short
            continue
    return summary


def _belongs_to_checkpoint(step: int, loss: float, checkpoint: Checkpoint) -> bool:
    """Whether the evaluation at `step` is the last one in the state of `checkpoint`, not one of an orphaned step."""
    if "validation" not in checkpoint.state:  # checkpoints of the first version lack it
        return step <= checkpoint.step
    last = checkpoint.state["validation"]
    return last is not None and (step, loss) == (last["step"], last["loss"])


def _describe_evaluation(step: int, metrics: dict[str, Any], auxiliary: AuxiliarySettings | None) -> str:
    """Describes an evaluation in words; `metrics["head"]` is `trained`, `tied`, or `pmi` (the training-free head)."""
    if auxiliary is not None and (means := metrics.get(auxiliary.metric_prefix)):
        label = auxiliary.perplexity_prefix
        return f"{auxiliary.export_text(means)} (step {step:,}), its {label}perplexity {metrics['perplexity']:,.4g}"
    bits, bound = metrics.get("bits_per_byte"), "at most " if metrics.get("upper_bound") else ""
    parts = [f"perplexity {bound}{metrics['perplexity']:,.4g}"]
    parts += [] if bits is None else [f"{bound}{bits:.4g} bits a byte"]
    return f"{', '.join(parts)}, accuracy {metrics['accuracy']:.1%} ({metrics['head']} head, step {step:,})"
