"""How other programs open an export, without torch: sentence-transformers, by files of its own; vLLM and llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, get_args

from megahead.config.model import ModelConfig
from megahead.config.objective import HeadName
from megahead.config.run import RunConfig
from megahead.errors import CheckpointError, FieldError
from megahead.files import read_json, read_json_object

# How an encoder's folder makes one vector of a text's hidden states: the files of sentence-transformers.

PoolingName = Literal["cls", "mean"]
"""cls: the hidden state of [CLS]; mean: the mean over all tokens, [CLS] and [SEP] included. Both are scaled to length
1."""

POOLINGS: tuple[PoolingName, ...] = get_args(PoolingName)

MODULES_FILE, _LENGTH_FILE = "modules.json", "sentence_bert_config.json"
_MODULES = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
_POOLING_BY_KEY: dict[str, PoolingName] = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
"""Keys of 1_Pooling/config.json that all versions of sentence-transformers read; version 5 also writes
`pooling_mode`."""


def require_pooling(pooling: str, *, is_masked_lm: bool) -> None:
    """Raises FieldError for an unknown pooling, or for a model whose [CLS] does not read the text after it."""
    if pooling not in POOLINGS:
        raise FieldError("--pooling", f"be {' or '.join(POOLINGS)}", got=pooling)
    if not is_masked_lm:
        raise FieldError("--pooling", "be left out for a decoder, whose tokens read no later ones", got=pooling)


def write_pooling(folder: Path, pooling: str, hidden_size: int, context: int) -> None:
    """Writes the files by which sentence-transformers opens the export in `folder` and pools its hidden states;
    `context`: the most tokens that the model reads. CheckpointError without a tokenizer.json."""
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(
            "the run must have a tokenizer for --pooling, but has none; put its tokenizer.json there."
        )
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (name, path) in enumerate(_MODULES)
    ]
    flags = {key: name == pooling for key, name in _POOLING_BY_KEY.items()}
    files: dict[str, object] = {
        _LENGTH_FILE: {"max_seq_length": max_text_tokens(folder, context), "do_lower_case": False},
        MODULES_FILE: modules,
        "1_Pooling/config.json": {"word_embedding_dimension": hidden_size, **flags},
        "2_Normalize/config.json": {},
        "config_sentence_transformers.json": {
            "prompts": {},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_pooling(folder: Path) -> PoolingName | None:
    """Returns the pooling that a folder of sentence-transformers names; None for another folder. CheckpointError for
    one that pools in another way, or has further layers."""
    modules = read_json(folder / MODULES_FILE)
    if not isinstance(modules, list):
        return None
    if not all(isinstance(module, dict) and {"type", "path"} <= {*module} for module in modules):
        raise CheckpointError(f"`{folder / MODULES_FILE}` must give each module's type and path, but does not.")
    paths = {str(module["type"]).rpartition(".")[2]: str(module["path"]) for module in modules}
    if further := sorted(paths.keys() - {name for name, _ in _MODULES}):
        layers = ", ".join(further)
        raise CheckpointError(f"`{folder}` must have no layers after its pooling, but has {layers}; give --pooling.")
    settings = read_json_object(folder / paths.get("Pooling", "1_Pooling") / "config.json")
    keys = [key for key, is_used in settings.items() if key.startswith("pooling_mode_") and is_used]
    names = settings.get("pooling_mode") or [_POOLING_BY_KEY.get(key, key) for key in keys]
    names = [names] if isinstance(names, str) else list(names)
    for pooling in POOLINGS:
        if names == [pooling]:
            return pooling
    found = ", ".join(names) or "nothing"
    raise CheckpointError(f"`{folder}` must pool by {' or '.join(POOLINGS)}, but pools by {found}; give --pooling.")


def max_text_tokens(folder: Path, context: int) -> int:
    """Returns the most tokens of a text, [CLS] and [SEP] included, as sentence-transformers reads it: by
    sentence_bert_config.json or else the tokenizer's settings, at most `context`."""
    lengths = read_json_object(folder / _LENGTH_FILE), read_json_object(folder / "tokenizer_config.json")
    limit = lengths[0].get("max_seq_length") or lengths[1].get("model_max_length") or context
    return min(int(limit), context)


