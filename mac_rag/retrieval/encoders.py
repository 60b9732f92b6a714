"""Encoders of dense retrieval, each pooled as its model card says: Contriever, DPR, MiniLM, sentence-transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoTokenizer,
    DPRContextEncoder,
    DPRContextEncoderTokenizer,
    DPRQuestionEncoder,
    DPRQuestionEncoderTokenizer,
)

from mac_rag.errors import ModelLoadError
from mac_rag.lm.batching import length_buckets
from mac_rag.lm.loading import loaded
from mac_rag.lm.minilm import minilm_folder
from mac_rag.retrieval.embeddings import Vectors

Pooling = Literal["mean", "pooler"]
Advance = Callable[[int], None] | None


_BATCH_TOKENS = 16_384  # tokens of one batch, padding included


@dataclass(frozen=True)
class Tower:
    """One transformer from texts to vectors.

    Attributes:
        model: gives `last_hidden_state` `[B, L, D]`, or `pooler_output` `[B, D]`.
        tokenizer: the model's.
        pooling: `mean` of the hidden states of all tokens, or the model's own `pooler` output.
        normalize: scale vectors to length 1, which makes the dot product a cosine.
        max_tokens: where texts are cut off.
    """

    model: nn.Module
    tokenizer: Any
    pooling: Pooling
    normalize: bool
    max_tokens: int

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str], advance: Advance = None) -> Vectors:
        """Encodes texts to `[N, D]`, in batches of similar length."""
        device = next(self.model.parameters()).device
        vectors = np.zeros((len(texts), self.width), dtype=np.float32)
        if not texts:
            return vectors
        rows: list[list[int]] = self.tokenizer(list(texts), truncation=True, max_length=self.max_tokens).input_ids
        for bucket in length_buckets(list(map(len, rows)), _BATCH_TOKENS):
            length = max(len(rows[i]) for i in bucket)
            # What fills the padding does not matter: it is masked.
            ids = torch.tensor([[*rows[i], *[0] * (length - len(rows[i]))] for i in bucket], device=device)
            mask = torch.tensor([[1] * len(rows[i]) + [0] * (length - len(rows[i])) for i in bucket], device=device)
            vectors[bucket] = self._pooled(ids, mask).float().cpu().numpy()
            if advance is not None:
                advance(len(bucket))
        return vectors

    def _pooled(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Token ids and mask `[B, L]` -> vectors `[B, D]`."""
        output = self.model(input_ids=ids, attention_mask=mask)
        if self.pooling == "pooler":
            pooled: Tensor = output.pooler_output
        else:
            hidden = output.last_hidden_state.masked_fill(~mask[..., None].bool(), 0.0)
            pooled = hidden.sum(1) / mask.sum(1, keepdim=True)
        return nn.functional.normalize(pooled) if self.normalize else pooled

    @property
    def width(self) -> int:
        config: Any = self.model.config
        return int(config.hidden_size if not getattr(config, "projection_dim", 0) else config.projection_dim)

    def describe(self) -> str:
        """Tells towers with other vectors apart."""
        return f"{self.pooling} {self.normalize} {self.max_tokens} {weights_hash(self.model)}"


class TowerEncoder:
    """An encoder of one tower for documents and one for questions, often the same.

    Attributes:
        width: D.
        fingerprint: hash of weights and pooling of both.
    """

    def __init__(self, name: str, documents: Tower, questions: Tower) -> None:
        self.width = documents.width
        described = documents.describe()
        asked = described if questions is documents else questions.describe()
        self.fingerprint = f"{name} {hashlib.sha256(f'{described} {asked}'.encode()).hexdigest()[:16]}"
        self._documents, self._questions = documents, questions

    def documents(self, texts: Sequence[str], advance: Advance = None) -> Vectors:
        return self._documents(texts, advance)

    def questions(self, texts: Sequence[str]) -> Vectors:
        return self._questions(texts)


