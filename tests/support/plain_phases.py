"""A run in two phases by one plain torch process: what a scheduled run must equal on any mesh."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megahead.config.plan import phases_of
from megahead.config.run import RunConfig
from megahead.data.indexed import IndexedDataset
from megahead.data.loader import token_counts, training_collator
from megahead.data.samples import ConcatenatedSamples
from megahead.distributed.group import Group
from megahead.losses.candidates import log_unigram
from megahead.losses.contrastive import build_objective
from megahead.objectives.loader import StepLoader
from megahead.objectives.pretraining import Pretraining
from megahead.optim import build_optimizer, learning_rate_ratio, set_learning_rate
from support.initialized import initialized
from support.plain_course import Course


def plain_phases(config: RunConfig) -> Course:
    """No DeepSpeed, no ranks, no checkpoints: the second model takes over weights and moments of the first."""
    dataset = IndexedDataset(config.data.train)
    samples = ConcatenatedSamples(dataset, config.sample_length(), config.seed)
    text_counts_V = token_counts([dataset], samples, config.model.padded_vocab_size())
    counts_V = torch.zeros_like(text_counts_V)
    losses: list[float] = []
    norms: list[float] = []
    before: tuple[Pretraining, torch.optim.Optimizer] | None = None
    causal = phases_of(config)[0].config.model.is_causal
    for phase in phases_of(config):
        module = initialized(phase.config)
        optimizer = build_optimizer(module, config.optimizer)
        if before is not None:
            log_q_V = log_unigram(counts_V, config.model.vocab_size, text_counts_V)
            _take_over_(module, optimizer, *before, _padded(log_q_V, len(counts_V)))
        if phase.config.model.is_causal != causal:  # other tokens are targets from here on
            causal = phase.config.model.is_causal
            counts_V.zero_()
        objective = build_objective(phase.config.objective, config.model.vocab_size)
        collator = training_collator(phase.config, [dataset], steps_before_masking=config.steps_before_masking())
        loader = StepLoader(samples, objective, config.data, config.batch, Group(), seed=config.seed, collator=collator)
        for step in phase.steps:
            micro_batches = loader.step(step * config.batch.global_size).micro_batches
            optimizer.zero_grad()
            loss = torch.stack([module(micro) for micro in micro_batches]).mean()
            loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), config.optimizer.gradient_clipping)))
            ratio = learning_rate_ratio(config.schedule, step, config.training.steps)
            set_learning_rate(optimizer.param_groups, config.optimizer.learning_rate * ratio)
            optimizer.step()
            losses.append(loss.item())
            for micro in micro_batches:
                ids_N = micro.batch.target_ids_N
                counts_V.index_add_(0, ids_N, torch.ones_like(ids_N))
        before = module, optimizer
    return Course(losses, norms, {f"weight/{name}": p.detach() for name, p in module.named_parameters()})


def _padded(log_q_V: Tensor, rows: int) -> Tensor:
    return torch.cat([log_q_V, torch.zeros(rows - len(log_q_V))])


@torch.no_grad()
def _take_over_(
    module: Pretraining,
    optimizer: torch.optim.Optimizer,
    earlier: Pretraining,
    earlier_optimizer: torch.optim.Optimizer,
    log_q_V: Tensor,
) -> None:
    theirs = dict(earlier.named_parameters())
    born = {"head.weight": theirs["backbone.embedding.weight"], "output_bias.bias": log_q_V}
    steps = next(iter(earlier_optimizer.state.values()))["step"]
    for name, parameter in module.named_parameters():
        if name in theirs:
            parameter.copy_(theirs[name])
            kept = earlier_optimizer.state[theirs[name]]
            optimizer.state[parameter] = {kind: value.clone() for kind, value in kept.items()}
        else:
            parameter.copy_(born[name])
            zeros = {kind: torch.zeros_like(parameter) for kind in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": steps.clone(), **zeros}
