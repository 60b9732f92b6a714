"""Meta-training of the weighting network of CaMeLS, once for each LM and recipe."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import Field

from eval.baselines import weights_cache
from eval.baselines.camels import Lesson, WeightingNetwork, meta_loss, new_network, parameters, twice_differentiable
from eval.baselines.weighting import passages
from mac_rag.config import BaseLMConfig, Config
from mac_rag.progress import progress_bar

if TYPE_CHECKING:
    from mac_rag.data.types import QADataset
    from mac_rag.lm.base_lm import BaseLM


# As published.
_DOCUMENTS = 6  # that the LM is updated on, one by one, before their questions are asked
_LOCALITY = 0.1  # weight of the KL divergence on an unrelated text


class CamelsConfig(Config):
    """The recipe of meta-training; the defaults are the published ones.

    Attributes:
        proxy: a smaller LM with the same tokenizer that stands for the base LM; None for the base LM itself.
        steps: steps of Adam on the weighting network.
        accumulate: batches in each step of Adam.
        inner_rate: learning rate of the LM's gradient descent.
        learning_rate: learning rate of Adam.
        reset_every: batches after which the LM returns to its own weights.
        clip: maximum gradient norm.
    """

    proxy: BaseLMConfig | None = None
    steps: int = Field(ge=1)
    accumulate: int = Field(4, ge=1)
    inner_rate: float = Field(5e-4, gt=0)
    learning_rate: float = Field(1e-5, gt=0)
    reset_every: int = Field(24, ge=1)
    clip: float = Field(1e5, gt=0)


def trained_network(
    proxy: BaseLM, dataset: QADataset, config: CamelsConfig, *, seed: int = 0, folder: Path | None = None
) -> WeightingNetwork:
    """A trained weighting network, from the cache or trained now.

    Args:
        proxy: the LM that meta-training updates, and that the network is initialized from.
        dataset: training documents with their questions.
        config: recipe of the training.
        seed: random seed of the network's head and of the order of documents.
        folder: the cache; None for no cache.

    Raises:
        ModelLoadError: if the cached file is damaged.
    """
    network = new_network(proxy, seed=seed)
    key = weights_cache.key("camels", proxy.model, dataset, config, seed)
    if not weights_cache.load(network, folder, key):
        meta_train(network, proxy, dataset, config, seed=seed)
        weights_cache.save(network, folder, key)
    return network.eval().requires_grad_(False)


def meta_train(
    network: WeightingNetwork, lm: BaseLM, dataset: QADataset, config: CamelsConfig, *, seed: int = 0
) -> list[float]:
    """Trains a weighting network in place; returns the loss of each step."""
    lessons = _lessons(lm, dataset)
    rng = random.Random(seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=config.learning_rate)
    start = parameters(lm.model)
    theta, batches = start, 0
    losses = []
    with twice_differentiable(), progress_bar("meta-train CaMeLS", config.steps) as bar:
        for _ in range(config.steps):
            optimizer.zero_grad()
            total = 0.0
            for _ in range(config.accumulate):
                *batch, other = rng.sample(lessons, _DOCUMENTS + 1)
                loss, after = meta_loss(
                    lm.model, network, theta, batch, other.document,
                    rate=config.inner_rate, locality=_LOCALITY,
                )  # fmt: skip
                (loss / config.accumulate).backward()
                total += loss.item() / config.accumulate
                batches += 1
                theta = {name: weight.detach() for name, weight in after.items()}
                if batches % config.reset_every == 0:
                    theta = start
            torch.nn.utils.clip_grad_norm_(network.parameters(), config.clip)
            optimizer.step()
            losses.append(total)
            bar.note(f"loss {total:.3f}")
            bar.advance()
    return losses


def _lessons(lm: BaseLM, dataset: QADataset) -> Sequence[Lesson]:
    """The documents with questions; a document longer than the LM's window is cut to its first passage."""
    questions = dataset.questions_by_document()
    return [
        Lesson(
            next(passages(lm.prompts, document.text, lm.context_window, lm.device)).ids,
            [(lm.prompts.prompt(q.question), lm.prompts.answer(q.answers[0])) for q in questions[document.id]],
        )
        for document in dataset.documents
        if questions[document.id]
    ]