def contriever(place: str = "facebook/contriever", *, device: str | None = None) -> TowerEncoder:
    """Contriever (Izacard et al., 2022): the mean over all tokens, dot product, texts up to 512 tokens.

    Args:
        place: `facebook/contriever`, `facebook/contriever-msmarco`, or a folder.
        device: None for a GPU if there is one.

    Raises:
        ModelLoadError: when there is no such model.
    """
    tower = _tower(place, AutoModel, AutoTokenizer, "mean", False, 512, device)
    return TowerEncoder("contriever", tower, tower)


def dpr(
    question_place: str = "facebook/dpr-question_encoder-single-nq-base",
    document_place: str = "facebook/dpr-ctx_encoder-single-nq-base",
    *,
    device: str | None = None,
) -> TowerEncoder:
    """DPR (Karpukhin et al., 2020): a question and a passage encoder, the pooler's output, dot product.

    Args:
        question_place: name or folder of the question encoder.
        document_place: name or folder of the passage encoder.
        device: None for a GPU if there is one.

    Raises:
        ModelLoadError: when there is no such model.
    """
    documents = _tower(document_place, DPRContextEncoder, DPRContextEncoderTokenizer, "pooler", False, 512, device)
    questions = _tower(question_place, DPRQuestionEncoder, DPRQuestionEncoderTokenizer, "pooler", False, 512, device)
    return TowerEncoder("dpr", documents, questions)


def minilm(*, device: str | None = None) -> TowerEncoder:
    """all-MiniLM-L6-v2 out of an installed package, without a model hub: the mean over all tokens, cosine.

    Raises:
        ModelLoadError: as `minilm_folder`.
    """
    tower = _tower(str(minilm_folder()), AutoModel, AutoTokenizer, "mean", True, 256, device)
    return TowerEncoder("minilm", tower, tower)


class SentenceTransformerEncoder:
    """Any sentence-transformers model with its own pooling and prompts; cosine.

    Args:
        place: a name on the Hub or a folder.
        device: None for a GPU if there is one.

    Raises:
        ModelLoadError: when sentence-transformers is missing, or there is no such model.
    """

    def __init__(self, place: str, *, device: str | None = None) -> None:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError:
            raise ModelLoadError(f"{place!r} needs sentence-transformers: pip install 'mac-rag[dense]'") from None
        self._model: Any = loaded(
            "an encoder",
            place,
            SentenceTransformer,
            device=str(_device(device)),
            trust_remote_code=False,
            model_kwargs={"use_safetensors": True},
        )
        self.width = int(self._model.get_embedding_dimension())
        described = f"{self._model} {self._model.prompts} {weights_hash(self._model)}"
        self.fingerprint = f"sentence-transformers {hashlib.sha256(described.encode()).hexdigest()[:16]}"

    def documents(self, texts: Sequence[str], advance: Advance = None) -> Vectors:
        vectors = self._encoded(self._model.encode_document, texts)
        if advance is not None:
            advance(len(texts))
        return vectors

    def questions(self, texts: Sequence[str]) -> Vectors:
        return self._encoded(self._model.encode_query, texts)

    def _encoded(self, encode: Callable[..., Any], texts: Sequence[str]) -> Vectors:
        # The library sorts by length and batches by itself.
        vectors = encode(list(texts), normalize_embeddings=True, show_progress_bar=False, convert_to_numpy=True)
        return np.asarray(vectors, dtype=np.float32).reshape(len(texts), self.width)


def _tower(
    place: str, model: Any, tokenizer: Any, pooling: Pooling, normalize: bool, max_tokens: int, device: str | None
) -> Tower:
    network = loaded(
        "an encoder", place, model.from_pretrained, trust_remote_code=False, use_safetensors=True, dtype=torch.float32
    )
    return Tower(
        network.eval().to(_device(device)),
        loaded("a tokenizer", place, tokenizer.from_pretrained),
        pooling,
        normalize,
        min(max_tokens, int(network.config.max_position_embeddings)),
    )


def _device(name: str | None) -> torch.device:
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def weights_hash(model: nn.Module) -> str:
    """Hex digest of all weights of a network, by their names, types and shapes."""
    digest = hashlib.sha256()
    for name, values in sorted(model.state_dict().items()):
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        digest.update(values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
