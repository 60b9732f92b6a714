"""What finds documents: a frozen sentence encoder's token, and the lexical vectors of hashed BM25."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional
from transformers import AutoModel, BertGenerationConfig, T5Config, T5ForConditionalGeneration

from eval.harness.variants import grafted
from mac_rag.config import (
    AggregationConfig,
    AttentionConfig,
    BaseLMConfig,
    EncoderConfig,
    HashedBM25Config,
    MACConfig,
    SentenceEncoderConfig,
)
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError, ModelLoadError
from mac_rag.lm.loading import load_tokenizer
from mac_rag.lm.minilm import minilm_encoder
from mac_rag.model import MACModel
from mac_rag.nn.attention import direct_attention
from mac_rag.nn.memory_tokens import MemoryTokens
from pipelines.objective import Batch, LossWeights, mac_loss
from pipelines.tasks.fit_recency import add_hashed_bm25
from tests.helpers import Folder, built, copy_of, mac_config, reloaded

TEXTS = ["William of Normandy won at Hastings, in 1066.", "Rain fell on the town for eleven days.", "It was cold."]
QUESTIONS = ["Who won at Hastings?", "How long did it rain?"]
BATCH = Batch(TEXTS, QUESTIONS, ["William of Normandy", "eleven days"], [0, 1])


def with_encoder(encoder: SentenceEncoderConfig | None, **values: Any) -> MACConfig:
    part = EncoderConfig(design="encoder-pooling", name=None, embeddings="base-lm", layers=1)
    sizes = AggregationConfig(blocks=1, heads=2, head_width=8, feed_forward=1, prior_width=384)
    options = {"tokens": 4, "max_new_tokens": 4, "mlp_width": 8, "aggregation": sizes, "amortization": part, **values}
    return MACConfig(base_lm=BaseLMConfig(name="minilm"), sentence_encoder=encoder, input_encoder=part, **options)


@pytest.fixture(scope="module")
def shared() -> MACModel:
    """A model that no test changes."""
    return built(with_encoder(SentenceEncoderConfig(name="minilm", embeddings="base-lm")), 1)


@pytest.fixture
def model(shared: MACModel) -> MACModel:
    torch.manual_seed(1)
    return copy_of(shared)


def test_the_first_token_is_the_encoders_mean_state_of_the_text(model: MACModel) -> None:
    encoder = minilm_encoder(1536).double().eval()
    phi = model.amortize(TEXTS)
    assert phi.shape == (3, 4, 384)
    for text, tokens in zip(TEXTS, phi, strict=True):
        ids = torch.tensor([model.amortization.ids(text)])
        expected = encoder(ids).last_hidden_state[0].mean(0)
        torch.testing.assert_close(tokens[0].double(), expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(model.amortize([text])[0], tokens, atol=1e-5, rtol=1e-5)


def test_documents_are_encoded_as_questions_are_and_with_trained_weights(model: MACModel) -> None:
    before = model.amortize(TEXTS)
    model.train()
    model.amortization.network.backbone.encoder.layer[0].output.dense.weight.data.mul_(1.5)  # as fused optimisers do
    model.eval()
    after = model.amortize(TEXTS)
    assert (after - before).abs().max() > 0.01
    with torch.no_grad():
        expected = model.amortization([model.amortization.ids(text) for text in TEXTS])
    torch.testing.assert_close(after, expected.stacked(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "design",
    # The other tests here are of encoder-pooling.
    [
        "decoder-only",
        "encoder-decoder",
        *(pytest.param(f"encoder-{k}", marks=pytest.mark.slow) for k in ("only", "pooling")),
    ],
)
def test_every_design_takes_a_sentence_encoder(design: str, shared: MACModel, tmp_path: Path) -> None:
    name = None
    if design in ("encoder-only", "encoder-decoder"):
        name = str(tmp_path / "t5")
        sizes = {"d_model": 384, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
        tokenizer = load_tokenizer("minilm")
        T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(name)
        tokenizer.save_pretrained(name)
    part = EncoderConfig.model_validate({"design": design, "name": name})
    model = MACModel.from_config(with_encoder(SentenceEncoderConfig(name="minilm"), amortization=part), device="cpu")
    phi = model.amortize(TEXTS)
    assert phi.shape == (3, 4, 384)
    torch.testing.assert_close(phi[:, 0], shared.amortize(TEXTS)[:, 0], atol=1e-5, rtol=1e-5)


def test_the_document_prior_compares_the_encoders_tokens_alone(model: MACModel) -> None:
    prior: Any = model.aggregation.prior
    phi, asked = model.amortize(TEXTS), encoded_questions(model)
    scores = model.aggregation.prior_scores(asked, model.project(phi))
    for question, row in zip(asked.stacked(), scores, strict=True):
        for document, score in zip(phi, row, strict=True):
            pair = prior.query.weight @ question[0], prior.key.weight @ document[0]
            torch.testing.assert_close(score, prior.log_scale.exp() * functional.cosine_similarity(*pair, dim=0))
    others = torch.cat([phi[:, :1], torch.randn_like(phi[:, 1:])], 1)
    torch.testing.assert_close(model.aggregation.prior_scores(asked, model.project(others)), scores)


def test_a_checkpoint_holds_the_sentence_encoder_once(model: MACModel, tmp_path: Path) -> None:
    with torch.no_grad():  # so that what is loaded cannot come from MiniLM's package
        model.amortization.network.sentence_encoder.encoder.layer[0].output.dense.weight.mul_(1.5)
    again = reloaded(model, tmp_path / "mac")
    torch.testing.assert_close(again.amortize(TEXTS), model.amortize(TEXTS))
    assert again.amortization.network.sentence_encoder is again.input_encoder.network.sentence_encoder
    assert again.fingerprint == model.fingerprint
    with (tmp_path / "mac" / "model.safetensors").open("rb") as file:
        names = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    layer = "sentence_encoder.encoder.layer.0.output.dense.weight"
    assert [name for name in names if name.endswith(layer)] == [f"amortization.network.{layer}"]
    assert not any("word_embeddings" in name for name in names)
    with torch.no_grad():  # another encoder finds other documents: memory tokens are not those of this model
        again.amortization.network.sentence_encoder.encoder.layer[0].output.dense.weight.mul_(1.5)
    assert again.fingerprint != model.fingerprint


LEXICAL = HashedBM25Config(vectors=2, weight=0.3)


@pytest.fixture
def lexical(model: MACModel) -> MACModel:
    """The same model with hashed BM25."""
    return add_hashed_bm25(model, TEXTS, LEXICAL.vectors, LEXICAL.weight)


def encoded_questions(model: MACModel) -> MemoryTokens:
    with torch.no_grad():
        encoded: MemoryTokens = model.input_encoder([model.input_encoder.ids(question) for question in QUESTIONS])
    return encoded


def test_lexical_vectors_stand_behind_the_memory_tokens(model: MACModel) -> None:
    before = model.amortize(TEXTS)
    lexical = add_hashed_bm25(model, TEXTS, 2, 0.3)
    assert lexical.config.hashed_bm25 == LEXICAL
    phi = lexical.amortize(TEXTS)
    assert phi.shape == (3, 4 + 2, 384)
    torch.testing.assert_close(MemoryTokens.split(phi, 2).tokens, before)
    torch.testing.assert_close(lexical.amortize(TEXTS[1:2])[0], phi[1], atol=1e-5, rtol=1e-5)
    assert not torch.equal(phi[0, 4:], phi[1, 4:])


def test_the_document_prior_adds_the_product_of_lexical_vectors_to_the_cosine(lexical: MACModel) -> None:
    prior: Any = lexical.aggregation.prior
    phi, asked = lexical.amortize(TEXTS), encoded_questions(lexical)
    scores = lexical.aggregation.prior_scores(asked, lexical.project(phi))
    for question, row in zip(asked.stacked().double(), scores, strict=True):
        for document, score in zip(phi.double(), row, strict=True):
            pair = prior.query.weight.double() @ question[0], prior.key.weight.double() @ document[0]
            product = question[4:].flatten() @ document[4:].flatten() / question[4:].norm()
            expected = prior.log_scale.exp() * (functional.cosine_similarity(*pair, dim=0) + 0.3 * product)
            torch.testing.assert_close(score.double(), expected, atol=1e-4, rtol=1e-5)


def test_nothing_attends_to_lexical_vectors(lexical: MACModel) -> None:
    phi, asked = lexical.amortize(TEXTS), encoded_questions(lexical)
    others = torch.cat([phi[:, :4], torch.randn_like(phi[:, 4:])], 1)
    with lexical.without_document_prior(), torch.no_grad():
        found = [lexical.aggregation(asked, lexical.project(rows))[0] for rows in (phi, others)]
    assert found[0].shape == (2, 4, 384)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("strategy", ["streaming", "hierarchical", "preselect"])
def test_no_strategy_attends_to_lexical_vectors(lexical: MACModel, strategy: Any) -> None:
    config = AttentionConfig(strategy=strategy, preselected=3, subgroup=3)
    engine = MACEngine(lexical, attention=config)
    engine.adapt([Document(str(number), text) for number, text in enumerate(TEXTS)])
    found = engine.aggregate(QUESTIONS)
    with torch.no_grad():
        bank, asked = lexical.project(engine.bank.phi), encoded_questions(lexical)
        expected, _ = lexical.aggregation(asked, bank, attention=direct_attention)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert [answer.text for answer in engine.answer(QUESTIONS)] == lexical.generate(QUESTIONS, modulation=expected)


def test_a_checkpoint_holds_hashed_bm25(lexical: MACModel, tmp_path: Path) -> None:
    before = lexical.amortize(TEXTS)
    for dtype in (None, torch.int8):
        again = reloaded(lexical, tmp_path / str(dtype), dtype=dtype)
        assert again.amortization.network.hashed_bm25 is again.input_encoder.network.hashed_bm25
        torch.testing.assert_close(again.amortize(TEXTS)[:, 4:], before[:, 4:])
    network: Any = again.amortization.network
    fingerprint = again.fingerprint
    with torch.no_grad():  # a model with other rarities is another model
        network.hashed_bm25.rarity.mul_(2)
    assert again.fingerprint != fingerprint


def test_training_leaves_the_sentence_encoder_and_hashed_bm25_as_they_are(lexical: MACModel) -> None:
    network, prior = lexical.amortization.network, lexical.aggregation.prior
    rarity = network.hashed_bm25.rarity.clone()
    lexical.train()
    assert not network.sentence_encoder.training
    weights = LossWeights(answer=1, direct=1, reconstruction=1, contrastive=1)
    negatives = MemoryTokens.split(torch.randn(5, 6, 384), 2)
    terms, phi = mac_loss(lexical, BATCH, weights, negatives=negatives, distractors=2)
    assert phi.stacked().shape == (3, 6, 384)
    assert all(bool(term.isfinite()) for term in terms.values())
    terms["loss"].backward()
    assert network.hashed_bm25.rarity.grad is None
    assert torch.equal(network.hashed_bm25.rarity, rarity)
    assert all(p.grad is None for p in network.sentence_encoder.parameters())
    assert float(prior.query.weight.grad.abs().sum()) > 0


def test_lexical_vectors_find_a_name_that_meaning_does_not(model: MACModel) -> None:
    names = ["Quorndal", "Xebrith", "Vostwick", "Ymberley", "Ploskov", "Drennagh"]
    texts = [f"The mayor of {name} opened a bridge over the river in spring." for name in names]
    lexical = add_hashed_bm25(model, texts, 8, 0.3)
    questions = [lexical.input_encoder.ids(f"Who opened a bridge in {name}?") for name in names]
    scores = lexical.aggregation.prior_scores(
        lexical.input_encoder.encode(questions, 999), lexical.project(lexical.amortize(texts))
    )
    assert scores.argmax(1).tolist() == list(range(len(names)))


def test_hashed_bm25_is_added_to_a_document_prior_with_or_without_a_sentence_encoder() -> None:
    model = MACModel.from_config(with_encoder(None), device="cpu")
    phi = add_hashed_bm25(model, TEXTS, 2, 0.1).amortize(TEXTS)
    assert phi.shape == (3, 4 + 2, 384)
    without = AggregationConfig(blocks=1, heads=2, head_width=8, feed_forward=1)
    with pytest.raises(ConfigError, match="this model has no document prior, which hashed BM25 serves"):
        add_hashed_bm25(MACModel.from_config(with_encoder(None, aggregation=without), device="cpu"), TEXTS, 2, 0.1)


def test_an_encoder_that_starts_anew_keeps_what_finds_documents(lexical: MACModel, tmp_path: Path) -> None:
    lexical.save_pretrained(tmp_path / "mac")
    place = grafted(lexical.config, tmp_path / "mac", "amortization", tmp_path / "starts", 0)
    fresh, old = MACModel.from_pretrained(place, device="cpu").mac_state(), lexical.mac_state()
    differ = {name for name, weight in fresh.items() if not torch.equal(weight, old[name])}
    assert "amortization.network.mlps.inner" in differ
    assert not any(".sentence_encoder." in name or ".hashed_bm25." in name for name in differ)


def test_a_sentence_encoder_that_cannot_be_used(shared: MACModel, model_folder: Folder, tmp_path: Path) -> None:
    own = SentenceEncoderConfig(name="minilm")
    with pytest.raises(ValidationError, match="the sentence encoder 'minilm' serves the document prior"):
        with_encoder(own, aggregation=AggregationConfig())
    with pytest.raises(ValidationError, match="tokens is 1, but a document needs one beside the sentence encoder's"):
        with_encoder(own, tokens=1)
    with pytest.raises(ModelLoadError, match=r"encoder '.*' cannot be used: its vocabulary is not the base LM's"):
        MACModel.from_config(with_encoder(SentenceEncoderConfig(name=str(model_folder("bert")))), device="cpu")
    other = mac_config(model_folder("llama")).model_copy(update={"sentence_encoder": own})
    with pytest.raises(ModelLoadError, match="the sentence encoder 'minilm' cannot be used: its vocabulary"):
        MACModel.from_config(other, device="cpu")
    narrow = AutoModel.from_config(BertGenerationConfig(hidden_size=48, num_hidden_layers=1))
    narrow.save_pretrained(tmp_path / "narrow")
    shared.base_lm.tokenizer.save_pretrained(tmp_path / "narrow")
    with pytest.raises(ModelLoadError, match="has a width of 48, but the base LM has one of 384"):
        MACModel.from_config(with_encoder(SentenceEncoderConfig(name=str(tmp_path / "narrow"))), device="cpu")


def test_an_lm_that_learns_along_leaves_shared_embeddings_alone(model: MACModel) -> None:
    model.train_base_lm(lora_rank=None)
    embeddings = model.base_lm.model.get_input_embeddings().weight
    learning = {name for name, parameter in model.base_lm.model.named_parameters() if parameter.requires_grad}
    assert not embeddings.requires_grad
    assert len(learning) == len(list(model.base_lm.model.parameters())) - 1
    before = model.amortize(TEXTS)[:, 0]
    mac_loss(model, BATCH, LossWeights())[0]["loss"].backward()
    torch.optim.SGD([p for p in model.parameters() if p.grad is not None], 1.0).step()
    torch.testing.assert_close(model.amortize(TEXTS)[:, 0], before, atol=0, rtol=0)
