"""An export's card is complete, and huggingface_hub uploads it to what speaks the Hub's protocol."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, get_args

import pytest
import yaml
from huggingface_hub import constants
from safetensors import safe_open
from transformers import AutoModelForMaskedLM, AutoTokenizer

from megahead.commands import convert
from megahead.config.objective import HeadName
from megahead.config.plan import RunPlan
from megahead.data.indexed import IndexedDataset
from megahead.data.inspection import merge_datasets
from megahead.data.preprocess import preprocess
from megahead.errors import FieldError, UserError
from megahead.hf.card import CardMetadata
from megahead.hf.export import export
from megahead.hf.heads import build_head
from megahead.hf.importing import from_hf
from megahead.hf.other_programs import possible_heads, serving_support
from megahead.hf.trained import TrainedModel
from megahead.sharing import add_sample_and_curves, check_push
from megahead.train.preflight import describe_run
from support.small_checkpoint import save_small, save_tokenizer, small_config

REPOSITORY = "someone/small"
MASKS = {"mask_token": 60, "cls_token": 58, "sep_token": 59}
BERT = {"family": "bert", "max_positions": 32}
BOTH = "vLLM and llama.cpp"
NONE = f"{BOTH} serve none of its heads"
LLAMA, GPT2 = {"family": "llama"}, {"family": "gpt2", "max_positions": 32}


@dataclass
class Hub:
    """What the Hub was sent."""

    created: list[dict[str, Any]] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    private: bool = True
    account: dict[str, Any] = field(default_factory=lambda: {"name": "someone", "type": "user"})
    """The answer to whoami-v2."""

    def answer(self, handler: BaseHTTPRequestHandler, method: str, path: str, body: bytes) -> Any:
        """The answer to a request, as the documented endpoints give it; None: there is nothing."""
        address = f"http://127.0.0.1:{handler.server.server_port}"  # type: ignore[attr-defined]
        if path == "/api/whoami-v2":
            return self.account if handler.headers["authorization"] == "Bearer hf_good" else None
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return {"url": f"{address}/{REPOSITORY}", "name": REPOSITORY}
        if path == "/api/validate-yaml":
            wrong = "license: mine" in json.loads(body)["content"].replace('"', "")
            return {"errors": [{"message": "license must be one of apache-2.0"}]} if wrong else {"warnings": []}
        if path.startswith(f"/api/models/{REPOSITORY}/preupload"):
            named = [one["path"] for one in json.loads(body)["files"]]
            modes = ["lfs" if name.endswith(("safetensors", "png")) else "regular" for name in named]
            sent = [
                {"path": name, "uploadMode": mode, "shouldIgnore": False}
                for name, mode in zip(named, modes, strict=True)
            ]
            return {"files": sent}
        if path == f"/{REPOSITORY}.git/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            upload = [{**one, "actions": {"upload": {"href": f"{address}/put/{one['oid']}"}}} for one in objects]
            return {"transfer": "basic", "objects": upload}
        if method == "PUT":
            self.objects[path.rpartition("/")[2]] = body
            return {}
        if path.startswith(f"/api/models/{REPOSITORY}/commit"):
            self.commit([json.loads(line) for line in body.splitlines()])
            return {"commitUrl": f"{address}/{REPOSITORY}/commit/1", "commitOid": "1", "success": True}
        if "/tree/" in path:
            old = {"type": "file", "path": "model-00001-of-00002.safetensors", "size": 1, "oid": "0" * 40}
            return [old]
        if path.startswith(f"/api/models/{REPOSITORY}"):
            files = [{"rfilename": "model-00001-of-00002.safetensors"}]
            return {"id": REPOSITORY, "sha": "0" * 40, "private": self.private, "siblings": files}
        return None

    def commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            key, value = line["key"], line["value"]
            if key == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                self.files[value["path"]] = self.objects[value["oid"]]
            elif key == "deletedFile":
                self.deleted.append(value["path"])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    found = Hub()

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            answer = found.answer(self, self.command, self.path.partition("?")[0], body)
            content = json.dumps({"error": "Invalid credentials"} if answer is None else answer).encode()
            missing = 404 if self.path.startswith("/api/models/") else 401
            self.send_response(missing if answer is None else 400 if "errors" in answer else 200)
            if answer is None and missing == 404:
                self.send_header("x-error-code", "RepoNotFound")
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = reply

        def log_message(self, format: str, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    yield found
    server.shutdown()
    server.server_close()


def run_with_log(folder: Path) -> Path:
    save_tokenizer(folder / "tokenizer.json")
    config = small_config(model={"vocab_size": 300}, data={"tokenizer": str(folder / "tokenizer.json")})
    save_small(folder / "run", config)
    lines = [{"step": k, "tokens": k, "seconds": k, "loss": 1.0, "learning_rate": 1.0} for k in range(1, 4)]
    (folder / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "run"


def converted(monkeypatch: pytest.MonkeyPatch, run: Path, *options: str) -> Path:
    output = run.parent / "out"
    given = ["convert", "to-hf", "--checkpoint", str(run), "--output", str(output), "--head", "pmi", *options]
    monkeypatch.setattr(sys, "argv", given)
    convert.main()
    return output


def test_an_export_is_uploaded_whole_with_a_complete_card(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--push", REPOSITORY, "--private", "--license", "apache-2.0", "--language", "en", "--language", "fr")
    folder = converted(monkeypatch, run_with_log(tmp_path), *given)
    assert hub.created == [{"name": "small", "organization": "someone", "visibility": "private"}]
    assert {name: hashlib.sha256(content).hexdigest() for name, content in hub.files.items()} == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()
    }
    assert hub.deleted == ["model-00001-of-00002.safetensors"]  # of an earlier upload in more parts
    said = capsys.readouterr().out
    assert "vLLM serves --head tied, pmi; llama.cpp --head pmi; this export: vLLM and llama.cpp" in said
    assert f"{REPOSITORY}" in said.splitlines()[-1]
    card = hub.files["README.md"].decode()
    head = yaml.safe_load(card.split("---")[1])
    assert head == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "language": ["en", "fr"],
        "tags": ["headless", "contrastive-weight-tying"],
    }
    assert f'from_pretrained("{REPOSITORY}")' in card
    assert "## Sample\n\n```text\n" in card
    assert "](curves.png)" in card
    assert "PATH" not in card
    assert hub.files["curves.png"].startswith(b"\x89PNG")


def test_the_program_of_the_card_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = converted(monkeypatch, run_with_log(tmp_path))
    program = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(compile(program.replace("max_new_tokens=50", "max_new_tokens=5"), "card", "exec"), {})


@pytest.mark.parametrize("named", ["out", 'a "b" {c}'])
def test_the_program_of_a_card_without_a_tokenizer_runs(tmp_path: Path, named: str) -> None:
    save_small(tmp_path / "run", small_config())
    output = tmp_path / named
    export(tmp_path / "run", output, "tied", card=CardMetadata(str(output)))
    exec(compile((output / "README.md").read_text().split("```python\n")[1].split("```")[0], "card", "exec"), {})


@pytest.mark.parametrize(
    ("sections", "head", "tag", "present", "absent"),
    [
        (
            {"tasks": {"names": ["next_item"], "items": "x", "every": 1}},
            "pmi",
            None,
            "the next item",
            "next token",
        ),
        ({"objective": {"name": "vanilla"}}, "trained", "text-generation", "vanilla softmax", "contrastive"),
        ({"model": BERT, "masking": MASKS}, "pmi", "fill-mask", "has others), the head's own |", "folded into"),
        (
            {"model": BERT, "masking": MASKS, "objective": {"retromae": {}}},
            "none",
            "feature-extraction",
            "read back",
            "imported",
        ),
        (
            {"model": BERT, "masking": MASKS, "objective": {"tsdae": {}}},
            "none",
            "feature-extraction",
            "60% of the tokens deleted before",
            "masked",
        ),
    ],
)
def test_a_card_says_what_the_model_is_for(
    tmp_path: Path, sections: dict[str, Any], head: Any, tag: str | None, present: str, absent: str
) -> None:
    save_small(tmp_path / "run", small_config(**sections))
    card = (export(tmp_path / "run", tmp_path / "out", head).folder / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1]).get("pipeline_tag") == tag
    assert present in card
    assert absent not in card


def test_a_card_of_weights_that_were_only_imported_has_no_recipe(tmp_path: Path) -> None:
    save_small(tmp_path / "run", small_config())
    from_hf(export(tmp_path / "run", tmp_path / "out", "tied").folder, tmp_path / "imported")
    card = (export(tmp_path / "imported", tmp_path / "again", "trained").folder / "README.md").read_text()
    assert "imported and exported with megahead" in card
    assert "| Trained for | 0 steps after its import |" in card
    assert not any(f"| {label} |" in card for label in ("Optimizer", "Batch", "Data", "Held-out text"))


def test_a_bar_in_a_name_ends_no_cell_of_a_card(tmp_path: Path) -> None:
    save_small(tmp_path / "run", small_config(data={"train": "texts/a|b"}))
    export(tmp_path / "run", tmp_path / "out", "tied")
    assert "| Data | a\\|b |" in (tmp_path / "out/README.md").read_text()


def test_a_card_names_the_text_that_was_read_and_no_folder_above_it(tmp_path: Path) -> None:
    texts, run = tmp_path / "someones/texts", run_with_log(tmp_path)
    texts.mkdir(parents=True)
    for number in range(5):
        (texts / f"{number}.txt").write_text("the cat sat on the mat")
    preprocess(texts, tmp_path / "tokenizer.json", tmp_path / "a")
    preprocess([texts / f"{number}.txt" for number in range(5)], tmp_path / "tokenizer.json", tmp_path / "b")
    merge_datasets([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    infos = [IndexedDataset(tmp_path / name).info for name in "abc"]
    names = "0.txt, 1.txt, 2.txt and 2 others"
    assert [info and info.source for info in infos] == ["texts", names, f"texts, {names}"]
    config = small_config(model={"vocab_size": 300}, data={"train": str(tmp_path / "a")})
    assert infos[0] is not None
    for number, (read, described) in enumerate(
        [(infos[0].fingerprint(), f"texts, 5 documents, {infos[0].tokens} tokens"), ("another", "a")]
    ):
        save_small(run, config, step=4 + number, texts={"data.train": [read]})
        export(run, tmp_path / "out", "tied")
        card = (tmp_path / "out/README.md").read_text()
        assert f"| Data | {described} |" in card
        assert "someones" not in card


@pytest.mark.parametrize(
    ("sections", "head"),
    [
        ({"objective": {"name": "vanilla"}}, "trained"),
        ({"objective": {"name": "vanilla"}}, "none"),
        ({}, "pmi"),
        ({"model": BERT, "masking": MASKS}, "pmi"),
        ({"model": BERT, "masking": MASKS, "objective": {"name": "vanilla"}}, "trained"),
        ({"model": BERT, "masking": MASKS, "objective": {"replaced_tokens": {"generator_layers": 1}}}, "none"),
    ],
)
def test_a_card_counts_the_parameters_that_are_exported(tmp_path: Path, sections: dict[str, Any], head: Any) -> None:
    save_small(tmp_path / "run", small_config(**sections))
    export(tmp_path / "run", tmp_path / "out", head)
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 - no mapping
    assert f" model of {stored:,} parameters " in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize(("max_positions", "has_sample"), [(128, True), (8, False)])
def test_a_card_of_an_encoder_has_a_sentence_that_it_completes(
    tmp_path: Path, max_positions: int, has_sample: bool
) -> None:
    save_tokenizer(tmp_path / "tokenizer.json")
    model = {**BERT, "vocab_size": 300, "max_positions": max_positions}
    data = {"tokenizer": str(tmp_path / "tokenizer.json"), "sequence_length": 8}
    save_small(tmp_path / "run", small_config(model=model, masking={**MASKS, "mask_token": 1}, data=data))
    folder = export(tmp_path / "run", tmp_path / "out", "pmi").folder
    sample = add_sample_and_curves(folder, tmp_path / "run")
    card = (folder / "README.md").read_text()
    assert ("## Sample" in card) == has_sample == (sample is not None)
    if sample is None:
        return
    assert sample in card
    sentence, *predictions = sample.splitlines()
    assert sentence == "Once upon a time there was a <|padding|>."
    tokenizer, encoder = AutoTokenizer.from_pretrained(folder), AutoModelForMaskedLM.from_pretrained(folder)
    inputs = tokenizer(sentence.replace(" <|", "<|"), return_tensors="pt")  # the word begins with the space
    (masked,) = (inputs["input_ids"][0] == 1).nonzero()[:, 0]
    best = encoder(**inputs).logits[0, masked].softmax(-1).topk(5)
    shares = [f"{share:.1%}" for share in best.values.tolist()]
    assert [line.split()[0] for line in predictions] == shares


def test_a_tokenizer_that_names_no_ends_gives_no_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = converted(monkeypatch, run_with_log(tmp_path)).rename(tmp_path / "published")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (published / name).unlink()
    from_hf(published, tmp_path / "run2")
    export(tmp_path / "run2", tmp_path / "again", "trained")
    assert add_sample_and_curves(tmp_path / "again", tmp_path / "run") is None
    card = (tmp_path / "again/README.md").read_text()
    assert "## Sample" not in card
    assert "## Curves" in card


def test_the_length_that_was_trained_is_the_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with_log(tmp_path)
    settings = json.loads((converted(monkeypatch, run) / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == small_config().data.sequence_length


@pytest.mark.usefixtures("hub")
def test_a_login_that_is_missing_or_wrong_is_said_before_anything_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with_log(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    with pytest.raises(
        FieldError, match=r"^`--push` must name a repository that your login may write, but is someone/small"
    ):
        converted(monkeypatch, run, "--push", REPOSITORY)
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    with pytest.raises(FieldError, match=r"^`--push` must be a repository of the Hub \(OWNER/NAME\), but is a/b/c"):
        check_push("a/b/c")
    with pytest.raises(FieldError, match=r"^`--push` must be a repository of the Hub \(OWNER/NAME\), but is 'small'"):
        check_push("small")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(FieldError, match=r"; `hf auth login` logs in\.$"):
        check_push(REPOSITORY)


@pytest.mark.usefixtures("hub")
def test_a_card_that_the_hub_refuses_is_said_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--push", REPOSITORY, "--license", "mine")
    with pytest.raises(
        UserError, match=r"must get a card that the Hub takes, .*license must be one of apache-2.0\)\.$"
    ):
        converted(monkeypatch, run_with_log(tmp_path), *given)
    assert not (tmp_path / "out").exists()


def fine_grained(*scopes: tuple[str, str]) -> dict[str, Any]:
    """A token's entry in whoami-v2: names of users, organizations or repositories, each with its permission."""
    scoped = [
        {"entity": {"type": "user", "name": name}, "permissions": ["repo.content.read", may]} for name, may in scopes
    ]
    return {"role": "fineGrained", "fineGrained": {"global": ["discussion.write"], "scoped": scoped}}


