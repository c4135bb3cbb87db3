"""The losses of tools/bench_loss.py: headless and full softmax, forward and backward, by time and memory.

On a CPU a loss takes the table. On a GPU, as in a training step, candidates are chosen and their rows looked up before,
so that the timed code never synchronizes. N outputs, D features, U candidates, V vocabulary.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.command import PADDED_PYTHIA_VOCABULARY as VOCABULARY
from benchmarks.timing import (
    Clock,
    Cost,
    describe_device,
    measure_cost,
    measure_matmul_rate,
    run_in_child,
    run_interleaved,
)
from megahead.config.objective import ObjectiveConfig
from megahead.losses.candidates import Candidates, all_rows_as_candidates
from megahead.losses.contrastive import build_objective, cwt_loss
from megahead.losses.softmax import candidate_loss
from megahead.objectives.micro_batch import CANDIDATE_MULTIPLE
from megahead.report.tables import terminal, to_json, to_rich

ERROR_SIZE = 1024  # targets for the errors against float64
ERROR_COLUMNS = ("loss", "gradient of outputs", "of the table")

# From outputs [N, D], targets [N] and the table [V, D] to the mean loss
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


def paper_loss(outputs_ND: Tensor, targets_N: Tensor, table_VD: Tensor) -> Tensor:
    """N x N scores against the targets' embeddings, duplicates included."""
    scores_NN = outputs_ND @ table_VD[targets_N].T
    return F.cross_entropy(scores_NN, torch.arange(len(targets_N), device=targets_N.device))


def plain_softmax_loss(outputs_ND: Tensor, targets_N: Tensor, table_VD: Tensor) -> Tensor:
    """N x V scores."""
    return F.cross_entropy(outputs_ND @ table_VD.T, targets_N)


def our_softmax_loss(outputs_ND: Tensor, targets_N: Tensor, table_VD: Tensor) -> Tensor:
    """The full softmax, by the code of the headless loss."""
    return candidate_loss(outputs_ND, table_VD, all_rows_as_candidates(targets_N)) / len(targets_N)


SOFTMAX_LOSSES: dict[str, LossFunction] = {"softmax, ours": our_softmax_loss, "softmax, plain": plain_softmax_loss}
LOSSES: dict[str, LossFunction] = {"ours": cwt_loss, "paper": paper_loss, **SOFTMAX_LOSSES}


class LossInputs(NamedTuple):
    """The inputs of every loss."""

    outputs: Tensor
    targets: Tensor
    table: Tensor

    @staticmethod
    def random(targets: Tensor, vocabulary: int, hidden: int, dtype: torch.dtype) -> LossInputs:
        """Random outputs and table, the same each time, on the targets' device."""
        generator = torch.Generator().manual_seed(len(targets))
        outputs = torch.randn(len(targets), hidden, generator=generator)
        table = torch.randn(vocabulary, hidden, generator=generator) * hidden**-0.5
        outputs, table = (tensor.to(targets.device, dtype).requires_grad_() for tensor in (outputs, table))
        return LossInputs(outputs, targets, table)

    def loss_and_gradients(self, loss_function: LossFunction) -> list[Tensor]:
        """Returns the loss and the gradients of outputs and table."""
        loss = loss_function(*self)
        return [loss.detach(), *torch.autograd.grad(loss, [self.outputs, self.table])]

    def double(self) -> LossInputs:
        """The same in float64."""
        outputs, table = (tensor.detach().double().requires_grad_() for tensor in (self.outputs, self.table))
        return LossInputs(outputs, self.targets, table)


class Contestant(NamedTuple):
    """A loss to compare, and its inputs."""

    name: str
    loss_function: LossFunction
    inputs: LossInputs


def error_rows(contestants: Iterable[Contestant]) -> Iterator[dict[str, Any]]:
    """Yields a row for each loss: relative errors of its value and (in norm) its gradients against float64."""
    for name, loss_function, inputs in contestants:
        reference = plain_softmax_loss if name.startswith("softmax") else paper_loss
        values, exact_values = inputs.loss_and_gradients(loss_function), inputs.double().loss_and_gradients(reference)
        row = {"form": name}
        for column, value, exact in zip(ERROR_COLUMNS, values, exact_values, strict=True):
            row[column] = f"{float((value.double() - exact).norm() / exact.norm()):.1e}"
        yield row


