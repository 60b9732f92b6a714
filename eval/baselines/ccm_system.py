"""CCM as a system: trained once for each LM and recipe; it compresses documents and retrieves one for a question."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor

from eval.baselines import weights_cache
from eval.baselines.ccm import CCM, Compressed, generate_behind
from eval.baselines.weighting import passages
from eval.harness.systems import System
from mac_rag.config import Config, EncoderConfig
from mac_rag.errors import BankError
from mac_rag.progress import progress_bar

if TYPE_CHECKING:
    from mac_rag.data.types import Document, QADataset
    from mac_rag.lm.base_lm import BaseLM


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
    """The LM behind the compressed document that the retriever ranks first.

    Args:
        base_lm: the frozen LM.
        ccm: compressor and retriever, trained for this LM.
        max_new_tokens: limit of an answer's tokens.
        batch_size: questions of one generation.
    """

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
                self.tokens_fed += sum(map(len, prompts))
                answers += generate_behind(self._base_lm, bank[best], prompts, max_new_tokens=self._max_new_tokens)
                bar.advance(len(batch))
        return answers


def compressible(base_lm: BaseLM, text: str) -> list[tuple[list[int], str]]:
    """The parts of a document that each fill at most half of the LM's window: their token ids and their text."""
    parts = []
    for passage in passages(base_lm.prompts, text, base_lm.context_window // 2):
        covered = [span for span in passage.spans if span[1] > span[0]]
        parts.append((passage.ids.tolist(), passage.text[covered[0][0] : covered[-1][1]]))
    return parts


def trained_ccm(
    base_lm: BaseLM, dataset: QADataset, config: CCMConfig, *, seed: int = 0, folder: Path | None = None
) -> CCM:
    """A trained CCM, from the cache or trained now.

    Args:
        base_lm: the frozen LM.
        dataset: training documents with their questions.
        config: recipe of the training.
        seed: random seed of initial weights and of the batches.
        folder: the cache; None for no cache.

    Raises:
        ModelLoadError: if the cached file is damaged.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        ccm = CCM(base_lm, tokens=config.tokens, encoder=config.encoder)
    key = weights_cache.key("ccm", base_lm.model, dataset, config, seed)
    if not weights_cache.load(ccm, folder, key):
        train(ccm, base_lm, dataset, config, seed=seed)
        weights_cache.save(ccm, folder, key)
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
