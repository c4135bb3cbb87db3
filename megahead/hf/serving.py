"""Which heads of a model vLLM and llama.cpp serve, by the lists of names of vLLM 0.33 and gguf 0.19; without torch."""

from __future__ import annotations

from megahead.config.model import ModelConfig
from megahead.config.objective import HeadName
from megahead.config.run import RunConfig

Heads = tuple[HeadName, ...]
_ENCODER: tuple[Heads, Heads] = (("none",), ("none",))
_SERVED_HEADS: dict[str, tuple[Heads, Heads]] = {
    "gpt_neox": (("tied", "pmi", "trained"), ("pmi", "trained")),
    "llama": (("tied", "trained"), ("tied", "trained")),
    "gpt2": (("tied",), ("tied",)),
    "gemma3": (("tied",), ("tied",)),
    **dict.fromkeys(("bert", "roberta", "xlm_roberta", "modernbert"), _ENCODER),
}
"""Heads that vLLM and llama.cpp serve, by family; one with a bias counts as `pmi`."""


def serving_support(config: RunConfig, head: HeadName | None = None, *, has_bias: bool = False) -> str:
    """Returns a sentence: which heads of those that the run can be exported with vLLM and llama.cpp serve, and whether
    they serve an export with `head`. `has_bias`: whether that export has a bias in its head."""
    heads_by_program = _heads_by_program(config.model)
    stored_as = {head: _stored_head(config, head, config.objective.output_bias) for head in possible_heads(config)}
    served = ([head for head in stored_as if stored_as[head] in heads] for heads in heads_by_program.values())
    vllm, llama_cpp = (f"--head {', '.join(heads)}" if heads else "none of its heads" for heads in served)
    listed = f"vLLM serves {vllm}; llama.cpp {llama_cpp}" if vllm != llama_cpp else f"vLLM and llama.cpp serve {vllm}"
    if head is None:
        return listed
    programs = [name for name, heads in heads_by_program.items() if _stored_head(config, head, has_bias) in heads]
    return f"{listed}; this export: {' and '.join(programs) or 'neither'}"


def _heads_by_program(model: ModelConfig) -> dict[str, Heads]:
    is_distilbert = model.family == "bert" and not model.token_types
    is_unlisted = is_distilbert or (model.is_encoder() and model.is_causal)  # the latter: ModernBertDecoder
    return dict(zip(("vLLM", "llama.cpp"), ((), ()) if is_unlisted else _SERVED_HEADS[model.family], strict=True))


def possible_heads(config: RunConfig) -> list[HeadName]:
    """The heads that a run can be exported with."""
    if config.no_head_reason() is not None:
        return ["none"]
    objective = config.objective
    is_possible: dict[HeadName, bool] = {
        "none": True,
        "tied": not objective.trains_head(),
        "pmi": objective.head() == "pmi" and config.model.has_class_with_head_bias(),
        "trained": objective.name == "vanilla" or objective.trains_head(),
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