# Which heads of a model vLLM and llama.cpp serve, by the lists of names of vLLM 0.33 and gguf 0.19.

Heads = tuple[HeadName, ...]
_ENCODER_HEADS: tuple[Heads, Heads] = (("none",), ("none",))
_SERVED_HEADS: dict[str, tuple[Heads, Heads]] = {
    "gpt_neox": (("tied", "pmi", "trained"), ("pmi", "trained")),
    "llama": (("tied", "trained"), ("tied", "trained")),
    "gpt2": (("tied",), ("tied",)),
    "gemma3": (("tied",), ("tied",)),
    **dict.fromkeys(("bert", "roberta", "xlm_roberta", "modernbert"), _ENCODER_HEADS),
}
"""Heads that vLLM and llama.cpp serve, by family; one with a bias counts as `pmi`."""

_ACTIVATIONS: dict[str, dict[str, str]] = {
    "vLLM": {"llama": "silu", "gemma3": "gelu_tanh"},
    "llama.cpp": {"llama": "silu", **dict.fromkeys(("gpt_neox", "gpt2", "gemma3"), "gelu_tanh")},
}
"""By program: families that it serves with one activation alone."""


def _served_heads(model: ModelConfig) -> dict[str, Heads]:
    """{program: heads that it serves of this model}"""
    heads = dict(zip(("vLLM", "llama.cpp"), _SERVED_HEADS[model.family], strict=True))
    is_unlisted = model.is_distilbert() or (model.is_encoder() and model.is_causal)  # the latter: ModernBertDecoder
    for program, activations in _ACTIVATIONS.items():
        has_another_base = (program, model.family) == ("llama.cpp", "gpt_neox") and model.rotary_base != 10_000
        has_another_activation = activations.get(model.family, model.activation) != model.activation
        if is_unlisted or has_another_base or has_another_activation:
            heads[program] = ()
    return heads


def serving_support(config: RunConfig, head: HeadName | None = None, *, has_bias: bool = False) -> str:
    """Returns a sentence: which of the run's possible heads vLLM and llama.cpp serve, and whether they serve an export
    with `head`. `has_bias`: whether that export has a bias in its head."""
    heads_by_program = _served_heads(config.model)
    stored_as = {head: _stored_head(config, head, config.objective.output_bias) for head in possible_heads(config)}
    served = ([head for head in stored_as if stored_as[head] in heads] for heads in heads_by_program.values())
    vllm, llama_cpp = (f"--head {', '.join(heads)}" if heads else "none of its heads" for heads in served)
    listed = f"vLLM serves {vllm}; llama.cpp {llama_cpp}" if vllm != llama_cpp else f"vLLM and llama.cpp serve {vllm}"
    if head is None:
        return listed
    programs = [name for name, heads in heads_by_program.items() if _stored_head(config, head, has_bias) in heads]
    return f"{listed}; this export: {' and '.join(programs) or 'neither'}"


def possible_heads(config: RunConfig) -> list[HeadName]:
    """The heads that a run can be exported with."""
    if config.no_head_reason() is not None:
        return ["none"]
    objective = config.objective
    # whether transformers has a class with these layers and this head
    has_class = config.model.transformers_can_bias_head() or not objective.output_bias
    is_possible: dict[HeadName, bool] = {
        "none": True,
        "tied": has_class and not objective.trains_head(),
        "pmi": objective.head() == "pmi" and config.model.transformers_can_bias_head(),
        "trained": has_class and (objective.name == "vanilla" or objective.trains_head()),
    }
    return [head for head, possible in is_possible.items() if possible]


def _stored_head(config: RunConfig, head: HeadName, has_bias: bool) -> HeadName:
    """The head of `_SERVED_HEADS` that is stored like `head`: with a bias as `pmi`, and a trained one of a tied
    model as `tied`."""
    if head == "none" or config.model.is_encoder():
        return head
    if has_bias:
        return "pmi"
    return "tied" if head == "trained" and not config.objective.trains_head() else head
