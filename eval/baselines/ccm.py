"""Compressed contexts with a trained retriever (appendix, "Comparison with memory augmented LMs").

After Kim et al. (2024, CCM): the frozen LM reads a document, followed by C learned vectors. A low-rank update of its
attention applies to these vectors only. The keys and values of their C positions are the compressed document. An
encoder, trained with it, retrieves the compressed document for a question, and the LM answers after it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache

from eval.baselines import weights_cache
from eval.baselines.finetuning import passages
from eval.harness.systems import System
from mac_rag.config import Config, EncoderConfig
from mac_rag.data.types import Document, QADataset
from mac_rag.errors import BankError, ConfigError
from mac_rag.lm.base_lm import LORA_TARGETS, BaseLM
from mac_rag.lm.batching import length_buckets, pad_rows
from mac_rag.lm.loading import load_backbone, load_tokenizer
from mac_rag.nn.modulation import Change, HookedModulation, linear_names
from mac_rag.progress import progress_bar

_BATCH_TOKENS = 8192
_RANK = 8  # of the conditional low-rank update, as published


@dataclass(frozen=True)
class Compressed:
    """Compressed documents.

    Attributes:
        keys_values: `[K, layers, 2, kv_heads, C, head_width]`.
        lengths: tokens of each document `[K]`; the positions of a question follow those of the compressed tokens.
    """

    keys_values: Tensor
    lengths: Tensor

    def __getitem__(self, rows: Tensor) -> Compressed:
        """Selects documents. `rows`: indices `[N]`."""
        return Compressed(self.keys_values[rows], self.lengths[rows])


class Compressor(nn.Module):
    """The learned vectors and the conditional low-rank update of a frozen LM, without the LM.

    Args:
        tokens: number C of learned vectors.
    """

    def __init__(self, base_lm: BaseLM, *, tokens: int) -> None:
        super().__init__()
        linears = linear_names(base_lm.model, LORA_TARGETS)
        if not linears:
            raise ConfigError(f"CCM knows no attention layers of {base_lm.model.config.model_type}")
        scale = float(base_lm.model.get_input_embeddings().weight.detach().float().std())
        self.vectors = nn.Parameter(scale * torch.randn(tokens, base_lm.width))
        self.names = list(linears)
        self.down = nn.ParameterList(inputs**-0.5 * torch.randn(inputs, _RANK) for inputs, _ in linears.values())
        self.up = nn.ParameterList(torch.zeros(_RANK, outputs) for _, outputs in linears.values())
        self.to(base_lm.device)

    def forward(self, base_lm: BaseLM, documents: Sequence[Sequence[int]]) -> Compressed:
        """Compresses K documents, given as token ids, in one batch."""
        ids, mask = pad_rows(documents, base_lm.tokenizer.pad_token_id, base_lm.device, "left")
        embedded = base_lm.model.get_input_embeddings()(ids)
        vectors = self.vectors.to(embedded.dtype).expand(len(ids), -1, -1)
        mask = torch.cat([mask, mask.new_ones(vectors.shape[:2])], 1)
        updates = zip(self.names, self.down, self.up, strict=True)
        changes = {name: Change(self._changed, (down[None], up[None])) for name, down, up in updates}
        with HookedModulation(changes).attached(base_lm.model):
            output = base_lm.model(
                inputs_embeds=torch.cat([embedded, vectors], 1),
                attention_mask=mask,
                position_ids=(mask.cumsum(1) - 1).clamp(min=0),
                use_cache=True,
                logits_to_keep=1,
            )
        count = len(self.vectors)
        layers = [
            torch.stack([layer.keys[:, :, -count:], layer.values[:, :, -count:]], 1)
            for layer in output.past_key_values.layers
        ]
        return Compressed(torch.stack(layers, 1), mask.sum(1) - count)

    def _changed(self, inputs: Tensor, output: Tensor, down: Tensor, up: Tensor) -> Tensor:
        count = len(self.vectors)
        added = inputs[:, -count:].to(down.dtype) @ down @ up  # only at the positions of the vectors
        return torch.cat([output[:, :-count], output[:, -count:] + added.to(output.dtype)], 1)


class EncoderRetriever(nn.Module):
    """One encoder of questions and documents: mean over the last states, a linear map, cosine similarity."""

    def __init__(self, backbone: Any, tokenizer: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.tokenizer = tokenizer
        self.map = nn.Linear(backbone.config.hidden_size, backbone.config.hidden_size, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(20.0).log())

    def forward(self, texts: Sequence[str]) -> Tensor:
        """Encodes B texts, cut to 512 tokens, as unit vectors `[B, width]`."""
        encoded = self.tokenizer(
            [text.strip() for text in texts], padding=True, truncation=True, max_length=512, return_tensors="pt"
        ).to(self.map.weight.device)
        mask = encoded.attention_mask
        states = self.backbone(input_ids=encoded.input_ids, attention_mask=mask).last_hidden_state
        mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return functional.normalize(self.map(mean.to(self.map.weight.dtype)), dim=-1)


class CCM(nn.Module):
    """The trained parts of CCM: the compressor and the retriever around a frozen LM.

    Args:
        tokens: number C of compressed tokens.
        encoder: the retriever's pretrained encoder (T5's in the paper); None for a copy of the LM.

    Raises:
        ConfigError: as `Compressor`.
    """

    def __init__(self, base_lm: BaseLM, *, tokens: int, encoder: EncoderConfig | None = None) -> None:
        super().__init__()
        self.compressor = Compressor(base_lm, tokens=tokens)
        if encoder is None or encoder.name is None:
            backbone: Any = copy.deepcopy(base_lm.model.base_model).float().requires_grad_(True)
            tokenizer = copy.deepcopy(base_lm.tokenizer)
        else:
            backbone = load_backbone(encoder, base_lm.device)
            tokenizer = load_tokenizer(encoder.name, encoder.revision)
        tokenizer.padding_side = "right"
        self.retriever = EncoderRetriever(backbone, tokenizer).to(base_lm.device)

    def answer_loss(
        self,
        base_lm: BaseLM,
        documents: Sequence[Sequence[int]],
        prompts: Sequence[list[int]],
        answers: Sequence[list[int]],
    ) -> Tensor:
        """Mean negative log-likelihood of the answers' tokens, each prompt after its own compressed document."""
        compressed = self.compressor(base_lm, documents)
        rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        ids, mask = pad_rows(rows, base_lm.tokenizer.pad_token_id, base_lm.device, "left")
        logits = _after(base_lm, compressed, ids, mask).logits[:, :-1]
        labels = torch.full_like(ids, -100)
        for label, answer in zip(labels, answers, strict=True):
            label[len(label) - len(answer) :] = torch.tensor(answer)
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)

    def retrieval_loss(self, questions: Sequence[str], documents: Sequence[str]) -> Tensor:
        """Cross-entropy of each question's own document among the documents of the batch."""
        scores = self.retriever.log_scale.exp() * self.retriever(questions) @ self.retriever(documents).T
        return functional.cross_entropy(scores, torch.arange(len(questions), device=scores.device))

    @torch.no_grad()
    def compress(self, base_lm: BaseLM, documents: Sequence[Sequence[int]]) -> Compressed:
        """Compresses any number of documents, given as token ids, in batches of similar length."""
        order: list[int] = []
        parts = []
        for bucket in length_buckets([len(document) for document in documents], _BATCH_TOKENS):
            parts.append(self.compressor(base_lm, [documents[index] for index in bucket]))
            order += bucket
        whole = Compressed(torch.cat([p.keys_values for p in parts]), torch.cat([p.lengths for p in parts]))
        return whole[torch.tensor(order).argsort()]


