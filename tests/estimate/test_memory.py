"""Memory a rank: how it goes down with stages and ranks, and what the command says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megahead.commands.estimate import zero_stages
from megahead.config.loading import load_config
from megahead.config.objective import CPU_CHUNKS, GPU_CHUNKS
from megahead.config.plan import RunPlan
from megahead.config.run import RunConfig
from megahead.distributed.group import Group
from megahead.estimate import expected_candidates, rank_memory, rank_parameters
from megahead.objectives.pretraining import build_parallel_model
from support.forked import run_script

ROOT = Path(__file__).parents[2]
PYTHIA_12B = str(ROOT / "configs/pythia-12b-headless.yaml")


def pythia(*overrides: str) -> RunConfig:
    return load_config(PYTHIA_12B, [f"engine.deepspeed={ROOT}/configs/deepspeed/zero1.json", *overrides])


def planned(*overrides: str, ranks: int = 256) -> RunPlan:
    return RunPlan.of(pythia(*overrides), ranks)


@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize("bias", ["false", "true"])
def test_parameters_of_a_tensor_rank_are_those_of_the_split_model(tensor: int, bias: str) -> None:
    vanilla = "objective.name=vanilla", f"objective.output_bias={bias}"
    config = pythia(f"parallel.tensor={tensor}", "model.num_layers=3", *vanilla)
    split = build_parallel_model(config, Group(0, tensor), torch.device("meta"))
    assert rank_parameters(config) == sum(p.numel() for p in split.parameters())


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        ("init.mode=probe", "objective.name=vanilla", "objective.output_bias=true"),
        ("init.mode=table", "objective.learned_temperature=true"),
        ("init.mode=table", "engine.embedding=rows"),
    ],
    ids=str,
)
def test_frozen_parameters_have_no_states(tensor: int, settings: tuple[str, ...]) -> None:
    from_earlier = f"parallel.tensor={tensor}", "model.num_layers=3", "init.from_checkpoint=earlier"
    plan = planned(*from_earlier, *settings, ranks=32)
    split = build_parallel_model(plan.config, Group(0, tensor), torch.device("meta"))
    shards = plan.config.engine.embedding == "rows"
    count = sum(
        p.numel() for name, p in split.named_parameters() if p.requires_grad and not (shards and "embed" in name)
    )
    assert rank_parameters(plan.config, trained=True) == count
    for stage in range(0 if not shards else 1, 4):
        memory = rank_memory(plan, stage)
        assert memory.optimizer == (12 if stage else 8) * count / (plan.data_ranks if stage else 1)
        assert memory.gradients == 4 * count / (plan.data_ranks if stage > 1 else 1)
        assert memory.weights >= 2 * rank_parameters(plan.config) / (plan.data_ranks if stage == 3 else 1)


def test_a_frozen_model_saves_nothing_for_a_backward_pass() -> None:
    vanilla = "objective.name=vanilla", "init.from_checkpoint=earlier", "engine.activation_checkpointing=false"
    whole, probe = (rank_memory(planned(*vanilla, f"init.mode={mode}")) for mode in ("finetune", "probe"))
    assert 20 * probe.activations < whole.activations


def test_an_encoders_transform_before_its_head_is_on_every_tensor_rank() -> None:
    config = load_config("bert-small-vanilla", ["parallel.tensor=2"])
    split = build_parallel_model(config, Group(0, 2), torch.device("meta"))
    assert rank_parameters(config) == sum(p.numel() for p in split.parameters())


def test_another_stage_is_estimated_as_if_the_config_had_it() -> None:
    settings = "parallel.tensor=1", "engine.activation_checkpointing=false"
    plans = [planned(*settings, f"engine.deepspeed={{zero_optimization: {{stage: {stage}}}}}") for stage in range(4)]
    for plan in plans:
        assert [rank_memory(plan, stage) for stage in range(4)] == [rank_memory(each) for each in plans]
    assert zero_stages(pythia("engine.activation_checkpointing=selective")) == [0, 1, 2]
    settings = "engine.precision=bf16", "engine.deepspeed={zero_optimization: {stage: 1}, bf16: {enabled: true}}"
    assert rank_memory(planned(*settings), 0).total > 0, "DeepSpeed's sections on precision differ by stage"


def test_a_vanilla_share_of_the_loss_has_rows_and_scores_of_all_ids() -> None:
    mixed, vanilla = planned("objective.vanilla_weight=0.3"), planned("objective.name=vanilla")
    assert rank_memory(mixed).loss == rank_memory(planned()).loss + rank_memory(vanilla).loss


def test_masters_and_moments_are_divided_by_data_ranks_from_stage_1_on() -> None:
    few, many = rank_memory(planned(ranks=8 * 16)), rank_memory(planned(ranks=8 * 32))
    assert few.optimizer == 2 * many.optimizer
    assert few.weights == many.weights
    zero = [rank_memory(planned(), stage) for stage in range(4)]
    assert zero[0].optimizer > zero[1].optimizer == zero[2].optimizer
    assert zero[1].gradients > zero[2].gradients
    assert zero[2].weights > zero[3].weights


def test_muon_keeps_one_moment_of_the_matrices_it_moves() -> None:
    adamw, muon = rank_memory(planned()), rank_memory(planned("optimizer.name=muon"))
    matrices = 36 * 12 * 5120**2 / 8  # of a tensor rank
    assert adamw.optimizer - muon.optimizer == 4 * matrices / 32
    assert muon.buffers - adamw.buffers == 6 * matrices
    ahead = "objective.multi_token={heads: 2}"  # two blocks, whole on every tensor rank
    adamw, muon = rank_memory(planned(ahead)), rank_memory(planned(ahead, "optimizer.name=muon"))
    assert muon.buffers - adamw.buffers == 6 * (matrices + 2 * 12 * 5120**2)


def test_a_run_in_phases_needs_what_its_larger_phase_needs() -> None:
    scheduled = planned("objective.schedule.vanilla_share=0.1")
    headless, vanilla = planned(), planned("objective.name=vanilla", "objective.output_bias=true")
    assert rank_memory(scheduled) == rank_memory(vanilla)
    assert rank_memory(vanilla).total > rank_memory(headless).total


def test_gradients_at_stage_1_are_held_as_fp32_sums_alone() -> None:
    config = pythia("engine.precision=bf16")
    for device in ("cuda", "cpu"):
        assert rank_memory(RunPlan.of(config, 256, device)).gradients == 4 * rank_parameters(config)


def test_buckets_sent_beside_the_backward_pass_are_two() -> None:
    two, one = (
        planned("engine.deepspeed=" + f"{{zero_optimization: {{stage: 2, overlap_comm: {overlap}}}}}")
        for overlap in ("true", "false")
    )
    assert rank_memory(two).buffers - rank_memory(one).buffers == 2 * two.zero["reduce_bucket_size"]


def test_offloading_moves_the_optimizer_to_the_host() -> None:
    here = rank_memory(planned())
    away = rank_memory(planned(f"engine.deepspeed={ROOT}/configs/deepspeed/zero1_offload.json"))
    assert (here.host, away.optimizer) == (0, 0)
    assert away.host == here.optimizer
    assert away.total <= here.total - here.optimizer


def test_a_table_of_rows_is_divided_by_all_ranks_and_lighter_rules_are_lighter() -> None:
    rows, dense_table = ((f"engine.embedding={kind}", "model.vocab_size=1048576") for kind in ("rows", "dense"))
    dense, few = rank_memory(planned(*dense_table)), rank_memory(planned(*rows))
    many = rank_memory(planned(*rows, ranks=2048))
    assert dense.table == 0
    assert many.table < few.table / 3
    assert few.total < dense.total
    assert rank_parameters(pythia(*rows)) == rank_parameters(pythia(*dense_table)) - 1048576 * 5120 // 8
    light = [rank_memory(planned(*rows, f"optimizer.table.rule={rule}")).table for rule in ("adamw_row", "adagrad")]
    assert few.table > light[0] > light[1]


@pytest.mark.parametrize("vocab_size", [1024, 50 * 1024])
def test_the_loss_holds_as_many_scores_as_a_chunk_of_it_has(vocab_size: int) -> None:
    settings = f"model.vocab_size={vocab_size}", "objective.name=vanilla", "parallel.tensor=1", "batch.micro_size=2"
    plans = {name: planned(*settings, f"engine.precision={name}", ranks=1) for name in ("fp32", "bf16", "fp16")}
    config = plans["fp32"].config
    targets, hidden = 2 * config.data.sequence_length, config.model.hidden_size
    matrices = (targets + vocab_size) * hidden
    on_cpu = vocab_size * CPU_CHUNKS.outputs_per_chunk(targets, vocab_size, 4)
    for precision, score_size, cpu_size in (("fp32", 4, 4), ("bf16", 2, 4 + 2), ("fp16", 4 + 2, 4)):
        in_float32 = 0 if precision == "fp32" else 4 * vocab_size * hidden
        scores = vocab_size * GPU_CHUNKS.outputs_per_chunk(targets, vocab_size, score_size)
        size = 4 if precision == "fp32" else 2
        assert rank_memory(plans[precision]).loss == 2 * size * matrices + in_float32 + score_size * scores
        copies = max(size * matrices, cpu_size * on_cpu)
        assert rank_memory(replace(plans[precision], device="cpu")).loss == (size + 4) * matrices + copies


def test_graphs_keep_activations_and_the_loss_once_more() -> None:
    captured = "engine.graphs=auto", "parallel.tensor=1", "engine.activation_checkpointing=false"
    memory = rank_memory(planned(*captured))
    assert memory.graphs == memory.activations + memory.loss + 2 * rank_parameters(pythia("parallel.tensor=1"))
    assert memory.total - memory.graphs == rank_memory(planned(*captured, "engine.graphs=false")).total
    assert rank_memory(planned(*captured, "engine.device=cpu")).graphs == 0
    assert rank_memory(planned("engine.graphs=auto")).graphs == 0  # tensor ranks


def test_recomputed_activations_are_an_order_less() -> None:
    kept = rank_memory(planned("engine.activation_checkpointing=false")).activations
    some = rank_memory(planned("engine.activation_checkpointing=selective")).activations
    assert rank_memory(planned()).activations < kept / 3
    assert kept / 3 < some < kept


@pytest.mark.parametrize(("targets", "measured"), [(16_384, 4_300), (65_536, 10_900), (262_144, 22_000)])
def test_expected_candidates_are_near_those_of_wikipedia(targets: int, measured: int) -> None:
    assert expected_candidates(targets, 50_277) == pytest.approx(measured, rel=0.1)
    assert expected_candidates(10, 50_277) == 10


def test_the_command_names_the_stage_that_is_needed() -> None:
    options = ["--config", PYTHIA_12B, "--world-size", "256"]
    fits = run_script("tools/estimate.py", *options, "--memory", "20")
    assert fits.returncode == 0, fits.stderr
    assert "11,589,171,200 parameters" in fits.stdout
    assert "ZeRO 1 is enough (the config has 1)." in fits.stdout
    assert "299,892,736,000 tokens" in fits.stdout
    assert (
        "No stage fits: take more ranks, or lower batch.micro_size (now 4), or"
        in run_script("tools/estimate.py", *options, "--memory", "2").stdout
    )


def test_a_dry_run_checks_256_ranks_without_them() -> None:
    options = ["launch/pretrain.py", "--config", PYTHIA_12B, "--dry-run", "--world-size"]
    done = run_script(*options, "256")
    assert done.returncode == 0, done.stderr
    assert "8 tensor x 32 data ranks" in done.stdout
    assert "4 rows x 8 accumulation x 32 data ranks" in done.stdout
    assert "GiB a rank" in done.stdout
    wrong = run_script(*options, "250")
    assert wrong.returncode == 2
    hint = "try 248 ranks, or parallel.tensor=2"
    assert (
        wrong.stderr == f"error: `parallel.tensor` must divide the number of ranks (250), but is 8 instead; {hint}.\n"
    )
