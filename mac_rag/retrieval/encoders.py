"""Encoders for dense retrieval, pooled as their model cards say: Contriever, DPR, MiniLM, sentence-transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    DPRContextEncoder,
    DPRContextEncoderTokenizer,
    DPRQuestionEncoder,
    DPRQuestionEncoderTokenizer,
)

from mac_rag.errors import ModelLoadError
from mac_rag.lm.batching import length_buckets, pad_rows
from mac_rag.lm.devices import default_device
from mac_rag.lm.loading import loaded
from mac_rag.lm.minilm import minilm_folder
from mac_rag.lm.model_folders import check_modules, check_size, pinned, split_revision
from mac_rag.nn.unpadded_bert import last_states_without_gradients
from mac_rag.retrieval.dense import Vectors

Pooling = Literal["mean", "pooler"]
Advance = Callable[[int], None] | None

# Most tokens in a batch, padding included. On a CPU, a larger one leaves the cache: MiniLM takes 1.7 times as long with
# 16,384.
BATCH_TOKENS = {"cpu": 2048, "cuda": 16_384}


@dataclass(frozen=True)
class Tower:
    """A transformer that maps texts to vectors.

    Attributes:
        model: a network whose output has `last_hidden_state` `[B, L, D]` or, for `pooler`, `pooler_output` `[B, D]`.
        tokenizer: the tokenizer of the model.
        pooling: `mean` for the mean of the hidden states of all tokens, `pooler` for the model's own pooled output.
        normalize: True to scale vectors to length 1, which makes the dot product a cosine.
        max_tokens: longest text in tokens; longer ones are truncated.
    """

    model: nn.Module
    tokenizer: Any
    pooling: Pooling
    normalize: bool
    max_tokens: int

    def __post_init__(self) -> None:
        self._tokenized([""])  # this sets the tokenizer's truncation for good, so that threads can share it

    def _tokenized(self, texts: list[str]) -> list[list[int]]:
        rows: list[list[int]] = self.tokenizer(texts, truncation=True, max_length=self.max_tokens).input_ids
        return rows

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str], advance: Advance = None) -> Vectors:
        """Encodes texts to vectors `[N, D]`, in batches of similar length.

        Args:
            texts: N texts.
            advance: called with the number of texts after each batch.
        """
        device = next(self.model.parameters()).device
        vectors = np.zeros((len(texts), self.width), dtype=np.float32)
        if not texts:
            return vectors
        rows = self._tokenized(list(texts))
        for bucket in length_buckets(list(map(len, rows)), BATCH_TOKENS.get(device.type, 16_384)):
            # The mask hides the padding, so any id will do.
            ids, mask = pad_rows([rows[i] for i in bucket], 0, device)
            vectors[bucket] = self._pooled(ids, mask).float().cpu().numpy()
            if advance is not None:
                advance(len(bucket))
        return vectors

    def _pooled(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Token ids and mask `[B, L]` -> vectors `[B, D]`."""
        if self.pooling == "pooler":
            pooled: Tensor = self.model(input_ids=ids, attention_mask=mask).pooler_output
        else:
            hidden = last_states_without_gradients(self.model, ids, mask).masked_fill(~mask[..., None].bool(), 0.0)
            pooled = hidden.sum(1) / mask.sum(1, keepdim=True)
        return nn.functional.normalize(pooled) if self.normalize else pooled

    @property
    def width(self) -> int:
        """D, the length of a vector."""
        config: Any = self.model.config
        return int(config.hidden_size if not getattr(config, "projection_dim", 0) else config.projection_dim)

    def describe(self) -> str:
        """A text that differs for towers whose vectors differ."""
        return f"{self.pooling} {self.normalize} {self.max_tokens} {weights_hash(self.model)}"


class TowerEncoder:
    """An encoder with one tower for documents and one for questions, which may be the same.

    Args:
        name: name of the encoder, the first word of its fingerprint.
        documents: tower for documents.
        questions: tower for questions.

    Attributes:
        width: D, the length of a vector.
        fingerprint: the name, and a hash of the weights and the pooling of both towers.
    """

    def __init__(self, name: str, documents: Tower, questions: Tower) -> None:
        self.width = documents.width
        document_side = documents.describe()
        question_side = document_side if questions is documents else questions.describe()
        self.fingerprint = f"{name} {hashlib.sha256(f'{document_side} {question_side}'.encode()).hexdigest()[:16]}"
        self._documents, self._questions = documents, questions

    def documents(self, texts: Sequence[str], advance: Advance = None) -> Vectors:
        return self._documents(texts, advance)

    def questions(self, texts: Sequence[str]) -> Vectors:
        return self._questions(texts)


