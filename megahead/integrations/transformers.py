"""Contrastive weight tying for a Hugging Face language model, trained with `transformers.Trainer`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

from megahead.config.objective import HeadName, ObjectiveConfig
from megahead.distributed.group import Group
from megahead.distributed.tensors import require_finite
from megahead.errors import FieldError, UserError
from megahead.files import atomic_folder
from megahead.hf.card import CardMetadata
from megahead.hf.export import PARITY_FILE, export
from megahead.hf.importing import from_hf
from megahead.hf.settings import GENERATION_FILE
from megahead.losses.candidates import all_rows_as_candidates, log_unigram
from megahead.losses.contrastive import build_objective
from megahead.losses.softmax import candidate_loss, streamed_sums
from megahead.objectives.loader import gather_targets

# Saves a trained body as an ordinary transformers model with the head `none`, `tied` or `pmi`, if its class can have
# it.
#
# Families that `hf.export` supports are exported by it. For any other family the output matrix is tied to the input
# embedding, and its bias, if it has one, is log q. Both are verified.

_TOLERANCE = 1e-4  # of the largest score
_HEADS = ("none", "tied", "pmi")


def save_transformers_model(
    model_class: type[PreTrainedModel],
    body: PreTrainedModel,
    weights: Mapping[str, Tensor],
    counts_V: Tensor,
    folder: Path,
    head: HeadName,
    tokenizer: Any,
    generation_config: GenerationConfig | None,
) -> None:
    """Writes a `model_class` with the body's `weights` to `folder`; UserError if it cannot have `head`.

    counts_V: how often each id was a target in training. tokenizer: of transformers, or None. generation_config:
    of a model that generates; written with a head.
    """
    if head not in _HEADS:
        raise FieldError("head", f"be one of {', '.join(_HEADS)}", got=head)
    require_finite(weights.items(), "model")
    with TemporaryDirectory() as scratch:
        body_folder = Path(scratch, "body", folder.name)
        body.save_pretrained(body_folder, state_dict=dict(weights))
        if generation_config is not None:
            generation_config.to_json_file(body_folder / GENERATION_FILE)
        if tokenizer is not None:
            tokenizer.save_pretrained(body_folder)
        try:
            run = from_hf(body_folder, Path(scratch, "run"), target_counts_V=counts_V)
        except UserError as error:
            if head != "none" and not isinstance(error, FieldError):
                raise
            run = None  # an unsupported family or setting, or an encoder without a tokenizer
        if run is not None:
            # An earlier export, known by its record of the comparison with its source, may be replaced.
            with atomic_folder(folder, replaceable=PARITY_FILE, field="folder") as staged:
                export(run, staged, head, dtype=str(body.dtype).removeprefix("torch."), card=CardMetadata(str(folder)))
            return
    with atomic_folder(folder, field="folder") as staged:
        if head == "none":
            body.save_pretrained(staged, state_dict=dict(weights))
        else:
            _add_head(model_class, body.config, weights, counts_V, head).save_pretrained(staged)
            if generation_config is not None:
                generation_config.to_json_file(staged / GENERATION_FILE)
        if tokenizer is not None:
            tokenizer.save_pretrained(staged)


@torch.no_grad()
def _add_head(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    weights: Mapping[str, Tensor],
    counts_V: Tensor,
    head: str,
) -> PreTrainedModel:
    """Returns the complete model on the CPU, with the output matrix tied to the input embedding."""
    config = copy.deepcopy(config)
    config.tie_word_embeddings = True
    model = model_class(config)
    model.base_model.load_state_dict(weights)
    model.tie_weights()
    output, bias_V = model.get_output_embeddings(), torch.zeros(len(counts_V))
    if head == "pmi":
        bias_V = log_unigram(counts_V, len(counts_V))
    if isinstance(output, nn.Linear) and output.bias is not None:
        output.bias.copy_(bias_V)
    elif head == "pmi":
        raise UserError(
            f"`head` pmi needs a bias in the head, but a {model_class.__name__} has none; use tied or none."
        )
    _verify_logits(model.eval(), bias_V)
    return nn.Module.to(model, next(iter(weights.values())).dtype)


def _verify_logits(model: PreTrainedModel, bias_V: Tensor) -> None:
    """Raises UserError unless the logits are the hidden states times the input embedding, plus the bias."""
    ids_BT = torch.randint(len(bias_V), (2, 16), generator=torch.Generator().manual_seed(0))
    expected_BTV = model.base_model(ids_BT).last_hidden_state @ model.get_input_embeddings().weight.T + bias_V
    error = (model(ids_BT).logits - expected_BTV).abs().max()
    if not error <= _TOLERANCE * expected_BTV.abs().max():
        class_name = type(model).__name__
        raise UserError(
            f"`head` must be none for a {class_name}, but is not; "
            "it does more to its outputs than multiply by its embedding."
        )


# B rows, T tokens, D features, N targets, U candidates, V rows of the table (b: of a block), R ranks.

_IGNORE_INDEX = -100  # the label of positions without a target
_BLOCK_ROWS = 16_384
_BODY_PREFIX, _COUNTS_NAME = "body.", "target_counts"
_NOISE_ATTRIBUTE = "neftune_noise_alpha"
_ADAPTER_PARTS = (".base_layer.", ".original_module.")
"""Parts of parameter names of models with PEFT adapters."""


class Headless(nn.Module):
    """The body (base model) of a causal or masked language model, shared with `model`; its head is neither used nor
    trained.

    In training it returns the loss that `megahead.cwt_loss` gives, and counts its targets, on all ranks alike. In
    evaluation it returns the loss of the training-free head with these counts (of the tied head while there are none),
    so that exp(`eval_loss`) is that head's perplexity. Candidates are the targets of the rank's micro-batch, or with
    `share_candidates` those of all ranks.

    FieldError for another kind of model, or if its hidden size differs from its embedding dimension; CheckpointError if
    its weights are not finite.
    """

    body: PreTrainedModel
    target_counts: Tensor
    """[V] int64."""

    def __init__(self, model: PreTrainedModel, *, share_candidates: bool = False) -> None:
        super().__init__()
        self.loss_type = _loss_type(model)  # Trainer counts the targets of a step by it
        self.body, self.config, self._model_class = cast(PreTrainedModel, model.base_model), model.config, type(model)
        self._generation_config = getattr(model, "generation_config", None)
        require_finite(self.body.named_parameters(), "model")
        table = _input_embedding(model)
        table.padding_idx = None  # a candidate may be any id, and each has a gradient
        self.share_candidates = share_candidates
        self.register_buffer(_COUNTS_NAME, torch.zeros(table.num_embeddings, dtype=torch.int64))
        self._objective = build_objective(ObjectiveConfig(), table.num_embeddings)  # needs no token counts
        self._body_arguments = frozenset(inspect.signature(self.body.forward).parameters)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        """Returns `loss`: the sum over the targets, divided by their number or by `num_items_in_batch` (of the step);
        without targets 0, in evaluation NaN, which `Trainer` excludes from its mean.

        labels: as in transformers, unshifted ids for a causal model, -100 where there is no target; FieldError for
        None, as with label smoothing, which needs logits. An input that the body does not take is dropped; `kwargs`
        is passed to the body. Collective in training.
        """
        if labels is None:
            hint = "there are no logits: leave label_smoothing_factor at 0; to predict, `save` with a head"
            raise FieldError("labels", "be given", got="missing", hint=hint)
        self._resize_counts()
        optional = {"attention_mask": attention_mask, "token_type_ids": token_type_ids, "position_ids": position_ids}
        names = self._body_arguments
        inputs = {name: value for name, value in optional.items() if value is not None and name in names}
        hidden_BTD = self.body(input_ids=input_ids, **inputs, **kwargs).last_hidden_state
        if self.loss_type == "ForCausalLM":
            hidden_BTD, labels = hidden_BTD[:, :-1], labels[:, 1:]
        mask_BT = labels != _IGNORE_INDEX
        outputs_ND, target_ids_N = hidden_BTD[mask_BT], labels[mask_BT]
        loss = (self._training_loss if self.training else self._evaluation_loss)(outputs_ND, target_ids_N)
        num_items = target_ids_N.numel() if num_items_in_batch is None else num_items_in_batch
        count = torch.as_tensor(num_items, device=loss.device)
        return {"loss": loss / (count.clamp(min=1) if self.training else count)}

    def get_input_embeddings(self) -> nn.Module:
        """The input embedding of the body. `Trainer` adds NEFTune noise to its outputs, but not to candidates."""
        return self.body.get_input_embeddings()

    def prepare_inputs_for_generation(self, *inputs: Any, **kwargs: Any) -> Any:
        """PEFT requires this method of a causal model; calling it raises FieldError."""
        raise FieldError("model", "have a head to generate", got="headless", hint="`save` it with one")

    def log_frequencies(self) -> Tensor:
        """[V] fp32: log q, the log-frequencies of the targets. Input embeddings times a hidden state, plus log q, are
        the logits of the training-free head."""
        self._resize_counts()
        return log_unigram(self.target_counts, self.target_counts.numel())

    def save(
        self, folder: str | Path, head: HeadName, tokenizer: Any = None, *, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        """Writes a plain model for `from_pretrained`, with the head `none`, `tied` or `pmi` (training-free).

        folder: a new one, or an earlier export if `export` supports the family. tokenizer: of transformers; needed to
        import an encoder again. state_dict: this module's, where its parameters are not whole (ZeRO-3). UserError, with
        nothing written, for another folder, or if the class cannot have the head.
        """
        self._resize_counts()
        weights = self.state_dict() if state_dict is None else state_dict
        body = {
            name.removeprefix(_BODY_PREFIX): weight.cpu()
            for name, weight in weights.items()
            if name.startswith(_BODY_PREFIX)
        }
        if any(part in name for name in body for part in _ADAPTER_PARTS):
            raise FieldError("model", "be without adapters", got="adapted", hint="call its merge_and_unload() first")
        counts_V, generation = weights[_COUNTS_NAME].cpu(), self._generation_config
        save_transformers_model(self._model_class, self.body, body, counts_V, Path(folder), head, tokenizer, generation)

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """`Trainer` calls this if its arguments enable it."""
        body: Any = self.body
        enable = getattr(body, "activation_checkpointing_enable", None) or body.gradient_checkpointing_enable
        enable(**options)

    gradient_checkpointing_enable = activation_checkpointing_enable
    """The name in transformers before 5.20."""

    def _load_from_state_dict(self, *state: Any) -> None:
        self._resize_counts()
        super()._load_from_state_dict(*state)

    def _resize_counts(self) -> None:
        """Resizes the counts after `resize_token_embeddings`; new ids have count 0."""
        table: Any = self.body.get_input_embeddings()
        while not hasattr(table, "num_embeddings"):  # an adapter of PEFT
            table = table.base_layer if hasattr(table, "base_layer") else table.original_module
        missing = table.num_embeddings - len(self.target_counts)
        if missing:
            self.target_counts = nn.functional.pad(self.target_counts, (0, missing))

    def _rows(self, ids_U: Tensor) -> Tensor:
        """[U, D], by a call of the embedding module, as ZeRO-3 requires, without NEFTune noise."""
        table = self.body.get_input_embeddings()
        noise = getattr(table, _NOISE_ATTRIBUTE, None)
        if noise is None:
            rows_UD: Tensor = table(ids_U)
            return rows_UD
        setattr(table, _NOISE_ATTRIBUTE, 0.0)
        try:
            # [1, U, D]: the hook requires a batch dimension, and ids
            (rows_UD,) = table(ids_U[None] if len(ids_U) else ids_U.new_zeros(1, 1))
            return rows_UD[: len(ids_U)]
        finally:
            setattr(table, _NOISE_ATTRIBUTE, noise)

    def _training_loss(self, outputs_ND: Tensor, target_ids_N: Tensor) -> Tensor:
        """Returns the loss over candidates, summed over the outputs. Collective: ranks exchange ids."""
        ranks = Group.world()
        sizes_R1 = ranks.all_gather(torch.tensor([target_ids_N.numel()], device=target_ids_N.device))
        all_target_ids = torch.cat(gather_targets([target_ids_N], sizes_R1, ranks))  # in the order of ranks
        if torch.is_grad_enabled():
            self.target_counts.index_add_(0, all_target_ids, torch.ones_like(all_target_ids))
        candidate_set = self._objective.candidate_set(all_target_ids if self.share_candidates else target_ids_N)
        candidates = candidate_set.candidates(target_ids_N)
        assert candidates.ids_U is not None
        return candidate_loss(outputs_ND, self._rows(candidates.ids_U), candidates)

    @torch.no_grad()
    def _evaluation_loss(self, outputs_ND: Tensor, target_ids_N: Tensor) -> Tensor:
        """Returns the loss over the vocabulary, block by block, summed over the outputs."""
        table, ids_V = self.body.get_input_embeddings(), torch.arange(len(self.target_counts), device=outputs_ND.device)
        vocabulary = all_rows_as_candidates(target_ids_N, self.log_frequencies())
        with torch.autocast(outputs_ND.device.type, enabled=False):
            sums = streamed_sums(outputs_ND, (table(ids_b) for ids_b in ids_V.split(_BLOCK_ROWS)), vocabulary)
        return torch.tensor(sums.loss, device=outputs_ND.device)


def _loss_type(model: PreTrainedModel) -> str:
    names = {base.__name__ for base in type(model).__mro__}
    for loss_type, class_names in (("ForMaskedLM", MASKED), ("ForCausalLM", CAUSAL)):
        if names & set(class_names.values()) and not model.config.is_encoder_decoder:
            return loss_type
    hint = "load it by AutoModelForCausalLM or AutoModelForMaskedLM"
    if hasattr(model, "peft_config"):
        hint = "wrap the plain model by Headless, and that by get_peft_model"
    raise FieldError("model", "be a causal or masked language model", got=f"a {type(model).__name__}", hint=hint)


def _input_embedding(model: PreTrainedModel) -> nn.Embedding:
    table, width = model.get_input_embeddings(), getattr(model.config.get_text_config(), "hidden_size", None)
    if type(table) is not nn.Embedding:
        raise FieldError("model", "look its inputs up in a plain nn.Embedding", got=f"one with {type(table).__name__}")
    if table.embedding_dim != width:
        rule = f"have input embeddings as wide as its outputs ({width})"
        raise FieldError("model", rule, got=f"one of width {table.embedding_dim}")
    return table
