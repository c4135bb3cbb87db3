"""Which runs have the micro-steps of their ranks captured as CUDA graphs (`engine.graphs`)."""

from __future__ import annotations

from megahead.config.embedding import shards_embedding
from megahead.config.plan import RunPlan
from megahead.config.token_subsets import subset_layers


def captures_micro_steps(plan: RunPlan) -> bool:
    """Whether a run's micro-steps are captured, on a CPU: take static inputs."""
    return wants_graphs(plan) and not graphs_unsupported_reason(plan)


def wants_graphs(plan: RunPlan) -> bool:
    """Whether the run's config asks for graphs on its device."""
    setting = plan.config.engine.graphs
    return plan.device == "cuda" if setting == "auto" else setting


def graphs_unsupported_reason(plan: RunPlan) -> str:
    """The reason why a run's micro-steps cannot be captured; empty if they can."""
    config = plan.config
    model, objective, engine = config.model, config.objective, config.engine
    conditions = {
        "tensor ranks communicate within a micro-step": config.parallel.tensor > 1,
        f"ZeRO {plan.zero_stage} communicates within a micro-step": plan.zero_stage > 1,
        "each step fetches other rows of the embedding": shards_embedding(config),
        "fp16's loss scale changes": engine.precision == "fp16",
        "dropout draws new masks": max(model.hidden_dropout, model.attention_dropout) > 0,
        "recomputation saves the state of random numbers": bool(engine.activation_checkpointing),
        "an auxiliary objective's sums are read in each micro-step": objective.auxiliary() is not None,
        "some layers compute a part of the tokens": bool(subset_layers(config)),
        "adaptive masking counts errors in each micro-step": config.masking is not None
        and config.masking.is_adaptive(),
        "its attention reads lengths on the host": engine.attention == "documents" and plan.device == "cuda",
        "DeepSpeed handles gradients in hooks": _handles_gradients_in_hooks(plan),
    }
    return next((reason for reason, holds in conditions.items() if holds), "")


def _handles_gradients_in_hooks(plan: RunPlan) -> bool:
    """Whether DeepSpeed's optimizer at stage 1 has hooks on gradients, in which it copies, sums or reduces them."""
    zero, is_bf16 = plan.zero, plan.config.engine.precision == "bf16"
    if plan.zero_stage != 1 or zero.get("offload_optimizer"):
        return plan.zero_stage == 1
    if is_bf16:
        return bool(plan.deepspeed["bf16"].get("immediate_grad_update"))
    return bool(zero.get("overlap_comm")) or bool(zero.get("contiguous_gradients", True))
