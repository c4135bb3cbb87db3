"""Completes the model card of an export, and uploads its folder to the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megahead.errors import FieldError, UserError
from megahead.files import write_atomically
from megahead.report.read import read_metrics
from megahead.wording import format_names, pluralize

_MAX_SAMPLED_BYTES = 8 * 2**30
"""Largest size of weights to sample from: generation, unlike exporting, needs all of them in memory."""

_SENTENCE = ("Once upon a time there was a", ".")
"""What is before and after the token that an encoder predicts."""


def add_sample_and_curves(folder: Path, run: Path) -> str | None:
    """Adds a sample (generated text, or a sentence that an encoder completes) and the training curves of `run` to
    the model card in `folder`; returns the sample.

    Leaves out the sample if the model has no head, if its tokenizer lacks the special tokens that a sample needs, or if
    its weights exceed 8 GiB; leaves out the curves if the run has no log.
    """
    from megahead.report.figures import draw_curves, save_figure

    sample = _sample_if_possible(folder)
    sections = [] if sample is None else [f"## Sample\n\n```text\n{sample.strip().replace('```', '')}\n```"]
    with suppress(UserError):
        save_figure(draw_curves([read_metrics(run)]), folder / "curves.png")
        sections.append("## Curves\n\n![Loss and held-out perplexity while it was trained](curves.png)")
    card = folder / "README.md"
    before, method, after = card.read_text(encoding="utf-8").partition("## Method\n")
    write_atomically(card, before + "".join(f"{part}\n\n" for part in sections) + method + after)
    return sample


def _sample_if_possible(folder: Path) -> str | None:
    card, weights = (folder / "README.md").read_text(encoding="utf-8"), folder.glob("*.safetensors")
    is_small = sum(path.stat().st_size for path in weights) <= _MAX_SAMPLED_BYTES
    if not is_small or not (folder / "tokenizer.json").is_file():
        return None
    with suppress(UserError):  # a published tokenizer may have no start token
        if "pipeline_tag: text-generation" in card:
            return sample(folder)
        if "pipeline_tag: fill-mask" in card:
            return completed_sentence(folder)
    return None


def sample(model: Path, prompt: str = "", tokens: int = 80) -> str:
    """Generates text after `prompt` with an exported model and fixed seed, at most half its context."""
    import torch

    from megahead.evaluate.language_models import generate_continuation, sampling_options
    from megahead.hf.loading import context_length, load_causal, load_tokenizer_folder

    loaded = load_causal(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sampling = sampling_options(temperature=0.8, top_k=50, top_p=0.95)
        length = min(tokens, context_length(loaded) // 2)
        return generate_continuation(loaded, load_tokenizer_folder(model), prompt, length, sampling)


def completed_sentence(model: Path) -> str:
    """Returns a sentence with a mask token, and the five tokens that an exported encoder predicts there. FieldError if
    the sentence exceeds its context."""
    import torch

    from megahead.evaluate.language_models import special_ids
    from megahead.hf.loading import context_length, load_masked, load_tokenizer_folder

    encoder, tokenizer = load_masked(model), load_tokenizer_folder(model)
    cls_id, sep_id, mask_id = special_ids(tokenizer)
    before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in _SENTENCE)
    row_T = [cls_id, *before, mask_id, *after, sep_id]
    if len(row_T) > (limit := context_length(encoder)):
        raise FieldError("model", f"read {pluralize(len(row_T), 'token')}", got=f"one that reads {limit}")
    with torch.inference_mode():
        logits_TV = encoder(torch.tensor([row_T])).logits[0]
    best = logits_TV[1 + len(before)].softmax(-1).topk(5)
    predictions = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    lines = [f"{share:6.1%}  {tokenizer.decode([id_]).strip()}" for share, id_ in predictions]
    return "\n".join([f" {tokenizer.mask_token}".join(_SENTENCE), *lines])


def check_push(
    repository: str, *, private: bool = False, license_name: str | None = None, languages: Sequence[str] = ()
) -> None:
    """UserError unless `repository` is OWNER/NAME, huggingface_hub has a login that may write there, the Hub takes a
    card with this license and these languages, and a repository that should be `private` is not public."""
    from huggingface_hub import HfApi, ModelCard, ModelCardData

    if "/" not in repository:
        raise FieldError("--push", "be a repository of the Hub (OWNER/NAME)", got=repr(repository))
    with _as_user_errors(repository):
        account, exists = HfApi().whoami(), HfApi().repo_exists(repository)
        if reason := _read_only_reason(account, repository, exists=exists):
            rule, hint = "name a repository that your login may write", "`hf auth login` takes another token"
            raise FieldError("--push", rule, got=f"{repository} ({reason})", hint=hint)
        if private and exists and not HfApi().model_info(repository).private:
            rule, hint = "go with a new or private repository", "name another, or change it in its settings on the Hub"
            raise FieldError("--private", rule, got=f"given for {repository}, which all can read", hint=hint)
        metadata = ModelCardData(license=license_name, language=[*languages] or None)
        ModelCard(f"---\n{metadata.to_yaml()}\n---\n").validate(repo_type="model")


def _read_only_reason(account: Mapping[str, Any], repository: str, *, exists: bool) -> str | None:
    """The reason why `account`, the Hub's answer to `whoami`, cannot write to a repository; None if it can, or the
    answer does not tell."""
    owner, token = repository.partition("/")[0], account.get("auth", {}).get("accessToken", {})
    if token.get("role") == "read":
        return "its token is for reading alone"
    if token.get("role") == "fineGrained":
        scopes = token.get("fineGrained", {}).get("scoped", [])
        writable = {scope["entity"]["name"] for scope in scopes if "repo.write" in scope["permissions"]}
        is_writable = owner in writable or (exists and repository in writable)
        return None if is_writable else f"its token may write to {format_names(sorted(writable)) or 'no repository'}"
    organizations = {organization["name"]: organization.get("roleInOrg") for organization in account.get("orgs", [])}
    if owner not in (account["name"], *organizations):
        return f"it is {account['name']}'s, who is in no organization of this name"
    return "its role there is read" if organizations.get(owner) == "read" else None


def push(folder: Path, repository: str, *, private: bool = False) -> str:
    """Uploads an export with huggingface_hub's login and returns its URL. Creates the repository if it is missing, and
    deletes weights of an earlier upload."""
    from huggingface_hub import HfApi

    api, weights = HfApi(), ["*.safetensors", "*.safetensors.index.json"]
    with _as_user_errors(repository):
        url = str(api.create_repo(repository, private=private or None, exist_ok=True))
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Export of megahead", delete_patterns=weights
        )
    return url


@contextmanager
def _as_user_errors(repository: str) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    connection_error: Any = HfHubHTTPError.__mro__[1]  # the base of all errors of its HTTP client
    try:
        yield
    except HFValidationError as error:
        raise FieldError("--push", "be a repository of the Hub (OWNER/NAME)", got=f"{repository} ({error})") from None
    except (LocalTokenNotFoundError, HfHubHTTPError) as error:
        reason, rule = " ".join(str(error).split()), "name a repository that your login may write"
        raise FieldError("--push", rule, got=f"{repository} ({reason})", hint="`hf auth login` logs in") from None
    except (OfflineModeIsEnabled, connection_error) as error:
        reason, rule = " ".join(str(error).split()), "go where the Hub can be reached"
        raise FieldError("--push", rule, got=f"{repository} ({reason})", hint="export without it for now") from None
    except ValueError as error:  # the Hub rejects the card's metadata, in words or as JSON
        reason = " ".join(re.findall('"message": ?"([^"]*)"', str(error)) or str(error).split())
        raise UserError(f"`{repository}` must get a card that the Hub takes, but cannot ({reason}).") from None
