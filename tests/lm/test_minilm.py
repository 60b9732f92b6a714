"""all-MiniLM-L6-v2 as a backbone and as a prefix LM, its tokenizer, and encoders that share the LM's embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModel

from mac_rag.config import AggregationConfig, BaseLMConfig, EncoderConfig, MACConfig
from mac_rag.errors import ModelLoadError
from mac_rag.lm.loading import load_backbone
from mac_rag.lm.minilm import minilm_encoder, minilm_folder, minilm_lm, minilm_tokenizer
from mac_rag.model import MACModel
from pipelines.tasks.pointer import init_pointer_head
from tests.helpers import Folder, reloaded

TEXTS = ["In 1066 William of Normandy won at Hastings.", "Riga lies on the Daugava."]


@pytest.fixture(scope="module")
def lm() -> Any:
    return minilm_lm(600).eval()


@pytest.fixture(scope="module")
def lm_folder(lm: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("minilm") / "lm"
    lm.save_pretrained(place)
    minilm_tokenizer().save_pretrained(place)
    return place


@pytest.mark.parametrize(
    "text",
    [
        "in 1066, norman's 1,000 men (from the u.s. army) paid $3.5 million; the twenty-first didn't.",
        "from 1990–1995, and/or 20% of [some] st. mary's: why?",
        "at 10:30 the wi-fi went down!",
    ],
)
def test_the_tokenizer_gives_back_how_english_is_written(text: str) -> None:
    tokenizer = minilm_tokenizer()
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_encoder_has_the_states_that_minilm_has() -> None:
    tokenizer, encoder = minilm_tokenizer(), minilm_encoder(1100)
    ids = torch.tensor([tokenizer(TEXTS[0]).input_ids])
    theirs = AutoModel.from_pretrained(str(minilm_folder())).eval()
    with torch.no_grad():
        expected = theirs(ids).last_hidden_state
        states = encoder(ids).last_hidden_state
    assert torch.allclose(states, expected, atol=1e-5)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert getattr(encoder.config, name) == getattr(tokenizer, name)


def test_positions_beyond_those_of_minilm_repeat_them() -> None:
    table = minilm_encoder(1100).embeddings.position_embeddings.weight
    assert torch.equal(table[512:1023], table[1:512])
    assert torch.equal(table[1023], table[1])


def test_what_the_last_layer_attends_to_is_what_is_said() -> None:
    lm: Any = minilm_lm(64).eval()
    ids = torch.randint(2000, 25_000, (64, 24))
    init_pointer_head(lm, ids, ids.flatten())
    attention = lm.bert.encoder.layer[-1].attention.self
    for part in (attention.query, attention.key):  # every token now attends to all tokens alike
        torch.nn.init.zeros_(part.weight)
        torch.nn.init.zeros_(part.bias)
    with torch.no_grad():
        ranks = lm(ids[:, :6]).logits[:, -1].argsort(-1, descending=True)
    said = torch.stack([torch.isin(row[:50], seen).sum() for row, seen in zip(ranks, ids[:, :6], strict=True)])
    assert said.float().mean() > 3  # most of the six, among 30,522


def shared(name: str, lm: Path, **values: Any) -> MACConfig:
    part = EncoderConfig(design="encoder-only", name=name, embeddings="base-lm")
    sizes = AggregationConfig(blocks=1, heads=2, head_width=8, prior_width=16)
    return MACConfig(
        base_lm=BaseLMConfig(name=str(lm), **values), amortization=part, input_encoder=part, tokens=3, max_new_tokens=4,
        mlp_width=16, aggregation=sizes,
    )  # fmt: skip


def test_encoders_read_with_the_embeddings_of_the_base_lm(lm_folder: Path, tmp_path: Path) -> None:
    model = MACModel.from_config(shared("minilm", lm_folder), device="cpu")
    assert not any("word_embeddings" in name for name in model.mac_state())
    inner = model.amortization.network.mlps.inner.detach()
    assert inner.shape == (3, 384, 16)
    assert abs(float(inner.std()) * 384**0.5 - 1) < 0.1
    again = reloaded(model, tmp_path / "saved")
    assert torch.allclose(again.amortize(TEXTS), model.amortize(TEXTS), atol=1e-6)
    assert again.fingerprint == model.fingerprint
    with torch.no_grad():  # memory tokens that other embeddings wrote are of another model
        again.base_lm.model.get_input_embeddings().weight[2000:] *= 1.5
    assert again.fingerprint != model.fingerprint
    assert not torch.allclose(again.amortize(TEXTS), model.amortize(TEXTS), atol=1e-2)


def test_embeddings_that_cannot_be_shared(model_folder: Folder, lm_folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"cannot share the base LM's embeddings.*set embeddings: own"):
        MACModel.from_config(shared("minilm", model_folder("llama")), device="cpu")
    with pytest.raises(ValidationError, match="only at its dtype and without quantization"):
        shared("minilm", lm_folder, dtype="bf16")
    with pytest.raises(ModelLoadError, match="cannot be quantised"):
        load_backbone(EncoderConfig(design="encoder-only", name="minilm", quantization="int8"), torch.device("cpu"))
    with pytest.raises(ModelLoadError, match="is no encoder-decoder"):
        load_backbone(EncoderConfig(design="encoder-decoder", name="minilm"), torch.device("cpu"))
