"""Starting MAC around an LM that reads: memory gives it what the text would, and further slots are heard little."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import DynamicCache

from mac_rag.config import (
    AggregationConfig,
    BaseLMConfig,
    EncoderConfig,
    MACConfig,
    ModulationConfig,
    SentenceEncoderConfig,
)
from mac_rag.data.newswire.generate import generate
from mac_rag.errors import ConfigError, ModelLoadError
from mac_rag.model import MACModel
from mac_rag.nn.modulation import Modulation, has_limited_layers
from pipelines.tasks.kv_regression import init_by_kv_regression
from tests.helpers import VOCABULARY, reloaded, save_tokenizer
from tests.lm.helpers import ARCHITECTURES, random_lm

DATA = generate("train", 32, seed=3, questions_per_document=2)
TOKENS = 24


def build(layers: int | None = 4, sentence_encoder: bool = False, slots: int = 1, **values: Any) -> MACModel:
    """MAC around MiniLM, with further values of its configuration."""
    torch.manual_seed(5)
    part = EncoderConfig(design="encoder-pooling", name=None, embeddings="base-lm", layers=layers)
    config = MACConfig(
        base_lm=BaseLMConfig(name="minilm"),
        amortization=part,
        input_encoder=part,
        sentence_encoder=SentenceEncoderConfig(name="minilm", embeddings="base-lm") if sentence_encoder else None,
        mlp_width=8,
        aggregation=AggregationConfig(
            blocks=1, heads=6, head_width=64, feed_forward=1, prior_width=64, prior_sharpness=5.0, slots=slots
        ),
        **{"tokens": TOKENS + sentence_encoder, **values},
    )
    return MACModel.from_config(config, device="cpu")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, id="without sentence encoder"),
        pytest.param(True, id="with sentence encoder", marks=pytest.mark.slow),
    ],
)
def started(request: pytest.FixtureRequest) -> tuple[MACModel, MACModel]:
    """A model as it is built, and the same after the start."""
    model, shown = build(sentence_encoder=request.param), io.StringIO()
    with contextlib.redirect_stderr(shown):
        init_by_kv_regression(model, generate("train", 60, seed=3, questions_per_document=2))
    for phase in ("tokenize", "read documents", "read questions", "fit"):
        assert f"kv_regression: {phase}" in shown.getvalue()
    return build(sentence_encoder=request.param), model


@torch.no_grad()
def test_a_memory_gives_the_lm_what_it_keeps_of_the_text(started: tuple[MACModel, MACModel]) -> None:
    """Keys and values of all layers are alike in the mean over memory tokens and words, and each text has its own."""
    texts = [document.text for document in generate("val", 24).documents]

    def kept(cache: DynamicCache) -> torch.Tensor:
        return torch.cat([torch.cat([layer[0], layer[1]], 1).mean(2).flatten() for layer in cache])

    def memories(model: MACModel) -> torch.Tensor:
        return torch.stack([kept(model.modulation(model.amortize([text])).cache(torch.float32)) for text in texts])

    built, model = started
    read = []
    for text in texts:
        ids = torch.tensor([model.amortization.ids(text)])
        read.append(kept(model.base_lm.model(ids, segment_ids=torch.ones_like(ids), use_cache=True).past_key_values))
    # Memory tokens weigh words by their salience, which moves all means alike.
    expected, fitted, random = (x - x.mean(0) for x in (torch.stack(read), memories(model), memories(built)))
    wrong = (fitted - expected).square().sum() / expected.square().sum()
    assert wrong < 0.6 < (random - expected).square().sum() / expected.square().sum()
    alike = functional.normalize(fitted, dim=1) @ functional.normalize(expected, dim=1).T
    assert alike.argmax(1).tolist() == list(range(len(texts)))


@torch.no_grad()
def test_the_prior_and_the_order_of_memory_tokens(started: tuple[MACModel, MACModel]) -> None:
    def own_first(model: MACModel) -> float:
        held_out = generate("val", 30)
        phi = model.amortize([document.text for document in held_out.documents])
        places = {document.id: i for i, document in enumerate(held_out.documents)}
        own = torch.tensor([places[question.document_id] for question in held_out.questions])
        encoded = model.input_encoder.encode([model.input_encoder.ids(q.question) for q in held_out.questions], 4096)
        scores = model.aggregation.prior_scores(encoded, model.project(phi))
        return float(functional.cross_entropy(scores, own))

    built, model = started
    assert own_first(model) < own_first(built)
    # A memory token of a question sees, of a document, the one at the same place best.
    phi = model.amortize([document.text for document in DATA.documents[:8]])[:, -TOKENS:]
    block = model.aggregation.blocks[0]
    normed = model.aggregation.bank_norm(phi)
    query, key = block.to_query(block.norm(phi)), block.to_key(normed)  # type: ignore[operator, union-attr]
    logits = torch.einsum("atd,bsd->ts", query, key)
    assert logits.argmax(1).tolist() == list(range(TOKENS))


def test_what_cannot_start_so(tiny_model: MACModel) -> None:
    with pytest.raises(ConfigError, match="init: kv_regression needs encoders of design encoder-pooling"):
        init_by_kv_regression(tiny_model, DATA)
    with pytest.raises(ModelLoadError, match="layers is 7, but mac-prefix-lm has 6"):
        build(layers=7)
    with pytest.raises(ValueError, match="layers is 2, but the backbone 'minilm' is taken as it is"):
        EncoderConfig(design="encoder-pooling", name="minilm", layers=2)


def around(name: str, folder: Path, tokens: int = 48, layers: int | None = None, slots: int = 1) -> MACModel:
    """MAC with an attention sink around a random LM. A sliding window is shorter than a document."""
    window = {"sliding_window": 40} if "sliding_window" in ARCHITECTURES[name] else {}
    # One row more than tokens, since the class of Qwen2's tokenizers adds a token of its own.
    random_lm(name, vocab_size=VOCABULARY + 1, **window).save_pretrained(folder)
    save_tokenizer(folder, "<s> $A")
    torch.manual_seed(5)
    part = EncoderConfig(design="encoder-pooling", name=None, layers=layers)
    config = MACConfig(
        base_lm=BaseLMConfig(name=str(folder)),
        amortization=part,
        input_encoder=part,
        tokens=tokens,
        mlp_width=8,
        aggregation=AggregationConfig(blocks=1, heads=4, head_width=16, feed_forward=1, prior_width=16, slots=slots),
        modulation=ModulationConfig(attention_sink=True),
    )
    return MACModel.from_config(config, device="cpu")


@torch.no_grad()
def divergences(model: MACModel) -> tuple[float, float, float]:
    """How far the LM's predictions are from those behind the document (KL divergence), on held-out documents.

    With the document's own memory, with another document's, and with none.
    """
    held_out = generate("val", 12)
    prompts, lm = model.base_lm.prompts, model.base_lm
    texts = [document.text for document in held_out.documents]
    places = {document.id: i for i, document in enumerate(held_out.documents)}
    own = torch.tensor([places[question.document_id] for question in held_out.questions])
    answers = [prompts.answer(question.answers[0]) for question in held_out.questions]
    alone = [prompts.prompt(question.question) for question in held_out.questions]
    behind = [prompts.prompt(q.question, [texts[i]]) for q, i in zip(held_out.questions, own, strict=True)]
    expected = lm.answer_logits(behind, answers, None).log_softmax(-1)
    phi = model.eval().amortize(texts)
    others = (own + 1) % len(texts)

    def divergence(modulation: Modulation | None) -> float:
        found = lm.answer_logits(alone, answers, modulation).log_softmax(-1)
        return float(functional.kl_div(found, expected, reduction="batchmean", log_target=True))

    return divergence(model.modulation(phi[own])), divergence(model.modulation(phi[others])), divergence(None)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_a_memory_brings_an_lm_closer_to_reading_the_document(name: str, tmp_path: Path) -> None:
    model = around(name, tmp_path / "lm")
    assert max(len(model.amortization.ids(document.text)) for document in DATA.documents) > 40  # mistral's window
    untrained, _, none = divergences(model)
    init_by_kv_regression(model, DATA)
    own, others, _ = divergences(model)
    assert own < others < untrained
    if not has_limited_layers(model.base_lm.model.config):  # behind a window, the LM does not see the document either
        assert own < none


@pytest.mark.matrix
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_kv_regression_starts_every_lm_better_than_at_random(name: str, tmp_path: Path) -> None:
    model = around(name, tmp_path / "lm")
    untrained = divergences(model)[0]
    init_by_kv_regression(model, DATA)
    assert divergences(model)[0] < untrained


@pytest.mark.parametrize("name", ["qwen3", "cohere2"])
def test_a_checkpoint_of_fewer_layers_that_are_of_several_types(name: str, tmp_path: Path) -> None:
    model = around(name, tmp_path / "lm", layers=1)
    again = reloaded(model, tmp_path / "mac")
    texts = [document.text for document in DATA.documents[:3]]
    torch.testing.assert_close(again.amortize(texts), model.amortize(texts), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_keys_are_fitted_before_rotation_and_behind_the_sink(tmp_path: Path) -> None:
    """In the mean over memory tokens they are those that Llama's own linear layers give for the words behind `<s>`."""
    model = around("llama", tmp_path / "lm", layers=1)
    init_by_kv_regression(model, DATA)
    network, prefix, lm = model.amortization.network, model.modulation, model.base_lm.model
    computed: list[torch.Tensor] = []
    for layer in lm.model.layers:
        for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            linear.register_forward_hook(lambda _, __, output: computed.append(output[0, 1:]))
    texts = [document.text for document in generate("val", 24).documents]
    expected = []
    for text in texts:
        ids = torch.tensor([model.amortization.ids(text)])  # begins with <s>
        mask = torch.ones_like(ids)
        weights = network.places(network.text_states(ids, mask), mask)[0, ..., 1:].softmax(-1).mean((0, 1))
        computed.clear()
        lm(ids)
        expected.append(weights @ torch.cat(computed, 1))
    fitted = prefix.to_keys_values(prefix.norm(model.amortize(texts))).mean(1)
    second_layer = slice(2 * 2 * 16, None)  # of two heads; the encoder's states are its inputs, before a norm
    target, found = torch.stack(expected)[:, second_layer], fitted[:, second_layer]
    assert (found - target).square().sum() < 0.1 * (target - target.mean(0)).square().sum()


