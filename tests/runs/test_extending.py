"""The objective and the masking strategy of docs/extending.md, defined outside of the package, in a file each: trained,
evaluated, logged, resumed and exported as the built-in ones are."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from megahead.config.auxiliaries import CustomConfig
from megahead.config.base import load_class
from megahead.config.plan import phases_of
from megahead.config.run import RunConfig
from megahead.data.batch import Batch
from megahead.data.loader import training_collator
from megahead.distributed.group import Group
from megahead.distributed.launch import Launch
from megahead.errors import ConfigError
from megahead.estimate import run_flops, run_parameters
from megahead.evaluate.perplexity import evaluate_checkpoint
from megahead.hf.export import export
from megahead.objectives.auxiliary import held_out_row_collator
from megahead.objectives.pretraining import weight_shapes
from megahead.report.panels import build_panels
from megahead.report.read import read_metrics, read_runs
from megahead.train.preflight import check_available_files
from megahead.train.run import pretrain
from support.long import long
from support.on_ranks import on_ranks
from support.small_run import same_tensors, small_config, stage, write_text

PAGE = Path(__file__).parents[2] / "docs/extending.md"
MASKS = {"mask_token": 60, "cls_token": 61, "sep_token": 62, "rate": 0.4}
BERT = {"family": "bert", "hidden_dropout": 0.0, "attention_dropout": 0.0, "max_positions": 32}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the files of the page, and text."""
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        assert len(code.splitlines()) <= 80
        (tmp_path / name).write_text(code)
    write_text(tmp_path)
    return tmp_path


def decoder(folder: Path, name: str, changes: dict[str, Any]) -> RunConfig:
    custom = {"objective": f"{folder}/second_next.py:SecondNext", "weight": 0.3}
    fixed = {"objective": {"custom": custom}, "optimizer.eps": 1e-4, "output_dir": str(folder / name)}
    return small_config(folder, fixed | changes)


def encoder(folder: Path, name: str, changes: dict[str, Any]) -> RunConfig:
    fixed = {
        "model": {"num_layers": 3, "hidden_size": 32, "num_heads": 4, "vocab_size": 63} | BERT,
        "masking": MASKS | {"strategy": f"{folder}/windows.py:Windows", "strategy_settings": {"size": 2}},
    }
    return decoder(folder, name, fixed | changes)


def run(group: Group, config: RunConfig, resume: str = "auto") -> str:
    return pretrain(config, Launch(), resume).ending