@pytest.mark.parametrize(
    ("repository", "token", "reason"),
    [
        (REPOSITORY, {"role": "read"}, "its token is for reading alone"),
        (REPOSITORY, {"role": "write"}, None),
        ("lab/small", {"role": "write"}, None),
        ("readers/small", {"role": "write"}, "its role there is read"),
        ("other/small", {"role": "write"}, "it is someone's, who is in no organization of this name"),
        (REPOSITORY, fine_grained(("someone", "repo.write")), None),
        (REPOSITORY, fine_grained((REPOSITORY, "repo.write")), None),
        ("lab/new", fine_grained(("lab/new", "repo.write")), "its token may write to lab/new"),
        (REPOSITORY, fine_grained(("someone", "inference.read")), "its token may write to no repository"),
        (REPOSITORY, fine_grained(("lab", "repo.write")), "its token may write to lab"),
    ],
)
def test_a_token_that_may_not_write_is_refused_before_an_export(
    hub: Hub, repository: str, token: dict[str, Any], reason: str | None
) -> None:
    organizations = [{"name": "lab", "roleInOrg": "contributor"}, {"name": "readers", "roleInOrg": "read"}]
    hub.account |= {"orgs": organizations, "auth": {"type": "access_token", "accessToken": token}}
    if reason is None:
        check_push(repository)
        return
    sentence = f"`--push` must name a repository that your login may write, but is {repository} ({reason}) instead; "
    with pytest.raises(FieldError, match=f"^{re.escape(sentence)}"):
        check_push(repository)