@torch.no_grad()
def generate_after(
    base_lm: BaseLM, compressed: Compressed, prompts: Sequence[Sequence[int]], *, max_new_tokens: int
) -> list[str]:
    """Answers prompts greedily, each after its own compressed document."""
    ids, mask = pad_rows(prompts, base_lm.tokenizer.pad_token_id, base_lm.device, "left")
    pad = base_lm.tokenizer.pad_token_id
    output = _after(base_lm, compressed, ids, mask)
    mask = torch.cat([mask.new_ones(len(ids), compressed.keys_values.shape[4]), mask], 1)
    position = compressed.lengths + mask.sum(1) - 1
    generated: list[Tensor] = []
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    while True:
        token = torch.where(ended, pad, output.logits[:, -1].argmax(-1))
        generated.append(token)
        ended |= base_lm.ends(token)
        if len(generated) == max_new_tokens or bool(ended.all()):
            break
        position = position + 1
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        output = base_lm.model(
            input_ids=token[:, None], attention_mask=mask, position_ids=position[:, None],
            past_key_values=output.past_key_values, use_cache=True,
        )  # fmt: skip
    texts = base_lm.tokenizer.batch_decode(torch.stack(generated, 1), skip_special_tokens=True)
    return [text.strip() for text in texts]


def _after(base_lm: BaseLM, compressed: Compressed, ids: Tensor, mask: Tensor) -> Any:
    """The LM's output for prompts `[B, L]` after compressed documents, at the positions after uncompressed ones."""
    count = compressed.keys_values.shape[4]
    positions = (mask.cumsum(1) - 1).clamp(min=0) + (compressed.lengths + count)[:, None]
    return base_lm.model(
        input_ids=ids,
        attention_mask=torch.cat([mask.new_ones(len(ids), count), mask], 1),
        position_ids=positions,
        past_key_values=DynamicCache([(layer[:, 0], layer[:, 1]) for layer in compressed.keys_values.unbind(1)]),
        use_cache=True,
    )


