"""Are the sources that a right answer names the right ones? `python -m eval.sources --help`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from eval.harness.benchmark import BenchmarkModel, OneKOption, QuestionsOption, SplitOption, model_for
from eval.harness.command import NEWSWIRE_DOCUMENTS, BatchOption, DeviceOption, OutputOption, SeedOption, report
from eval.harness.streams import DataOption, open_stream
from mac_rag.cli.run import run_command

if TYPE_CHECKING:
    from eval.harness.results import Quote, Row, Verdict
    from mac_rag.data.types import Answer, QADataset, Source
    from mac_rag.engine import MACEngine

_RANKED = 10  # sources; more than a reader reads, so that the one with most attention is among them
_QUOTED = 10  # quotes of each way to answer in the result


def main(
    context: typer.Context,
    model: BenchmarkModel = None,
    data: DataOption = None,
    split: SplitOption = "test",
    documents: Annotated[
        int, typer.Option(min=2, help="Documents of the stream, from its beginning.")
    ] = NEWSWIRE_DOCUMENTS,
    questions: QuestionsOption = None,
    retriever: Annotated[
        str, typer.Option(help="Also answer after the documents of this retriever, with memory.")
    ] = "bm25",
    k: OneKOption = 5,
    seed: SeedOption = 0,
    batch_size: BatchOption = 32,
    device: DeviceOption = None,
    output: OutputOption = None,
) -> None:
    """Measure whether the first source of a right answer is the document that the question is about.

    The bank keeps texts. An answer is right if its F1 is at least 0.5; other answers are left out. `right_document` is
    the share of right answers whose first source is the question's document, and `holds_answer` that of those whose
    first source holds the answer, in whatever document. Controls are the document with most attention, which is the
    first source in a bank without texts; the retriever's first; and any document that holds the answer, drawn by
    chance. `elsewhere` is the share of right answers that other documents of the bank hold as well.
    """
    from eval.harness.protocol import judge, samples
    from eval.harness.results import result_path
    from mac_rag.bank import MemoryBank
    from mac_rag.engine import MACEngine
    from mac_rag.model import MACModel
    from mac_rag.retrieval.registry import make_retriever

    path = result_path(output, "sources")
    dataset, source = open_stream(data, split, documents, questions, seed=seed, scale="tiny")
    dataset.questions_by_document()  # raises, before any work, if one names no document
    chosen = model_for(model, data)
    loaded = MACModel.from_pretrained(chosen, device=device)
    bank = MemoryBank(loaded.fingerprint, keep_texts=True)
    engine = MACEngine(loaded, bank, make_retriever(retriever), k=k)
    engine.adapt(dataset.documents, progress=True)
    rows: list[Row] = []
    quotes: list[Quote] = []
    verdicts: dict[str, list[Verdict]] = {}
    for use_retriever in (False, True) if engine.retriever is not None else (False,):
        name = f"{retriever} top-{k} + MAC" if use_retriever else "MAC"
        began = time.perf_counter()
        answers = engine.answer(
            [question.question for question in dataset.questions],
            use_retriever=use_retriever,
            overflow="truncate",
            batch_size=batch_size,
            progress=True,
        )
        seconds = time.perf_counter() - began
        verdicts[name] = judge(dataset.questions, answers)
        own, quoted = _rows(name, engine, dataset, answers, verdicts[name], k if use_retriever else None, seconds)
        rows += own
        quotes += quoted
    report(
        path,
        experiment="sources",
        options={**context.params, "model": chosen},
        rows=rows,
        samples=samples(dataset.questions, verdicts),
        dataset=dataset,
        source=source,
        model=loaded,
        quotes=quotes,
    )


@dataclass(frozen=True)
class Named:
    """Candidates for the source of one right answer, by document id; `holders` are all that hold the answer."""

    gold: str
    holders: frozenset[str]
    first: str
    most_attended: str
    retrieved: str | None


def _rows(
    name: str,
    engine: MACEngine,
    dataset: QADataset,
    answers: Sequence[Answer],
    verdicts: Sequence[Verdict],
    k: int | None,
    seconds: float,
) -> tuple[list[Row], list[Quote]]:
    """The rows of the engine's sources and of their controls, and some quotes."""
    from eval.harness.protocol import summarize
    from eval.harness.results import Quote
    from mac_rag.data.metrics import normalize
    from mac_rag.lm.prompt import FittedPrompt
    from mac_rag.progress import progress_bar
    from mac_rag.retrieval.base import Hit
    from mac_rag.sources import texts_read
    from pipelines.tasks.calibrate import RIGHT

    texts = {document.id: document.text for document in dataset.documents}
    normalized = {document_id: f" {normalize(text)} " for document_id, text in texts.items()}
    right = [
        (question, answer)
        for question, answer, verdict in zip(dataset.questions, answers, verdicts, strict=True)
        if verdict.f1 >= RIGHT
    ]
    named, quotes = [], []
    with progress_bar("sources", len(right)) as bar:
        for question, answer in right:
            hits = [Hit(one, texts[one], 0.0) for one in answer.document_ids]
            read = texts_read(hits, FittedPrompt(question.question, (), answer.contexts))
            sources = engine.sources(question.question, answer.text, most=_RANKED, texts=read)
            words = f" {normalize(answer.text)} "
            holders = frozenset(document_id for document_id, text in normalized.items() if words in text)
            named.append(named_of(question.gold, holders, sources, answer.document_ids))
            first, sentence = sources[0].document_id, sources[0].sentence
            if sentence is not None:
                quote = Quote(question=question.question, answer=answer.text, document_id=first, sentence=sentence)
                quotes.append((first == question.gold, quote))
            bar.advance(1)
    quotes.sort(key=lambda one: one[0])  # those of another document first
    row = summarize(name, dataset.questions, verdicts, len(texts), k, seconds)
    return [
        row.model_copy(update={"truncated": None, "measures": {"right": len(right) / len(answers)}}),
        *control_rows(name, named),
    ], [quote for _, quote in quotes[:_QUOTED]]