def test_private_is_for_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FieldError, match=r"^`--private` must be given with --push, but is alone"):
        converted(monkeypatch, tmp_path, "--private")


def test_a_hub_that_cannot_be_reached_is_no_fault_of_the_login(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    with pytest.raises(FieldError, match=r"^`--push` must go where the Hub can be reached, but is someone/small \("):
        check_push(REPOSITORY)


def test_what_all_can_read_is_not_taken_for_private(hub: Hub) -> None:
    check_push(REPOSITORY, private=True)
    hub.private = False
    with pytest.raises(FieldError, match=r"^`--private` must .* but is given for someone/small, which all can read"):
        check_push(REPOSITORY, private=True)
    check_push(REPOSITORY)


def test_a_code_that_yaml_takes_for_a_boolean_stays_a_language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = converted(monkeypatch, run_with_log(tmp_path), "--language", "no", "--license", "other: mine")
    head = yaml.safe_load((folder / "README.md").read_text().split("---")[1])
    assert (head["language"], head["license"]) == (["no"], "other: mine")


TIED = {"name": "vanilla", "tied": True}
GEMMA3 = {"family": "gemma3", "num_key_heads": 1}
NEOX_IN_VLLM = "vLLM serves --head tied, pmi; llama.cpp none of its heads"
GPT2_IN_VLLM = "vLLM serves --head tied, trained; llama.cpp none of its heads"


@pytest.mark.parametrize(
    ("sections", "head", "listed", "programs"),
    [
        ({}, "tied", "vLLM serves --head tied, pmi; llama.cpp --head pmi", "vLLM"),
        ({"objective": {"name": "vanilla"}}, "trained", f"{BOTH} serve --head trained", BOTH),
        ({"model": LLAMA}, "pmi", f"{BOTH} serve --head tied", "neither"),
        ({"model": LLAMA, "objective": TIED | {"output_bias": True}}, "tied", NONE, "neither"),
        ({"model": {**LLAMA, "activation": "gelu"}}, "tied", NONE, "neither"),
        ({"model": {"rotary_base": 500_000.0}}, "tied", NEOX_IN_VLLM, "vLLM"),
        ({"model": {"activation": "gelu"}}, "pmi", NEOX_IN_VLLM, "vLLM"),
        ({"model": {**GPT2, "activation": "gelu"}, "objective": TIED}, "trained", GPT2_IN_VLLM, "vLLM"),
        ({"model": {**GEMMA3, "activation": "gelu"}, "objective": TIED}, "tied", NONE, "neither"),
        ({"model": GEMMA3, "objective": TIED}, "tied", f"{BOTH} serve --head tied, trained", BOTH),
        ({"model": GPT2, "objective": TIED}, "trained", f"{BOTH} serve --head tied, trained", BOTH),
        ({"model": BERT, "masking": MASKS}, "none", f"{BOTH} serve --head none", BOTH),
        ({"model": {**BERT, "token_types": 0}, "masking": MASKS}, "none", NONE, "neither"),
    ],
)
def test_a_plan_and_its_export_say_who_serves_it(
    tmp_path: Path, sections: dict[str, Any], head: Any, listed: str, programs: str
) -> None:
    config = small_config(**sections)
    assert serving_support(config) == dict(describe_run(RunPlan.of(config)))["serving"] == listed
    save_small(tmp_path / "run", config)
    report = export(tmp_path / "run", tmp_path / "out", head)
    assert report.serving_support == f"{listed}; this export: {programs}"
    assert report.serving_support in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize("objective", [{}, {"bias": "corrected"}, {"vanilla_weight": 0.5}, {"name": "vanilla"}, TIED])
def test_a_plan_names_the_heads_that_its_export_can_have(tmp_path: Path, objective: dict[str, Any]) -> None:
    config = small_config(objective=objective)
    save_small(tmp_path / "run", config)
    model, heads = TrainedModel.open(tmp_path / "run"), get_args(HeadName)
    possible = []
    for head in heads:
        with suppress(UserError):
            build_head(head, model)
            possible.append(head)
    assert sorted(possible_heads(config)) == sorted(possible)