def in_prompt(layers: int, slots: int = 1) -> MACModel:
    """The same, with a memory that enters the prompt behind two layers."""
    return build(layers, slots=slots, tokens=64, modulation=ModulationConfig(kind="prompt", entry_layer=2))


@pytest.mark.parametrize("slots", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_memory_in_the_prompt_is_read_as_the_document_is(slots: int) -> None:
    """Before any training; and attention returns the memory tokens of what the document prior ranks first."""
    model = in_prompt(layers=2, slots=slots)
    assert max(len(model.amortization.ids(document.text)) for document in DATA.documents) <= 64
    init_by_kv_regression(model, DATA)
    own, others, none = divergences(model)
    assert 3 * own < min(others, none)
    held_out = generate("val", 12)
    with torch.no_grad():
        phi = model.amortize([document.text for document in held_out.documents])
        encoded = model.input_encoder([model.input_encoder.ids(q.question) for q in held_out.questions])
        bank = model.project(phi)
        first = model.aggregation.prior_scores(encoded, bank).topk(slots).indices
        expected = phi[first].flatten(1, 2)
        wrong = (model.aggregation(encoded, bank)[0] - expected).square().sum((1, 2)) / expected.square().sum((1, 2))
    assert float(wrong.median()) < 0.05


def test_a_memory_enters_the_prompt_where_its_encoders_end() -> None:
    with pytest.raises(ConfigError, match="a prompt that enters after as many layers as the encoders have"):
        init_by_kv_regression(in_prompt(layers=1), DATA)