def named_of(gold: str, holders: frozenset[str], sources: Sequence[Source], retrieved: Sequence[str]) -> Named:
    """The candidates of one right answer, from its sources and the retriever's documents."""
    most = max(sources, key=lambda source: source.share or 0.0)
    return Named(gold, holders, sources[0].document_id, most.document_id, retrieved[0] if retrieved else None)


def control_rows(name: str, named: Sequence[Named]) -> list[Row]:
    """The row of first sources, and those of what could take their place."""
    from eval.harness.results import Row

    if not named:
        return []
    count = len(named)

    def row(what: str, chosen: Sequence[str], **more: float) -> Row:
        right = sum(document_id == one.gold for document_id, one in zip(chosen, named, strict=True)) / count
        holds = sum(document_id in one.holders for document_id, one in zip(chosen, named, strict=True)) / count
        measures = {"right_document": right, "holds_answer": holds, **more}
        return Row(name=f"{name}: {what}", questions=count, measures=measures)

    elsewhere = sum(bool(one.holders - {one.gold}) for one in named) / count
    by_chance = sum((one.gold in one.holders) / len(one.holders) for one in named if one.holders) / count
    rows = [
        row("first source", [one.first for one in named], elsewhere=elsewhere),
        row("most attention", [one.most_attended for one in named]),
    ]
    by_retriever = [one.retrieved for one in named if one.retrieved is not None]
    if len(by_retriever) == count:
        rows.append(row("the retriever's first", by_retriever))
    holds_any = sum(bool(one.holders) for one in named) / count
    rows.append(
        Row(
            name=f"{name}: any that holds the answer",
            questions=count,
            measures={"right_document": by_chance, "holds_answer": holds_any},
        )
    )
    return rows


if __name__ == "__main__":
    run_command(main)
