"""The index: a frozen sentence encoder whose mean state of a text is a token of its own, which finds documents."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional
from transformers import AutoModel, T5Config, T5ForConditionalGeneration

from mac_rag.config import AggregationConfig, BaseLMConfig, EncoderConfig, IndexConfig, MACConfig
from mac_rag.errors import ModelLoadError
from mac_rag.loading import load_tokenizer
from mac_rag.minilm import minilm_encoder
from mac_rag.model import MACModel
from mac_rag.objective import Batch, LossWeights, mac_loss
from tests.models import mac_config

TEXTS = ["William of Normandy won at Hastings, in 1066.", "Rain fell on the town for eleven days.", "It was cold."]
QUESTIONS = ["Who won at Hastings?", "How long did it rain?"]


def indexed(index: IndexConfig | None, **values: Any) -> MACConfig:
    part = EncoderConfig(design="encoder-pooling", name=None, embeddings="base-lm", layers=1)
    sizes = AggregationConfig(blocks=1, heads=2, head_width=8, feed_forward=1, prior_width=384)
    options = {"tokens": 4, "mlp_width": 8, "aggregation": sizes, "amortization": part, "input_encoder": part, **values}
    return MACConfig(base_lm=BaseLMConfig(name="minilm"), index=index, **options)


@pytest.fixture
def model() -> MACModel:
    torch.manual_seed(1)
    return MACModel.from_config(indexed(IndexConfig(name="minilm", embeddings="base-lm")), device="cpu")


def test_the_first_token_is_the_encoders_mean_state_of_the_text(model: MACModel) -> None:
    encoder = minilm_encoder(1536).double().eval()
    phi = model.amortize(TEXTS)
    assert phi.shape == (3, 4, 384)
    for text, tokens in zip(TEXTS, phi, strict=True):
        ids = torch.tensor([model.amortization.ids(text)])
        expected = encoder(ids).last_hidden_state[0].mean(0)
        torch.testing.assert_close(tokens[0].double(), expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(model.amortize([text])[0], tokens, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("design", ["encoder-only", "encoder-pooling", "decoder-only", "encoder-decoder"])
def test_every_design_has_an_index(design: str, tmp_path: Path) -> None:
    name = None
    if design in ("encoder-only", "encoder-decoder"):
        name = str(tmp_path / "t5")
        sizes = {"d_model": 384, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
        tokenizer = load_tokenizer("minilm")
        T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(name)
        tokenizer.save_pretrained(name)
    part = EncoderConfig.model_validate({"design": design, "name": name})
    model = MACModel.from_config(indexed(IndexConfig(name="minilm"), amortization=part), device="cpu")
    phi = model.amortize(TEXTS)
    assert phi.shape == (3, 4, 384)
    index = MACModel.from_config(indexed(IndexConfig(name="minilm")), device="cpu").amortize(TEXTS)[:, 0]
    torch.testing.assert_close(phi[:, 0], index, atol=1e-5, rtol=1e-5)


def test_the_document_prior_compares_indices_alone(model: MACModel) -> None:
    prior: Any = model.aggregation.prior
    phi, asked = model.amortize(TEXTS), model.input_encoder.encode([model.input_encoder.ids(q) for q in QUESTIONS], 99)
    scores = model.aggregation.prior_scores(asked, model.project(phi))
    for question, row in zip(asked, scores, strict=True):
        for document, score in zip(phi, row, strict=True):
            pair = prior.query.weight @ question[0], prior.key.weight @ document[0]
            torch.testing.assert_close(score, prior.log_scale.exp() * functional.cosine_similarity(*pair, dim=0))
    others = torch.cat([phi[:, :1], torch.randn_like(phi[:, 1:])], 1)
    torch.testing.assert_close(model.aggregation.prior_scores(asked, model.project(others)), scores)


def test_a_checkpoint_holds_the_index_once(model: MACModel, tmp_path: Path) -> None:
    with torch.no_grad():  # so that what is loaded cannot come from MiniLM's package
        model.amortization.network.index.encoder.layer[0].output.dense.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "mac")
    again = MACModel.from_pretrained(tmp_path / "mac", device="cpu")
    torch.testing.assert_close(again.amortize(TEXTS), model.amortize(TEXTS))
    assert again.amortization.network.index is again.input_encoder.network.index
    assert again.fingerprint == model.fingerprint
    with (tmp_path / "mac" / "model.safetensors").open("rb") as file:
        names = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    layer = "index.encoder.layer.0.output.dense.weight"
    assert [name for name in names if name.endswith(layer)] == [f"amortization.network.{layer}"]
    assert not any("word_embeddings" in name for name in names)
    with torch.no_grad():  # another index finds other documents: memory tokens are not those of this model
        again.amortization.network.index.encoder.layer[0].output.dense.weight.mul_(1.5)
    assert again.fingerprint != model.fingerprint


def test_training_leaves_the_index_as_it_is(model: MACModel) -> None:
    model.train()
    assert not model.amortization.network.index.training
    terms, _ = mac_loss(
        model, Batch(TEXTS, QUESTIONS, ["William", "eleven days"], [0, 1]), LossWeights(answer=1, contrastive=1)
    )
    terms["loss"].backward()
    assert all(p.grad is None for p in model.amortization.network.index.parameters())
    prior: Any = model.aggregation.prior
    assert float(prior.query.weight.grad.abs().sum()) > 0


def test_an_index_that_cannot_be_used(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    own = IndexConfig(name="minilm")
    assert MACModel.from_config(indexed(own), device="cpu").amortize(TEXTS).shape == (3, 4, 384)
    with pytest.raises(ValidationError, match="the index 'minilm' serves the document prior"):
        indexed(own, aggregation=AggregationConfig())
    with pytest.raises(ValidationError, match="tokens is 1, but a document needs one beside its index"):
        indexed(own, tokens=1)
    with pytest.raises(ModelLoadError, match=r"index '.*' cannot be used: its vocabulary is not the base LM's"):
        MACModel.from_config(indexed(IndexConfig(name=str(model_folder("bert")))), device="cpu")
    other = mac_config(model_folder("llama")).model_copy(update={"index": own})
    with pytest.raises(ModelLoadError, match="the index 'minilm' cannot be used: its vocabulary"):
        MACModel.from_config(other, device="cpu")
    narrow = AutoModel.from_config(minilm_encoder(64).config.__class__(hidden_size=48, num_hidden_layers=1))
    model = MACModel.from_config(indexed(None), device="cpu")
    narrow.save_pretrained(tmp_path / "narrow")
    model.base_lm.tokenizer.save_pretrained(tmp_path / "narrow")
    with pytest.raises(ModelLoadError, match="has a width of 48, the base LM one of 384"):
        MACModel.from_config(indexed(IndexConfig(name=str(tmp_path / "narrow"))), device="cpu")


def test_an_lm_that_learns_along_leaves_shared_embeddings_alone(model: MACModel) -> None:
    model.train_base_lm(lora_rank=None)
    embeddings = model.base_lm.model.get_input_embeddings().weight
    learning = {name for name, parameter in model.base_lm.model.named_parameters() if parameter.requires_grad}
    assert not embeddings.requires_grad
    assert len(learning) == len(list(model.base_lm.model.parameters())) - 1
    before = model.amortize(TEXTS)[:, 0]
    batch = Batch(TEXTS, QUESTIONS, ["William of Normandy", "eleven days"], [0, 1])
    mac_loss(model, batch, LossWeights())[0]["loss"].backward()
    torch.optim.SGD([p for p in model.parameters() if p.grad is not None], 1.0).step()
    torch.testing.assert_close(model.amortize(TEXTS)[:, 0], before, atol=0, rtol=0)