class CCMConfig(Config):
    """The recipe of CCM and its retriever.

    Attributes:
        tokens: number C of compressed tokens of a document.
        encoder: pretrained encoder of the retriever; None for a copy of the LM.
        steps: steps of Adam.
        batch_size: documents of a step, with one question each; the retriever contrasts them.
        learning_rate: learning rate of Adam, constant.
    """

    tokens: int = Field(16, ge=1)
    encoder: EncoderConfig | None = None
    steps: int = Field(ge=1)
    batch_size: int = Field(16, ge=2)
    learning_rate: float = Field(1e-3, gt=0)


class CCMSystem(System):
    """The LM after the compressed document that the retriever ranks first."""

    name = "CCM + encoder retriever"

    def __init__(self, base_lm: BaseLM, ccm: CCM, *, max_new_tokens: int = 16, batch_size: int = 32) -> None:
        self.settings = {"tokens": len(ccm.compressor.vectors)}
        self.networks = [base_lm, ccm]
        self._base_lm = base_lm
        self._ccm = ccm
        self._max_new_tokens = max_new_tokens
        self._batch_size = batch_size
        self._keys_values: list[Tensor] = []
        self._lengths: list[Tensor] = []
        self._embedded: list[Tensor] = []

    @torch.no_grad()
    def adapt(self, documents: Sequence[Document]) -> None:
        with progress_bar(self.name, len(documents)) as bar:
            for first in range(0, len(documents), self._batch_size):
                group = documents[first : first + self._batch_size]
                parts = [(row, text) for document in group for row, text in compressible(self._base_lm, document.text)]
                compressed = self._ccm.compress(self._base_lm, [row for row, _ in parts])
                self._keys_values.append(compressed.keys_values)
                self._lengths.append(compressed.lengths)
                self._embedded.append(self._ccm.retriever([text for _, text in parts]))
                bar.advance(len(group))

    @torch.no_grad()
    def answer(self, questions: Sequence[str]) -> list[str]:
        if not self._embedded:
            raise BankError("there are no compressed documents; adapt to some first")
        bank = Compressed(torch.cat(self._keys_values), torch.cat(self._lengths))
        embedded = torch.cat(self._embedded)
        answers = []
        with progress_bar("answer", len(questions)) as bar:
            for first in range(0, len(questions), self._batch_size):
                batch = questions[first : first + self._batch_size]
                best = (self._ccm.retriever(batch) @ embedded.T).argmax(1)
                prompts = [self._base_lm.prompts.question(question) for question in batch]
                answers += generate_after(self._base_lm, bank[best], prompts, max_new_tokens=self._max_new_tokens)
                bar.advance(len(batch))
        return answers


def compressible(base_lm: BaseLM, text: str) -> list[tuple[list[int], str]]:
    """Splits a document into parts of at most half of the LM's window; returns their token ids and texts."""
    parts = []
    for passage in passages(base_lm.prompts, text, base_lm.context_window // 2):
        covered = [span for span in passage.spans if span[1] > span[0]]
        parts.append((passage.ids.tolist(), passage.text[covered[0][0] : covered[-1][1]]))
    return parts


def trained_ccm(
    base_lm: BaseLM, dataset: QADataset, config: CCMConfig, *, seed: int = 0, folder: Path | None = None
) -> CCM:
    """Loads a trained CCM from the cache folder, or trains it; without a folder it always trains.

    Raises:
        ModelLoadError: if the cached file is damaged.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        ccm = CCM(base_lm, tokens=config.tokens, encoder=config.encoder)
    key = weights_cache.key("ccm", base_lm.model, dataset, config, seed)
    weights_cache.load_or_train(ccm, folder, key, lambda: train(ccm, base_lm, dataset, config, seed=seed))
    return ccm.eval().requires_grad_(False)


def train(ccm: CCM, base_lm: BaseLM, dataset: QADataset, config: CCMConfig, *, seed: int = 0) -> list[float]:
    """Trains compressor and retriever in place, by answers and by contrast; returns the loss of each step."""
    documents = {document.id: document.text for document in dataset.documents}
    by_document = [questions for questions in dataset.questions_by_document().values() if questions]
    rng = random.Random(seed)
    optimizer = torch.optim.Adam(ccm.parameters(), lr=config.learning_rate)
    losses = []
    with progress_bar("train CCM", config.steps) as bar:
        for _ in range(config.steps):
            drawn = rng.sample(by_document, min(config.batch_size, len(by_document)))
            batch = [rng.choice(questions) for questions in drawn]
            parts = [compressible(base_lm, documents[question.gold])[0] for question in batch]
            prompts = [base_lm.prompts.question(question.question) for question in batch]
            answers = [base_lm.prompts.answer(question.answers[0]) for question in batch]
            loss = ccm.answer_loss(base_lm, [ids for ids, _ in parts], prompts, answers)
            loss = loss + ccm.retrieval_loss([q.question for q in batch], [text for _, text in parts])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(ccm.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            bar.note(f"loss {losses[-1]:.3f}")
            bar.advance()
    return losses
