"""The last block's cross-attention over six documents (figure 6): `python -m eval.cross_attention --help`."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import typer

from eval.harness.command import DeviceOption, OutputOption, ScaleOption, SeedOption, report
from eval.harness.scales import SCALES
from eval.harness.streams import DataOption, DocumentsOption, ModelByScale, QuestionsOption, open_stream
from mac_rag.cli.run import run_command

if TYPE_CHECKING:
    from torch import Tensor

    from eval.harness.results import Row
    from mac_rag.data.types import Document, QADataset, Question
    from mac_rag.model import AmortizedModel
    from mac_rag.nn.attention import Chunk

KINDS = ("bm25", "random")  # of distractors
DISTRACTORS = 5  # documents beside the gold document, which holds the answer


def main(
    context: typer.Context,
    model: ModelByScale = None,
    data: DataOption = None,
    scale: ScaleOption = "tiny",
    documents: DocumentsOption = None,
    questions: QuestionsOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = None,
    output: OutputOption = None,
) -> None:
    """Map the last block's cross-attention over the gold document and five distractors, by BM25 or at random.

    Each kind of distractors has a row with the attention mass on the gold document, and a map with one row for each
    memory token of each document: its attention, a mean over questions, question tokens and heads. A model with a
    document prior is measured without the prior, too.
    """
    from eval.harness.results import result_path

    path = result_path(output, "cross_attention")
    setup = SCALES[scale]["cross_attention"].override(model=model, documents=documents, questions=questions)
    dataset, source = open_stream(data, "test", setup.documents, setup.questions, seed=seed, scale=scale)
    from mac_rag.errors import ConfigError
    from mac_rag.model import AmortizedModel

    if len(dataset.documents) <= DISTRACTORS:
        raise ConfigError(f"the map has {DISTRACTORS + 1} documents, but the stream has only {len(dataset.documents)}")
    loaded = AmortizedModel.from_pretrained(setup.model, device=device)
    rows, cells = [], []
    for kind in KINDS:
        beside = distracting(dataset, kind, DISTRACTORS, seed)
        maps = attention_map(loaded, dataset, beside)
        rows.append(summary(f"{kind} distractors", kind, maps))
        cells += map_rows(kind, maps)
        if loaded.aggregation.prior is not None:
            with loaded.without_document_prior():
                plain = attention_map(loaded, dataset, beside)
            rows.append(summary(f"{kind} distractors, without the prior", kind, plain))
    report(
        path,
        experiment="cross_attention",
        options=setup.options(context.params),
        rows=[*rows, *cells],
        table=rows,
        dataset=dataset,
        source=source,
        model=loaded,
    )


def distracting(dataset: QADataset, kind: str, count: int, seed: int) -> list[list[Document]]:
    """Draws `count` distractors for each question: documents other than its gold document.

    Kind `bm25` takes the documents that BM25 ranks first, filled up with random ones if it finds fewer; `random` takes
    random ones.
    """
    from mac_rag.retrieval.bm25 import BM25Retriever

    rng = random.Random(seed)
    by_id = {document.id: document for document in dataset.documents}
    ranked: list[list[str]] = [[] for _ in dataset.questions]
    if kind == "bm25":
        retriever = BM25Retriever()
        retriever.add(dataset.documents)
        hits = retriever.retrieve([question.question for question in dataset.questions], count + 1)
        ranked = [[hit.document_id for hit in row] for row in hits]

    def beside(question: Question, ids: Sequence[str]) -> list[Document]:
        best = [i for i in ids if i != question.document_id][:count]
        others = [i for i in by_id if i != question.document_id and i not in best]
        return [by_id[i] for i in [*best, *rng.sample(others, count - len(best))]]

    return [beside(question, ids) for question, ids in zip(dataset.questions, ranked, strict=True)]


def attention_map(model: AmortizedModel, dataset: QADataset, distractors: Sequence[Sequence[Document]]) -> Tensor:
    """The last block's attention `[N, T, documents, T]` of N questions over gold documents and distractors.

    The attention is a mean over heads and sums to 1 for each question token. Of a document in several chunks only the
    first one counts.
    """
    import torch

    gold = {document.id: document for document in dataset.documents}
    maps = []
    with torch.no_grad():
        for question, others in zip(dataset.questions, distractors, strict=True):
            texts = [document.text for document in (gold[question.gold], *others)]
            phi = model.amortize([model.amortization.split(text)[0] for text in texts])
            encoded = model.input_encoder([model.input_encoder.ids(question.question)])
            recorder = _Recorder()
            model.aggregation(encoded, model.project(phi), attention=recorder)
            maps.append(recorder.weights.mean(1)[0].cpu())
    return torch.stack(maps)


class _Recorder:
    """Direct attention that keeps the weights `[B, H, S, K, T]` of the last block."""

    weights: Tensor

    def __call__(
        self, query: Tensor, chunks: Iterable[Chunk], *, floor: Tensor | None = None, mass: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Implements `mac_rag.nn.attention.BankAttention` for rows that all questions share."""
        import torch

        del floor  # the map shows the rows below it, too
        parts = list(chunks)
        keys, values = (torch.cat([getattr(part, name) for part in parts], 1) for name in ("keys", "values"))
        logits = torch.einsum("bhsd,hktd->bhskt", query, keys)
        if all(part.bias is not None for part in parts):
            bias = torch.cat([part.bias for part in parts if part.bias is not None], 2)
            logits = logits + bias[:, :, None, :, None]
        self.weights = logits.flatten(3).softmax(-1).view_as(logits)
        return torch.einsum("bhskt,hktd->bhsd", self.weights, values), None


def summary(name: str, kind: str, maps: Tensor) -> Row:
    """A row with the mean attention mass on the gold document and on the strongest distractor.

    Args:
        kind: kind of the distractors.
        maps: attention `[N, T, documents, T]`, the gold document first.
    """
    from eval.harness.results import Row

    masses = maps.sum(-1).mean(1)  # [N, documents]
    return Row(
        name=name,
        settings={"distractors": kind},
        measures={
            "gold_mass": float(masses[:, 0].mean()),
            "largest_distractor_mass": float(masses[:, 1:].max(1).values.mean()),
            "gold_first": float((masses.argmax(1) == 0).float().mean()),
        },
        documents=maps.shape[2],
        questions=len(maps),
    )


def map_rows(kind: str, maps: Tensor) -> list[Row]:
    """A row of the mean map for each memory token of each document; their masses sum to 1."""
    from eval.harness.results import Row

    return [
        Row(
            name=f"{kind}, {document}, token {token}",
            settings={"distractors": kind, "document": document, "token": token},
            measures={"mass": float(mass)},
        )
        for number, row in enumerate(maps.mean((0, 1)))
        for document in [f"distractor {number}" if number else "gold"]
        for token, mass in enumerate(row, 1)
    ]


if __name__ == "__main__":
    run_command(main)