def contriever(place: str = "facebook/contriever", *, device: str | None = None) -> TowerEncoder:
    """Contriever (Izacard et al., 2022): mean over all tokens, dot product, texts of up to 512 tokens.

    Args:
        place: `facebook/contriever`, `facebook/contriever-msmarco`, either with `@REVISION`, or a folder.
        device: device of the network; None for a GPU if there is one.

    Raises:
        ModelLoadError: if there is no such model.
        ConfigError: if there is no such device.
    """
    tower = _tower(place, AutoModel, AutoTokenizer, "mean", False, 512, device)
    return TowerEncoder("contriever", tower, tower)


def dpr(
    question_place: str = "facebook/dpr-question_encoder-single-nq-base",
    document_place: str = "facebook/dpr-ctx_encoder-single-nq-base",
    *,
    device: str | None = None,
) -> TowerEncoder:
    """DPR (Karpukhin et al., 2020): one encoder for questions and one for passages, pooler output, dot product.

    Args:
        question_place: name (also `NAME@REVISION`) or folder of the question encoder.
        document_place: the same for the passage encoder.
        device: device of the networks; None for a GPU if there is one.

    Raises:
        ModelLoadError: if there is no such model.
        ConfigError: if there is no such device.
    """
    documents = _tower(document_place, DPRContextEncoder, DPRContextEncoderTokenizer, "pooler", False, 512, device)
    questions = _tower(question_place, DPRQuestionEncoder, DPRQuestionEncoderTokenizer, "pooler", False, 512, device)
    return TowerEncoder("dpr", documents, questions)


def minilm(*, device: str | None = None) -> TowerEncoder:
    """all-MiniLM-L6-v2 from an installed package, without a model hub: mean over all tokens, cosine.

    Args:
        device: device of the network; None for a GPU if there is one.

    Raises:
        ModelLoadError: if the package is missing or damaged (see `minilm_folder`).
        ConfigError: if there is no such device.
    """
    tower = _tower(str(minilm_folder()), AutoModel, AutoTokenizer, "mean", True, 256, device)
    return TowerEncoder("minilm", tower, tower)


class SentenceTransformerEncoder:
    """Any sentence-transformers model with its own pooling and prompts; cosine.

    Args:
        place: name on the Hub, also `NAME@REVISION`, or folder.
        device: device of the network; None for a GPU if there is one.

    Attributes:
        width: D, the length of a vector.
        fingerprint: hash of configuration, prompts and weights.

    Raises:
        ModelLoadError: if sentence-transformers is missing, or there is no such model.
        ConfigError: if there is no such device.
    """

    def __init__(self, place: str, *, device: str | None = None) -> None:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError:
            raise ModelLoadError(f"{place!r} needs sentence-transformers: pip install 'mac-rag[dense]'") from None
        name, revision = split_revision(place)
        revision = pinned(name, revision)
        check_modules(name, revision)
        self._model: Any = loaded(
            "an encoder",
            name,
            SentenceTransformer,
            device=str(default_device(device)),
            revision=revision,
            model_kwargs={"use_safetensors": True},
        )
        self.width = int(self._model.get_embedding_dimension())
        identity = f"{self._model} {self._model.prompts} {weights_hash(self._model)}"
        self.fingerprint = f"sentence-transformers {hashlib.sha256(identity.encode()).hexdigest()[:16]}"

    def documents(self, texts: Sequence[str], advance: Advance = None) -> Vectors:
        vectors = self._encode(self._model.encode_document, texts)
        if advance is not None:
            advance(len(texts))
        return vectors

    def questions(self, texts: Sequence[str]) -> Vectors:
        return self._encode(self._model.encode_query, texts)

    def _encode(self, encode: Callable[..., Any], texts: Sequence[str]) -> Vectors:
        # The library itself sorts by length and makes batches.
        vectors = encode(list(texts), normalize_embeddings=True, show_progress_bar=False, convert_to_numpy=True)
        return np.asarray(vectors, dtype=np.float32).reshape(len(texts), self.width)


def _tower(
    place: str,
    model: Any,
    tokenizer: Any,
    pooling: Pooling,
    normalize: bool,
    max_tokens: int,
    device: str | None,
) -> Tower:
    name, revision = split_revision(place)
    revision = pinned(name, revision)
    # AutoConfig finds the configuration for an auto class; any other class has its own configuration class.
    configuration = getattr(model, "config_class", AutoConfig)
    architecture = loaded("an encoder", name, configuration.from_pretrained, revision=revision)
    loaded("an encoder", name, check_size, revision=revision, architecture=architecture, auto_class=model)
    network = loaded(
        "an encoder", name, model.from_pretrained, revision=revision, use_safetensors=True, dtype=torch.float32
    )
    return Tower(
        network.eval().to(default_device(device)),
        loaded("a tokenizer", name, tokenizer.from_pretrained, revision=revision),
        pooling,
        normalize,
        min(max_tokens, int(network.config.max_position_embeddings)),
    )


def weights_hash(model: nn.Module) -> str:
    """Hex sha256 of all weights of a network, with their names, dtypes and shapes."""
    digest = hashlib.sha256()
    for name, values in sorted(model.state_dict().items()):
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        digest.update(values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