def torch_kernel(outputs_ND: Tensor, rows_UD: Tensor, target_N: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's kernel, from 2.13 on, which computes gradients in the forward pass, by chunks of outputs."""
    options: Any = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
    loss: Tensor = F.linear_cross_entropy(outputs_ND, rows_UD, target_N, linear_bias=bias, options=options)  # type: ignore[attr-defined]
    return loss


# Returns the mean cross-entropy of `(outputs, rows, target indices)`, some also with `bias=` of the rows
Kernel = Callable[..., Tensor]
THIRD_PARTY_KERNELS = {
    "torch": (__name__, "torch_kernel"),
    "liger": ("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"),
    "cut": ("cut_cross_entropy", "linear_cross_entropy"),
}
"""Others' losses: torch's, Liger's and Apple's; the last takes a bias in its repository, but not on PyPI (25.1)."""

# Features added to carry the bias if a kernel takes none: D stays a multiple of its vector width
BIAS_FEATURES = 16


def find_kernels(small: LossInputs) -> tuple[dict[str, Kernel], list[str]]:
    """Returns the third-party kernels that work on `small`, and a message for each that does not."""
    kernels, unavailable = {}, []
    for name, (module, function) in THIRD_PARTY_KERNELS.items():
        try:
            kernel = getattr(importlib.import_module(module), function)
            for contestant in _kernel_contestants(small, choose_candidates(small.targets), {name: kernel}):
                contestant.inputs.loss_and_gradients(contestant.loss_function)
            kernels[name] = kernel
        except Exception as error:  # not installed, or any failure of its own
            unavailable.append(f"without {name}: {' '.join(str(error).split())[:200]}")
    return kernels, unavailable


def build_contestants(inputs: LossInputs) -> list[Contestant]:
    """Every loss, from the table."""
    return [Contestant(name, loss_function, inputs) for name, loss_function in LOSSES.items()]


def build_gpu_contestants(inputs: LossInputs, kernels: Mapping[str, Kernel]) -> list[Contestant]:
    """Every loss with its inputs: ours with candidates padded as by the loader, the others with unpadded ones."""
    candidates = choose_candidates(inputs.targets)
    padded = candidates.pad_to_multiple(CANDIDATE_MULTIPLE)
    contestants = [
        Contestant("ours", partial(our_loss, padded.to(inputs.outputs.device)), with_candidate_rows(inputs, padded)),
        Contestant("paper", paper_loss, with_candidate_rows(inputs, candidates)),
        *(Contestant(name, loss_function, inputs) for name, loss_function in SOFTMAX_LOSSES.items()),
        *_kernel_contestants(inputs, candidates, kernels),
    ]
    return sorted(contestants, key=lambda contestant: contestant.name.startswith("softmax"))


def choose_candidates(targets_N: Tensor) -> Candidates:
    """The headless candidates of these targets, on the CPU, as in the loader."""
    targets_N = targets_N.cpu()
    return build_objective(ObjectiveConfig(), VOCABULARY).candidate_set(targets_N).candidates(targets_N)


def with_candidate_rows(inputs: LossInputs, candidates: Candidates) -> LossInputs:
    """Returns inputs with the candidates' rows in place of the table."""
    assert candidates.ids_U is not None
    device = inputs.outputs.device
    rows_UD = inputs.table.detach()[candidates.ids_U.to(device)].requires_grad_()
    return LossInputs(inputs.outputs, candidates.target_N.to(device), rows_UD)


def our_loss(candidates: Candidates, outputs_ND: Tensor, target_N: Tensor, rows_UD: Tensor) -> Tensor:
    """The loss of a training step."""
    return candidate_loss(outputs_ND, rows_UD, candidates) / len(target_N)


def _kernel_contestants(inputs: LossInputs, candidates: Candidates, kernels: Mapping[str, Kernel]) -> list[Contestant]:
    rows, candidates = with_candidate_rows(inputs, candidates), candidates.to(inputs.outputs.device)
    contestants: list[Contestant] = []
    for name, kernel in kernels.items():
        contestants.append(Contestant(name, partial(headless_kernel_loss, kernel, candidates), rows))
        contestants.append(Contestant(f"softmax, {name}", partial(softmax_kernel_loss, kernel), inputs))
    return contestants


def headless_kernel_loss(
    kernel: Kernel, candidates: Candidates, outputs_ND: Tensor, target_N: Tensor, rows_UD: Tensor
) -> Tensor:
    """The headless loss by a third-party kernel, without the bias that the kernel adds to the target's score."""
    assert candidates.bias_U is not None
    bias_U = candidates.bias_U.to(outputs_ND.dtype)
    if "bias" in inspect.signature(kernel).parameters:
        loss = kernel(outputs_ND, rows_UD, target_N, bias=bias_U)
    else:
        ones_N1 = outputs_ND.new_ones(len(outputs_ND), 1)
        outputs_ND, rows_UD = (
            torch.cat([features, F.pad(more, (0, BIAS_FEATURES - 1))], dim=1)
            for features, more in ((outputs_ND, ones_N1), (rows_UD, bias_U[:, None]))
        )
        loss = kernel(outputs_ND, rows_UD, target_N)
    return loss + candidates.bias_U[target_N].mean().float()


def softmax_kernel_loss(kernel: Kernel, outputs_ND: Tensor, targets_N: Tensor, table_VD: Tensor) -> Tensor:
    """The full softmax by a third-party kernel."""
    return kernel(outputs_ND, table_VD, targets_N)


TOO_LARGE = "too large"
# On a GPU: warm-up passes, in which kernels are compiled and tuned, and timed passes
WARM_UP, PASSES = 3, 20


class PassCost(NamedTuple):
    """Time and memory of a forward and backward pass."""

    seconds: float
    mebibytes: float  # peak, above the memory at the start
    host_seconds: float | None = None  # for the host to launch it; if more than `seconds`, the GPU waits

    @staticmethod
    def median_of(costs: Sequence[PassCost | None]) -> PassCost | None:
        """The field-wise median; None where a cost is missing."""
        if None in costs:
            return None
        return PassCost(*(None if None in values else median(values) for values in zip(*costs, strict=True)))  # type: ignore[arg-type, type-var]


def compare_losses(targets: Tensor, arguments: argparse.Namespace) -> None:
    """Measures every loss at every size, on the device of `targets`, then errors against float64.

    Prints the results, and saves them to `arguments.output` as it goes."""
    device, dtype = targets.device, torch.bfloat16 if arguments.precision == "bf16" else torch.float32
    unavailable: list[str] = []
    build: Callable[[LossInputs], list[Contestant]] = build_contestants
    if device.type == "cuda":  # third-party kernels are for GPUs
        kernels, unavailable = find_kernels(LossInputs.random(targets[:256], VOCABULARY, arguments.hidden[0], dtype))
        build = partial(build_gpu_contestants, kernels=kernels)
    measure_rate = partial(measure_matmul_rate, device, arguments.precision)
    rate = measure_rate() if device.type == "cuda" else run_in_child(measure_rate)  # threads do not survive later forks
    console = terminal(width=160)
    console.print(f"{arguments.precision} on {describe_device(device)}, {rate / 1e9:,.0f} GFLOP/s matrix rate")
    source = arguments.data or "Zipf's law"
    console.print("\n".join([f"vocabulary {VOCABULARY:,}, targets from {source}", *unavailable]))
    saved: list[dict[str, object]] = []

    def save(rows: list[dict[str, object]]) -> None:
        saved.extend(rows)
        if arguments.output is not None:
            arguments.output.write_text(to_json(saved), encoding="utf-8")

    for hidden in arguments.hidden:
        console.print(f"\nhidden {hidden}: ours forward + backward; time and memory of others as multiples of ours")
        ratio_rows = []
        for size in arguments.sizes:
            inputs = LossInputs.random(targets[:size], VOCABULARY, hidden, dtype)
            rows = cost_rows(inputs, measure_costs(build(inputs), arguments), rate)
            ratio_rows.append(ratio_row(rows))
            save(rows)
        console.print(to_rich(ratio_rows))
    size = min(ERROR_SIZE, *arguments.sizes)
    inputs = LossInputs.random(targets[:size], VOCABULARY, arguments.hidden[0], dtype)
    console.print(f"\nrelative errors against float64, N = {size:,}, hidden {arguments.hidden[0]}")
    rows = list(error_rows(build(inputs)))
    console.print(to_rich(rows))
    save(rows)


def measure_costs(contestants: list[Contestant], arguments: argparse.Namespace) -> dict[str, PassCost | None]:
    """Median cost of each loss, measured in turn; None if it ran out of GPU memory."""
    if len(contestants[0].inputs.targets) > arguments.plain_up_to:
        contestants = [contestant for contestant in contestants if contestant.name != "softmax, plain"]
    out_of_memory: set[str] = set()

    def measure(contestant: Contestant) -> PassCost | None:
        if contestant.name not in out_of_memory:
            try:
                return measure_pass(contestant.loss_function, contestant.inputs)
            except torch.OutOfMemoryError:
                out_of_memory.add(contestant.name)
                torch.cuda.empty_cache()
        return None

    rounds = run_interleaved([partial(measure, one) for one in contestants], arguments.rounds, warm_up=0)
    medians = [PassCost.median_of(costs) for costs in zip(*rounds, strict=True)]
    return dict(zip((contestant.name for contestant in contestants), medians, strict=True))


def cost_rows(inputs: LossInputs, costs: dict[str, PassCost | None], rate: float) -> list[dict[str, Any]]:
    """A row for each loss; ours has its share of the matmul rate, by the three N x U x D products that it needs."""
    size, candidates, hidden = len(inputs.targets), len(inputs.targets.unique()), inputs.outputs.shape[1]
    rows: list[dict[str, Any]] = []
    for name, cost in costs.items():
        seconds, mebibytes, host = cost or (None, None, None)
        row = {"N": size, "U": candidates, "hidden": hidden, "form": name}
        rows.append(row | {"seconds": seconds, "MiB": mebibytes, "host seconds": host})
        if seconds and name == "ours":
            rows[-1]["of rate"] = 6 * size * candidates * hidden / seconds / rate
    return rows


def ratio_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """The rows of one N as one: our cost, and the others' time and memory as multiples of ours."""
    row_by_form = {row["form"]: row for row in rows}
    ours = row_by_form.pop("ours")
    ratios: dict[str, object] = {"N": ours["N"], "U": ours["U"]}
    if ours["seconds"] is None:
        return ratios | {"s": TOO_LARGE}
    ratios |= {"s": f"{ours['seconds']:.3g}", "of rate": f"{ours['of rate']:.0%}", "MiB": f"{ours['MiB']:,.0f}"}
    if ours["host seconds"] is not None:
        ratios["host s"] = f"{ours['host seconds']:.3g}"
    for name, other in row_by_form.items():
        fits = other["seconds"] is not None
        factors = [f"{other[column] / ours[column]:.1f}x" for column in ("seconds", "MiB") if fits]
        ratios[name] = " ".join(factors) or TOO_LARGE
    return ratios


def measure_pass(loss_function: LossFunction, inputs: LossInputs) -> PassCost:
    """Measures one forward and backward pass on the inputs' device."""
    if inputs.outputs.is_cuda:
        return measure_on_gpu(loss_function, inputs)
    return PassCost(*run_in_child(lambda: measure_on_cpu(loss_function, *inputs)))


def measure_on_gpu(loss_function: LossFunction, inputs: LossInputs) -> PassCost:
    """The mean of many passes, timed by CUDA events, synchronized only at the end."""
    clock = Clock(torch.device("cuda"))
    for _ in range(WARM_UP):
        inputs.loss_and_gradients(loss_function)
    clock.wait()
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    inputs.loss_and_gradients(loss_function)
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before_bytes) / 2**20
    host_start, start = time.perf_counter(), clock.now()
    for _ in range(PASSES):
        inputs.loss_and_gradients(loss_function)
    end, host = clock.now(), time.perf_counter() - host_start
    clock.wait()
    return PassCost(clock.seconds(start, end) / PASSES, peak, host / PASSES)


def measure_on_cpu(loss_function: LossFunction, outputs: Tensor, targets: Tensor, table: Tensor) -> Cost:
    """Measures one pass on the CPU, in this process, which should do nothing else."""
    small = outputs[:64].detach().requires_grad_()
    torch.autograd.grad(loss_function(small, targets[:64], table), [small])  # starts threads and loads libraries
    return measure_cost(lambda: torch.autograd.grad(loss_function(outputs, targets, table), [outputs, table]))
