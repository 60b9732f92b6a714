"""CaMeLS (Hu et al., 2023): token weights meta-learned so that an LM, updated by them, answers questions.

A weighting network reads a document and gives each token a weight. The LM takes one step of gradient descent on the
weighted loss. The network's loss is the updated LM's loss on questions about the document, plus a penalty for its
change on other texts. Its gradient goes through the LM's step, with second derivatives.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from eval.baselines import weights_cache
from eval.baselines.finetuning import Passage, TokenWeighting, at_least_single, passages, weighted_loss
from mac_rag.config import BaseLMConfig, Config
from mac_rag.data.readers import read_documents
from mac_rag.data.types import QADataset
from mac_rag.errors import ConfigError
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.lora_tuning import make_trainable
from mac_rag.progress import progress_bar

Weights = dict[str, Tensor]
_INNER_WIDTH = 128
# As published.
_DOCUMENTS = 6  # that the LM is updated on, one by one, before their questions are asked
_LOCALITY = 0.1  # weight of the KL divergence on an unrelated text


class WeightingNetwork(nn.Module):
    """A proxy LM without its head, and a small head on its last hidden states. A new network weighs tokens equally."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.inner = nn.Linear(backbone.config.hidden_size, _INNER_WIDTH)
        self.outer = nn.Linear(_INNER_WIDTH, 1)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, ids: Tensor) -> Tensor:
        """Positive weights `[L]` of token ids `[L]`."""
        states = self.backbone(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        raw = self.outer(functional.gelu(self.inner(states.to(self.inner.weight.dtype))))
        return functional.softplus(raw[:, 0], beta=3)


class CamelsWeights(TokenWeighting):
    """Token weights by a trained network, for any LM with the tokenizer of its proxy LM."""

    name = "CaMeLS"

    def __init__(self, network: WeightingNetwork) -> None:
        self.network = network
        self.networks = [network]

    @torch.no_grad()
    def weights(self, passage: Passage) -> Tensor:
        weights: Tensor = self.network(passage.ids)
        return weights


@dataclass(frozen=True)
class Lesson:
    """One document to train on, `[L]`, and prompt and answer of each question about it, as token ids."""

    document: Tensor
    questions: Sequence[tuple[Sequence[int], Sequence[int]]]


def new_network(proxy: BaseLM, *, seed: int = 0) -> WeightingNetwork:
    """A network on a copy of the proxy LM, all of it trainable; the seed initializes its head."""
    backbone = copy.deepcopy(proxy.model.base_model).float().requires_grad_(True)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return WeightingNetwork(backbone).to(proxy.device)


def check_proxy(proxy: BaseLM, base_lm: BaseLM) -> None:
    """Checks that a proxy LM has the tokenizer of the LM that it stands for.

    Raises:
        ConfigError: if it has another one; names both LMs.
    """
    if proxy.tokenizer.get_vocab() != base_lm.tokenizer.get_vocab():
        names = [lm.model.config.name_or_path or lm.model.config.model_type for lm in (proxy, base_lm)]
        raise ConfigError(
            f"the proxy LM {names[0]!r} has another tokenizer than {names[1]!r}, so its token weights do not fit; "
            "take a smaller LM of the same family"
        )


def parameters(lm: nn.Module) -> Weights:
    """The detached weights of an LM that updates change, by name: its low-rank updates if it has any, else all."""
    named = {name: weight.detach() for name, weight in lm.named_parameters()}
    return {name: weight for name, weight in named.items() if "lora_" in name} or named


def inner_update(
    lm: nn.Module, theta: Weights, ids: Tensor, weights: Tensor, rate: float, padded: int | None = None
) -> Weights:
    """One step of gradient descent on the weighted loss of a document, differentiable in `theta` and `weights`.

    Args:
        lm: a causal LM; its own weights are not used.
        theta: the LM's weights before the step.
        ids: token ids of the document, `[L]`.
        weights: weights of the tokens, `[L]`.
        rate: learning rate.
        padded: see `CamelsConfig.padded`.
    """
    share = 1.0 if padded is None else (len(ids) - 1) / (padded - 1)

    def loss(theta: Weights) -> Tensor:
        return share * weighted_loss(_logits(lm, theta, ids[None])[0], ids, weights)

    with twice_differentiable():
        gradients = grad(loss)(theta)
    return {name: weight - rate * gradients[name] for name, weight in theta.items()}


def answer_loss(lm: nn.Module, theta: Weights, questions: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
    """Mean negative log-likelihood of the answers' tokens, in nats, for an LM with `theta` in place of its weights."""
    length = max(len(prompt) + len(answer) for prompt, answer in questions)
    device = next(iter(theta.values())).device
    ids = torch.zeros(len(questions), length, dtype=torch.long, device=device)
    labels = torch.full_like(ids, -100)
    # Right padding needs no mask in a causal LM: no labelled position attends to it.
    for row, label, (prompt, answer) in zip(ids, labels, questions, strict=True):
        row[: len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        label[len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    logits = _logits(lm, theta, ids)[:, :-1]
    return functional.cross_entropy(at_least_single(logits.flatten(0, 1)), labels[:, 1:].flatten(), ignore_index=-100)


def drift(lm: nn.Module, before: Weights, after: Weights, ids: Tensor) -> Tensor:
    """KL divergence of the updated LM from the LM before, a mean over the tokens `[L]` of an unrelated text."""
    with torch.no_grad():
        old = at_least_single(_logits(lm, before, ids[None])[0]).log_softmax(-1)
    new = at_least_single(_logits(lm, after, ids[None])[0]).log_softmax(-1)
    return functional.kl_div(new, old, log_target=True, reduction="batchmean")


def meta_loss(
    lm: nn.Module,
    network: WeightingNetwork,
    theta: Weights,
    lessons: Sequence[Lesson],
    unrelated: Tensor,
    *,
    rate: float,
    locality: float,
    padded: int | None = None,
) -> tuple[Tensor, Weights]:
    """The network's loss: the LM's loss on questions after updates on their documents, and a locality term.

    Args:
        theta: the LM's weights before the updates.
        lessons: at least one document with questions; the LM is updated on them one after another.
        unrelated: token ids of another text, `[L]`.
        rate: learning rate of the updates.
        locality: weight of the KL divergence on the unrelated text.
        padded: see `CamelsConfig.padded`.

    Returns:
        The loss, and the LM's weights after the updates.
    """
    after = theta
    for lesson in lessons:
        weights = network(lesson.document)
        after = inner_update(lm, after, lesson.document, weights, rate, padded)
    loss = answer_loss(lm, after, [question for lesson in lessons for question in lesson.questions])
    if locality:
        loss = loss + locality * drift(lm, theta, after, unrelated)
    return loss, after


def twice_differentiable() -> AbstractContextManager[None]:
    """Selects PyTorch's plain attention for an LM's update; the fused kernels have no second derivatives."""
    context: AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH)
    return context


def _logits(lm: nn.Module, theta: Weights, ids: Tensor) -> Tensor:
    logits: Tensor = functional_call(lm, theta, (), {"input_ids": ids, "use_cache": False}).logits
    return logits


class CamelsConfig(Config):
    """The recipe of meta-training; the defaults are the published ones.

    Attributes:
        proxy: a smaller LM with the same tokenizer that stands for the base LM; None for the base LM itself.
        steps: steps of Adam on the weighting network.
        accumulate: batches of each step.
        inner_rate: learning rate of the LM's gradient descent.
        learning_rate: learning rate of Adam.
        reset_documents: documents after which the LM returns to its own weights; full batches of 6 count.
        padded: tokens to which the published code pads a document; it takes the mean of the LM's loss over all of them.
            None for the mean over the document's own tokens.
        unrelated: file of the unrelated texts (see `mac_rag.data.readers`), published: 8,000 of OpenWebText. None for
            other training documents.
        lora_rank: rank of low-rank updates that the LM's gradient descent changes in place of all weights.
        clip: maximum gradient norm.
    """

    proxy: BaseLMConfig | None = None
    steps: int = Field(ge=1)
    accumulate: int = Field(4, ge=1)
    inner_rate: float = Field(5e-4, gt=0)
    learning_rate: float = Field(1e-5, gt=0)
    reset_documents: int = Field(24, ge=1)
    padded: int | None = Field(1024, ge=2)
    unrelated: str | None = None
    lora_rank: int | None = Field(None, ge=1)
    clip: float = Field(1e9, gt=0)


def trained_network(
    proxy: BaseLM, dataset: QADataset, config: CamelsConfig, *, seed: int = 0, folder: Path | None = None
) -> WeightingNetwork:
    """Loads a trained weighting network from the cache folder, or trains it; without a folder it always trains.

    Raises:
        ModelLoadError: if the cached file is damaged.
    """
    network = new_network(proxy, seed=seed)
    key = weights_cache.key("camels", proxy.model, dataset, config, seed)
    weights_cache.load_or_train(network, folder, key, lambda: meta_train(network, proxy, dataset, config, seed=seed))
    return network.eval().requires_grad_(False)


def meta_train(
    network: WeightingNetwork, lm: BaseLM, dataset: QADataset, config: CamelsConfig, *, seed: int = 0
) -> list[float]:
    """Trains a weighting network in place; returns the loss of each step."""
    lessons = _lessons(lm, dataset)
    unrelated = [] if config.unrelated is None else [d.text for d in read_documents([Path(config.unrelated)])]
    updated = lm.model
    if config.lora_rank is not None:
        updated = copy.deepcopy(lm.model)
        make_trainable(updated, config.lora_rank, merging=False)
    rng = random.Random(seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=config.learning_rate)
    start = parameters(updated)
    theta, batches = start, 0
    losses = []
    with progress_bar("meta-train CaMeLS", config.steps) as bar:
        for _ in range(config.steps):
            optimizer.zero_grad()
            total = 0.0
            for _ in range(config.accumulate):
                *batch, other = rng.sample(lessons, _DOCUMENTS + 1)
                text = _passage(lm, rng.choice(unrelated)) if unrelated else other.document
                loss, after = meta_loss(
                    updated, network, theta, batch, text,
                    rate=config.inner_rate, locality=_LOCALITY, padded=config.padded,
                )  # fmt: skip
                (loss / config.accumulate).backward()
                total += loss.item() / config.accumulate
                batches += 1
                theta = {name: weight.detach() for name, weight in after.items()}
                if batches * _DOCUMENTS % config.reset_documents < _DOCUMENTS:
                    theta = start
            torch.nn.utils.clip_grad_norm_(network.parameters(), config.clip)
            optimizer.step()
            losses.append(total)
            bar.note(f"loss {total:.3f}")
            bar.advance()
    return losses


def _lessons(lm: BaseLM, dataset: QADataset) -> Sequence[Lesson]:
    """A lesson for each question; a document longer than the LM's window is cut to one passage."""
    questions = dataset.questions_by_document()
    lessons = []
    for document in dataset.documents:
        ids = _passage(lm, document.text)
        for question in questions[document.id]:
            exchange = lm.prompts.prompt(question.question), lm.prompts.answer(question.answers[0])
            lessons.append(Lesson(ids, [exchange]))
    return lessons


def _passage(lm: BaseLM, text: str) -> Tensor:
    """The beginning of a text that fits into the LM's window, as ids `[L]`."""
    return next(passages(lm.prompts, text, lm.context_window, lm.device)).ids
