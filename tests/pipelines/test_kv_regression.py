"""Starting MAC around an LM that reads: before any training, memory tokens give the LM what the text would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import DynamicCache

from mac_rag.config import AggregationConfig, BaseLMConfig, EncoderConfig, MACConfig, SentenceEncoderConfig
from mac_rag.data.newswire.generate import generate
from mac_rag.errors import ConfigError, ModelLoadError
from mac_rag.model import MACModel
from pipelines.initializers.kv_regression import init_by_kv_regression

DATA = generate("train", 60, seed=3, questions_per_document=2)
TOKENS = 24


def build(layers: int | None = 4, sentence_encoder: bool = False) -> MACModel:
    torch.manual_seed(5)
    part = EncoderConfig(design="encoder-pooling", name=None, embeddings="base-lm", layers=layers)
    config = MACConfig(
        base_lm=BaseLMConfig(name="minilm"),
        amortization=part,
        input_encoder=part,
        sentence_encoder=SentenceEncoderConfig(name="minilm", embeddings="base-lm") if sentence_encoder else None,
        tokens=TOKENS + sentence_encoder,
        mlp_width=8,
        aggregation=AggregationConfig(blocks=1, heads=6, head_width=64, feed_forward=1, prior_width=64),
    )
    return MACModel.from_config(config, device="cpu")


@pytest.fixture(scope="module", params=[False, True], ids=["without sentence encoder", "with sentence encoder"])
def started(request: pytest.FixtureRequest) -> tuple[MACModel, MACModel]:
    """A model as it is built, and the same after the start."""
    model = build(sentence_encoder=request.param)
    init_by_kv_regression(model, DATA)
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


def test_a_checkpoint_of_fewer_layers(started: tuple[MACModel, MACModel], tmp_path: Path) -> None:
    model = started[1]
    model.save_pretrained(tmp_path / "mac")
    again = MACModel.from_pretrained(tmp_path / "mac", device="cpu")
    assert again.amortization.network.backbone.config.num_hidden_layers == 4
    texts = [document.text for document in DATA.documents[:3]]
    torch.testing.assert_close(again.amortize(texts), model.amortize(texts), atol=1e-5, rtol=1e-5)


def test_what_cannot_start_so(tiny_model: MACModel) -> None:
    with pytest.raises(ConfigError, match="init: kv_regression needs encoders of design encoder-pooling"):
        init_by_kv_regression(tiny_model, DATA)
    with pytest.raises(ModelLoadError, match="layers is 7, but mac-prefix-lm has 6"):
        build(layers=7)
    with pytest.raises(ValueError, match="layers is 2, but the backbone 'minilm' is taken as it is"):
        EncoderConfig(design="encoder-pooling", name="minilm", layers=2)
