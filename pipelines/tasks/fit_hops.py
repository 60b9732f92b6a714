"""Fitting the hops of a trained MAC model and the projections of its document prior. Its other weights stay.

A start for joint training: what a slot reads when it finds its document is known before, so that a step costs next to
nothing, where a step of joint training aggregates all banks anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from mac_rag.atomic_files import write_folder
from mac_rag.config import Config, Dtype
from mac_rag.data.types import QADataset
from mac_rag.errors import ConfigError
from mac_rag.lm.devices import STORED_DTYPES
from mac_rag.model import BATCH_TOKENS, MACModel
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.progress import progress_bar
from pipelines.corpora.long_documents import within_limits
from pipelines.corpora.qa_data import linked_streams
from pipelines.objective import contrastive_of_slots
from pipelines.tasks.extended_model import with_aggregation
from pipelines.tasks.fitting import fitted


class FitHopsConfig(Config):
    """A stage that fits the hops (`mac_rag.nn.hops`) on newswire whose questions need several documents.

    Attributes:
        start_from: a MAC checkpoint with a document prior, name or folder.
        slots: S, slots that follow one another.
        documents: number of documents to generate, in streams of 300.
        seed: random seed of the documents and of the batches.
        steps: steps of Adam.
        batch_size: questions of a step; all are about one stream.
        learning_rate: rate of the first step; it falls to 0 linearly.
        store_dtype: dtype of the weights in the checkpoint; see `mac_rag.lm.int8_storage` for int8.
    """

    start_from: str
    slots: int = Field(2, ge=2)
    documents: int = Field(90_000, ge=1)
    seed: int = 0
    steps: int = Field(2000, ge=1)
    batch_size: int = Field(96, ge=1)
    learning_rate: float = Field(1e-3, gt=0)
    store_dtype: Dtype | Literal["int8"] = "fp32"


def write_fitted_hops(config: FitHopsConfig, output: Path) -> None:
    """Writes the model with its hops to `output/last`.

    Raises:
        ConfigError: for a model without a document prior, and as `fit_hops`.
    """
    torch.manual_seed(config.seed)
    start = MACModel.from_pretrained(config.start_from)
    model = with_aggregation(start, {"slots": config.slots, "hops": True}).eval()
    fit_hops(
        model,
        [within_limits(stream, model) for stream in linked_streams(config.documents, seed=config.seed)],
        steps=config.steps,
        batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        seed=config.seed,
    )
    with write_folder(output / "last") as new:
        model.save_pretrained(new, dtype=STORED_DTYPES[config.store_dtype])


def fit_hops(
    model: MACModel,
    streams: list[QADataset],
    *,
    steps: int = 2000,
    batch_size: int = 96,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> float:
    """Fits the hops in place: each slot shall rank a document first that its question still needs.

    Args:
        model: a model with hops.
        streams: documents, and questions that need several of them.
        steps, batch_size, learning_rate, seed: see `FitHopsConfig`.

    Returns:
        The mean loss of the last tenth of the steps.

    Raises:
        ConfigError: for a model without hops, and for streams without questions.
    """
    network, prior = model.aggregation, model.aggregation.prior
    if network.hops is None or prior is None:
        raise ConfigError("this model has no hops; give it several slots and hops")
    read: list[_Read] = []
    with progress_bar("read", len(streams)) as bar:
        for stream in streams:
            if stream.questions:
                read.append(_read(model, stream))
            bar.advance(1)
    if not read:
        raise ConfigError("no stream has a question that needs several documents; generate more documents")
    parameters = [prior.query.weight, prior.key.weight, *network.hops.parameters()]
    with progress_bar("fit", steps) as bar:

        def batch_loss(generator: torch.Generator) -> Tensor:
            bar.advance(1)
            one = read[int(torch.randint(len(read), (), generator=generator))]
            chosen = torch.randperm(len(one.needed), generator=generator)[:batch_size]
            return contrastive_of_slots(*_ranked(model, one, chosen))

        return fitted(parameters, batch_loss, steps=steps, learning_rate=learning_rate, seed=seed, clip=1.0)


class _Read(NamedTuple):
    """A stream as a model reads it.

    Attributes:
        documents: K documents.
        questions: B questions.
        needed: `[B, K]`, which documents each question needs.
        first: `[B, S - 1, T, D]`, what slots read that find the documents that a question needs, in their order.
    """

    documents: MemoryTokens
    questions: MemoryTokens
    needed: Tensor
    first: Tensor


@torch.no_grad()
def _read(model: MACModel, stream: QADataset) -> _Read:
    network = model.aggregation
    assert network.slots is not None
    place = {document.id: number for number, document in enumerate(stream.documents)}
    texts, asked = [one.text for one in stream.documents], [one.question for one in stream.questions]
    documents, questions = (
        encoder.encode([encoder.ids(text) for text in part], BATCH_TOKENS)
        for encoder, part in ((model.amortization, texts), (model.input_encoder, asked))
    )
    needed = torch.zeros(len(stream.questions), len(place), dtype=torch.bool, device=model.device)
    found = []
    for number, question in enumerate(stream.questions):
        names = [*question.further_ids, question.gold]  # of two hops the second one holds the answer
        needed[number, [place[name] for name in names]] = True
        found.append([place[names[min(slot, len(names) - 1)]] for slot in range(network.slots.count - 1)])
    index = torch.tensor(found, device=model.device)
    view = network.project(documents)
    first = [
        network.read_alone(questions, view.select(rows[:, None]), slot) for slot, rows in enumerate(index.unbind(1))
    ]
    return _Read(documents, questions, needed, torch.stack(first, 1))


def _ranked(model: MACModel, stream: _Read, chosen: Tensor) -> tuple[list[Tensor], Tensor]:
    """The prior's scores of each slot for some questions of a stream, and which documents these need."""
    prior, network = model.aggregation.prior, model.aggregation
    assert prior is not None
    questions, keys = stream.questions[chosen], prior.keys(stream.documents)
    queries = network.following_queries(questions, stream.first[chosen])
    return [prior.score(query, keys) for query in queries], stream.needed[chosen]