@pytest.mark.parametrize(
    ("kind", "ranks", "changes"),
    [
        long(decoder, 2, stage(1)),
        long(decoder, 2, stage(3)),
        (decoder, 2, {"engine.embedding": "rows"}),
        (decoder, 2, {"parallel.tensor": 2}),
        long(encoder, 2, stage(2)),
        (encoder, 2, stage(3)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_every_mesh_takes_the_same_course_and_a_resume_is_bitwise(
    folder: Path, kind: Any, ranks: int, changes: dict[str, Any]
) -> None:
    on_ranks(1, run, kind(folder, "alone", {}))
    on_ranks(ranks, run, kind(folder, "meshed", changes))
    first = sorted((folder / "meshed/checkpoints").glob("step-00000003*"))[0]
    on_ranks(ranks, run, kind(folder, "meshed-resumed", changes), str(first))
    assert same_tensors(folder / "meshed-resumed", folder / "meshed")
    alone, meshed = (read_metrics(folder / name).training for name in ("alone", "meshed"))
    for value in ("loss", "auxiliary_loss", "auxiliary_right"):
        assert [r[value] for r in meshed] == pytest.approx([r[value] for r in alone], abs=2e-5), value
    assert alone[0]["auxiliary_loss"] > 0
    scored, expected = (read_metrics(folder / name).validation[-1]["auxiliary"] for name in ("meshed", "alone"))
    assert scored == pytest.approx(expected, abs=2e-5)


def test_it_learns_is_evaluated_counted_and_exported(folder: Path) -> None:
    config = decoder(
        folder, "run", {"training.steps": 12, "training.evaluate_every": 12, "optimizer.learning_rate": 0.01}
    )
    on_ranks(1, run, config)
    log = read_metrics(folder / "run")
    assert log.training[-1]["auxiliary_loss"] < log.training[0]["auxiliary_loss"]
    assert {"auxiliary_loss", "auxiliary_right"} <= {
        panel["key"] for panel in build_panels(read_runs([folder / "run"]))
    }
    held_out = evaluate_checkpoint(folder / "run", "pmi").auxiliary
    assert held_out == pytest.approx(log.validation[-1]["auxiliary"], abs=1e-5)
    counted = sum(shape.numel() for name, shape in weight_shapes(config).items() if "embedding" not in name)
    counts = run_parameters(config)
    assert counts.body + counts.head == counted
    export(folder / "run", folder / "out", "pmi")
    exported = AutoModelForCausalLM.from_pretrained(folder / "out")
    assert not [name for name in exported.state_dict() if "transform" in name]


def test_it_goes_on_in_a_vanilla_phase(folder: Path) -> None:
    config = decoder(folder, "run", {"objective.schedule": {"vanilla_share": 0.5}})
    on_ranks(1, run, config)
    log = read_metrics(folder / "run")
    assert [record["auxiliary_loss"] > 0 for record in log.training] == [True] * 6
    assert log.validation[-1]["auxiliary"]["loss"] > 0
    shapes = weight_shapes(phases_of(config)[-1].config)
    assert run_parameters(config).total == sum(shape.numel() for shape in shapes.values())


def test_the_strategy_masks_windows_and_an_encoder_exports(folder: Path) -> None:
    config = encoder(folder, "run", {"training.steps": 2})
    text = torch.arange(22 * 8).view(8, 22).numpy() % 40 + 5
    chosen = training_collator(config, []).batch(text, range(8)).target_index_N.tolist()
    assert sum(place + 1 in chosen or place - 1 in chosen for place in chosen) > 0.8 * len(chosen)
    on_ranks(1, run, config)
    export(folder / "run", folder / "out", "none")
    assert AutoModel.from_pretrained(folder / "out").config.num_hidden_layers == 3


def test_where_there_is_nothing_to_learn_the_same_layers_are_called(folder: Path) -> None:
    """Under ZeRO 3, and where rows are fetched, ranks wait for each other in them."""
    config = encoder(folder, "run", {})
    kind = load_class("objective", f"{folder}/second_next.py:SecondNext")
    apart = Batch(torch.ones(1, 6, dtype=torch.long), None, torch.tensor([0, 3, 5]), torch.tensor([7, 8, 9]))
    batch = replace(apart, auxiliary=kind.prepare(apart, config, None))
    looked_up: list[torch.Tensor] = []
    backbone = SimpleNamespace(embed=lambda ids: looked_up.append(ids) or torch.ones(len(ids), 32))
    sums = kind(config).sums(SimpleNamespace(backbone=backbone, batch=batch, outputs_ND=torch.ones(3, 32)))
    assert [ids.tolist() for ids in looked_up] == [[1]]
    assert {name: float(value.detach()) for name, value in sums.items()} == {"loss": 0, "right": 0, "count": 0}


def test_a_progress_line_tells_all_that_it_logs() -> None:
    custom = CustomConfig(objective="o.py:O")
    logged = {"loss": 4.0, "auxiliary_loss": 1.0, "auxiliary_right": 0.5}
    assert custom.progress_text(logged) == "auxiliary 1.0000, right 0.5000"


def test_a_file_may_hold_postponed_annotations(folder: Path) -> None:
    later = folder / "later.py"
    later.write_text(f"from __future__ import annotations\n{(folder / 'windows.py').read_text()}")
    assert load_class("masking.strategy", f"{later}:Windows")(2).size == 2


@pytest.mark.parametrize("name", ["broken.py:Mine", ".relative:Mine"])
def test_what_fails_while_it_is_imported_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(folder)
    (folder / "broken.py").write_text("class Mine(Missing): ...\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"must name a class that can be imported, but is '.*Error: "):
            load_class("masking.strategy", name)


@pytest.mark.parametrize("kept", ["torch.nn.Parameter(torch.zeros(()))", "torch.nn.Buffer(torch.ones(2))"])
def test_what_no_checkpoint_holds_is_one_sentence(folder: Path, kept: str) -> None:
    code = "import torch\nfrom megahead.objectives.auxiliary import Auxiliary\nclass Mine(Auxiliary):\n"
    code += f"    def __init__(self, config):\n        super().__init__(config)\n        self.kept = {kept}\n"
    (folder / "mine.py").write_text(code)
    config = decoder(folder, "run", {"objective": {"custom": {"objective": f"{folder}/mine.py:Mine"}}})
    with pytest.raises(ConfigError, match=r"one dimension or more, and no buffers, but is .* `kept`"):
        weight_shapes(config)


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        ("{**sums, 'right': right_Q}", r"'loss': \[\], 'right': \[\d+\], 'count': \[\]"),
        ("{'count': sums['count']}", r"'count': \[\]"),
        ("{**sums, 'count': 3}", r"'loss': \[\], 'right': \[\], 'count': 'int'"),
        ("sums['loss']", r"'Tensor': \[\]"),
    ],
)
def test_sums_that_are_no_scalars_or_lack_the_loss_are_one_sentence(folder: Path, returned: str, got: str) -> None:
    code = (folder / "second_next.py").read_text()
    (folder / "wrong.py").write_text(re.sub(r"return (\{.*\})", rf"sums = \1\n        return {returned}", code))
    config = decoder(folder, "run", {"objective": {"custom": {"objective": f"{folder}/wrong.py:SecondNext"}}})
    rule = r"`objective.custom.objective` must name a class whose `sums` returns scalar tensors by name, `loss` among"
    with pytest.raises(ConfigError, match=rf"{rule} them, but is one with {{{got}}} instead\."):
        pretrain(config)


def test_what_is_no_objective_is_one_sentence(folder: Path) -> None:
    config = decoder(folder, "run", {"objective": {"custom": {"objective": f"{folder}/windows.py:Windows"}}})
    with pytest.raises(ConfigError, match=r"must name a subclass of megahead\.objectives\.auxiliary\.Auxiliary"):
        pretrain(config)
    with pytest.raises(ConfigError, match=r"must name a subclass of"):
        check_available_files(config)


@pytest.mark.parametrize(("name", "earlier"), [("num_loss_terms", "counted"), ("is_evaluated", "evaluated")])
def test_an_earlier_name_is_not_silently_ignored(folder: Path, name: str, earlier: str) -> None:
    code = (folder / "second_next.py").read_text()
    assert name in code
    (folder / f"{earlier}.py").write_text(code.replace(name, earlier))
    config = decoder(folder, "run", {"objective": {"custom": {"objective": f"{folder}/{earlier}.py:SecondNext"}}})
    with pytest.raises(ConfigError, match=f"must define `{name}`, but is .* with its earlier name `{earlier}`"):
        check_available_files(config)


EARLIER_COLLATOR = """

class Collator(RowCollator):
    def predicted(self, info):
        return 1


class Collated(SecondNext):
    @classmethod
    def collator(cls, collator, config, seed):
        return Collator()
"""


def test_an_earlier_name_of_a_collator_is_not_silently_ignored(folder: Path) -> None:
    imports = "from megahead.data.batch import RowCollator\n"
    (folder / "collated.py").write_text(imports + (folder / "second_next.py").read_text() + EARLIER_COLLATOR)
    config = decoder(folder, "run", {"objective": {"custom": {"objective": f"{folder}/collated.py:Collated"}}})
    with pytest.raises(ConfigError, match=r"must define `num_predicted_tokens`, but is .* with its earlier name `pred"):
        held_out_row_collator(config)


def test_what_is_no_strategy_is_one_sentence(folder: Path) -> None:
    config = encoder(folder, "run", {"masking": MASKS | {"strategy": f"{folder}/second_next.py:SecondNext"}})
    rule = "must name a class with build, at, starts, weights, but is .* without build"
    with pytest.raises(ConfigError, match=rule):
        check_available_files(config)


def test_what_reads_all_outputs_is_estimated_so(folder: Path) -> None:
    plain = (folder / "second_next.py").read_text()
    (folder / "all.py").write_text(plain.replace("is_evaluated = True", "needs_all_outputs = True"))
    costs = []
    for name in ("second_next", "all"):
        custom = {"objective": {"custom": {"objective": f"{folder}/{name}.py:SecondNext"}}}
        costs.append(run_flops(encoder(folder, name, custom), 40).body)
    assert costs[0] < costs[1]


def test_parameters_have_a_name_that_no_part_of_the_model_has(folder: Path) -> None:
    plain = (folder / "second_next.py").read_text()
    (folder / "head.py").write_text(plain.replace("is_evaluated = True", 'module_name = "head"'))
    config = decoder(folder, "run", {"objective": {"custom": {"objective": f"{folder}/head.py:SecondNext"}}})
    with pytest.raises(ConfigError, match=r"must leave `module_name` as it is \(custom\)"):
        weight_shapes(config)
