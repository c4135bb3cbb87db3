"""Log-probabilities of whole texts are lm-eval's for decoders, and for encoders those of masking by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from megahead.errors import CheckpointError, DataError
from megahead.evaluate import language_models
from megahead.evaluate.harness import fitting_batch_size
from megahead.evaluate.language_models import (
    ScoredRow,
    _words,
    generate_continuation,
    open_language_model,
    sampling_options,
)
from megahead.hf.export import ensure_hf_folder
from megahead.hf.importing import read_hf_config
from megahead.hf.loading import load_causal, load_tokenizer_folder
from support.small_checkpoint import save_small, save_tokenizer, small_config
from support.small_encoder import save_small_encoder

SENTENCES = [" the cat sat", " the cat saw the dog", " a dog", " the cat sat on the mat"]
LONG = "the cat sat on the mat and the dog saw the cat on the mat " * 5


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    save_small(tmp_path / "run", small_config(model={"vocab_size": 300, "max_positions": 32}))
    save_tokenizer(tmp_path / "run" / "tokenizer.json")
    return ensure_hf_folder(tmp_path / "run")


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    folder = save_small_encoder(tmp_path / "encoder")
    model = BertForMaskedLM(BertConfig.from_pretrained(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    model.save_pretrained(folder)
    return folder


def lm_eval_of(folder: Path) -> HFLM:
    return HFLM(pretrained=load_causal(folder), tokenizer=load_tokenizer_folder(folder), batch_size=2, device="cpu")


@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_a_decoders_sentences_are_lm_evals(decoder: Path, batch_size: int | None) -> None:
    found = open_language_model(decoder, batch_size).log_probabilities(SENTENCES)
    requests = [Instance("loglikelihood", {}, ("", text), k) for k, text in enumerate(SENTENCES)]
    assert found == pytest.approx([value for value, _ in lm_eval_of(decoder).loglikelihood(requests)], rel=1e-5)


def test_a_text_longer_than_the_context_is_read_in_lm_evals_windows(decoder: Path) -> None:
    texts = [LONG, LONG[:150], "the", LONG[:61]]
    lengths = [len(ids) for ids in load_tokenizer_folder(decoder)(texts)["input_ids"]]
    assert lengths[0] > 64 > lengths[1] > 32 > lengths[3]
    found = open_language_model(decoder).log_probabilities(texts)
    requests = [Instance("loglikelihood_rolling", {}, (text,), k) for k, text in enumerate(texts)]
    assert found == pytest.approx(lm_eval_of(decoder).loglikelihood_rolling(requests), rel=1e-5)


@torch.no_grad()
def by_hand(folder: Path, text: str) -> float:
    """Pseudo-log-likelihood; the rest of a word is masked with its tokens, which `##` joins to those before."""
    model, tokenizer = BertForMaskedLM.from_pretrained(folder).eval(), load_tokenizer_folder(folder)
    ids = [tokenizer.cls_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.sep_token_id]
    pieces, total = tokenizer.convert_ids_to_tokens(ids), 0.0
    for place in range(1, len(ids) - 1):
        masked, later = list(ids), place + 1
        masked[place] = tokenizer.mask_token_id
        while pieces[later].startswith("##"):
            masked[later] = tokenizer.mask_token_id
            later += 1
        total += model(torch.tensor([masked])).logits[0, place].log_softmax(-1)[ids[place]].item()
    return total


@pytest.mark.parametrize("batch_size", [None, 1, 5])
def test_an_encoder_guesses_each_token_without_the_rest_of_its_word(encoder: Path, batch_size: int | None) -> None:
    texts = ["the cat sat", "dogmatic cats runway", "no", ""]
    pieces = load_tokenizer_folder(encoder).tokenize(texts[1])
    assert any(piece.startswith("##") for piece in pieces)
    found = open_language_model(encoder, batch_size).log_probabilities(texts)
    assert found == pytest.approx([*(by_hand(encoder, text) for text in texts[:3]), 0.0], rel=1e-5)


def test_the_bytes_of_a_space_are_one_word() -> None:
    tokenizer = Tokenizer(BPE({letter: id_ for id_, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    words = _words("a\u3000b", tokenizer.encode("a\u3000b"))
    assert [words.index(word) for word in words] == [0, 1, 1, 1, 4]


def test_words_end_at_spaces_where_no_pre_tokenizer_splits(encoder: Path) -> None:
    """As in the tokenizers of Llama 2 and Gemma 2, whose spaces are letters."""
    model = open_language_model(encoder)
    tokens = ["[UNK]", "[CLS]", "[SEP]", "[MASK]", "▁", "a", "b", "c", "▁b"]
    tokenizer = Tokenizer(BPE({token: id_ for id_, token in enumerate(tokens)}, [("▁", "b")], unk_token="[UNK]"))
    tokenizer.normalizer = Replace(" ", "▁")
    model.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    rows = model.masked_rows(["ab b c"], whole_words=True)[0]
    start, end, mask = model._start, model._end, model._mask
    a, b, space, space_b, c = (tokens.index(token) for token in ("a", "b", "▁", "▁b", "c"))
    assert [row.ids for row in rows] == [
        (start, mask, mask, space_b, space, c, end),
        (start, a, mask, space_b, space, c, end),
        (start, a, b, mask, space, c, end),
        (start, a, b, space_b, mask, mask, end),
        (start, a, b, space_b, space, mask, end),
    ]


def test_a_text_too_long_for_an_encoder_is_reported(encoder: Path) -> None:
    with pytest.raises(DataError, match="must have at most 62 tokens, but has 63"):
        open_language_model(encoder).log_probabilities(["the " * 63])


def test_rows_that_begin_alike_ask_the_head_once(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_language_model(decoder)
    asked: list[int] = []
    model.model.lm_head.register_forward_hook(lambda _, inputs, __: asked.append(inputs[0].shape[1]))
    rows = [ScoredRow((0, 5, 6, 7), (0, 1, 2, 3), (5, 6, 7, 8)), ScoredRow((0, 5, 6, 9), (0, 1, 2, 3), (5, 6, 9, 8))]
    one, other, again = model.row_log_probabilities([*rows, rows[0]])
    assert asked == [5]
    assert one == again != other


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_a_long_row_asks_the_head_in_parts(kind: str, request, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, texts = request.getfixturevalue(kind), ["the cat saw the dog on the mat", "the cat saw the mat"]
    expected = open_language_model(folder).log_probabilities(texts)
    monkeypatch.setattr(language_models, "_MAX_BATCH_LOGITS", 3 * read_hf_config(folder)["vocab_size"])
    model = open_language_model(folder, 9)
    asked: list[int] = []
    model.model.get_output_embeddings().register_forward_hook(lambda _, ids, __: asked.append(ids[0].shape[1]))
    assert model.log_probabilities(texts) == pytest.approx(expected, rel=1e-6)
    assert len(asked) > 2
    assert max(asked) == 3


@pytest.fixture(params=["gpt2", "bloom"])
def stranger(request: pytest.FixtureRequest, decoder: Path) -> Path:
    """A decoder whose config names its context by another name, or has none."""
    if request.param == "gpt2":
        small = GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2, n_positions=32)
        model = GPT2LMHeadModel(small)
    else:
        model = BloomForCausalLM(BloomConfig(vocab_size=300, hidden_size=16, n_layer=1, n_head=2))
    model.save_pretrained(folder := decoder.with_name(request.param))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((decoder / name).read_bytes())
    return folder


def test_decoders_of_other_families_speak_and_are_scored(stranger: Path) -> None:
    model, tokenizer = load_causal(stranger), load_tokenizer_folder(stranger)
    requests = [Instance("loglikelihood", {}, ("", text), k) for k, text in enumerate(SENTENCES)]
    expected = [value for value, _ in lm_eval_of(stranger).loglikelihood(requests)]
    assert open_language_model(stranger).log_probabilities(SENTENCES) == pytest.approx(expected, rel=1e-5)
    assert fitting_batch_size(model, 32, 2**30) == 32
    generate_continuation(model, tokenizer, "the cat", 4, sampling_options(0, 0, 1))


def test_an_empty_prompt_begins_after_an_end_token_or_is_refused(decoder: Path) -> None:
    model, tokenizer, greedy = load_causal(decoder), load_tokenizer_folder(decoder), sampling_options(0, 0, 1)
    begun = generate_continuation(model, tokenizer, "", 4, greedy)
    tokenizer.bos_token = None
    assert generate_continuation(model, tokenizer, "", 4, greedy) == begun
    tokenizer.eos_token = None
    with pytest.raises(CheckpointError, match="names a begin or end token, to begin a text with, but names neither"):
        generate_continuation(model, tokenizer, "", 4, greedy)


@pytest.mark.parametrize("behind", ["", " <|padding|>"])
def test_a_long_prompt_keeps_its_begin_token_and_has_no_end(decoder: Path, behind: str) -> None:
    model, tokenizer, greedy = load_causal(decoder), load_tokenizer_folder(decoder), sampling_options(0, 0, 1)
    bos, words = tokenizer.bos_token, tokenizer("the cat saw the dog on the mat " * 9)["input_ids"]
    special_tokens = [(bos, tokenizer.bos_token_id), ("<|padding|>", tokenizer.pad_token_id)]
    frame = TemplateProcessing(single=f"{bos} $A{behind}", special_tokens=special_tokens)
    tokenizer.backend_tokenizer.post_processor = frame
    prompts: list[list[int]] = []
    model.register_forward_pre_hook(
        lambda _, __, inputs: prompts.append(inputs["input_ids"][0].tolist()), with_kwargs=True
    )
    said: list[str] = []
    generate_continuation(model, tokenizer, tokenizer.decode(words), 4, greedy, said.append)
    assert prompts[0] == [tokenizer.bos_token_id, *words[-27:]]
    assert said == [f"the prompt exceeds the context and lost its first {len(words) - 27} tokens"]
