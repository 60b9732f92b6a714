"""Answers from memory alone as the bank grows: `python -m eval.bank_size --help`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from eval.harness.command import (
    BatchOption,
    DeviceOption,
    ModelOption,
    OutputOption,
    SeedOption,
    generated,
    report,
    whole_numbers,
)
from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say

if TYPE_CHECKING:
    from eval.harness.results import Row, Verdict
    from mac_rag.bank.bank import MemoryBank
    from mac_rag.bank.interface import Bank
    from mac_rag.data.types import Document, QADataset
    from mac_rag.engine import MACEngine


def main(
    context: typer.Context,
    model: ModelOption = "mac-tiny",
    sizes: Annotated[str, typer.Option(help="Documents in the bank, separated by commas.")] = "32,256,1665,5000,20000",
    questions: Annotated[int, typer.Option(min=1, help="Questions to ask at every size.")] = 1665,
    split: Annotated[str, typer.Option(help="Split of the newswire: train, val or test.")] = "test",
    seed: SeedOption = 0,
    batch_size: BatchOption = 32,
    device: DeviceOption = None,
    output: OutputOption = None,
) -> None:
    """Measure answers from memory alone against the size of the bank, on generated newswire.

    The questions are the same at every size: one about each of the first documents. A larger bank holds later documents
    as distractors. For a smaller bank the questions are split into groups, and each group is asked of a bank that holds
    the documents of this group. A model with a document prior is measured with it and without it.
    """
    from eval.harness.results import result_path

    counts = whole_numbers("--sizes", sizes)
    path = result_path(output, "bank_size")
    dataset = generated(split, max(*counts, questions), seed)
    dataset = type(dataset)(dataset.name, split, dataset.documents, dataset.questions[:questions])
    say(f"Generated newswire: {len(dataset.documents):,} documents, {questions:,} questions, split {split}")

    from eval.harness.protocol import adapt, samples
    from mac_rag.engine import MACEngine
    from mac_rag.model import AmortizedModel

    loaded = AmortizedModel.from_pretrained(model, device=device)
    engine = MACEngine(loaded)
    adaptation = adapt(engine, dataset.documents)
    rows: list[Row] = []
    verdicts: dict[str, list[Verdict]] = {}
    for count in counts:
        for without_prior in (False, True) if loaded.aggregation.prior is not None else (True,):
            setting = "without prior" if without_prior else "with prior"
            name = f"{count:,} documents, {setting}"
            say(name, err=True)
            row, verdicts[name] = measure(name, engine, dataset, count, without_prior, batch_size)
            rows.append(row.model_copy(update={"settings": {"prior": setting}}))
    report(
        path,
        experiment="bank_size",
        options=context.params,
        rows=rows,
        samples=samples(dataset.questions, verdicts),
        adaptation=adaptation,
        dataset=dataset,
        model=loaded,
    )


def measure(
    name: str, whole: MACEngine, dataset: QADataset, size: int, without_prior: bool, batch_size: int
) -> tuple[Row, list[Verdict]]:
    """Answers all questions from banks of `size` documents; returns the row, and the verdict on each answer.

    Args:
        whole: an engine that has adapted to all documents of the stream.
        dataset: the stream; its i-th question is about its i-th document.
    """
    from eval.harness.protocol import judge, summarize
    from mac_rag.engine import Answer, MACEngine
    from mac_rag.model import AmortizedModel
    from mac_rag.progress import progress_bar

    model, documents, questions = whole.model, dataset.documents, dataset.questions
    assert isinstance(model, AmortizedModel)
    answers: list[Answer] = []
    seconds = 0.0
    with progress_bar("answer", len(questions)) as bar:
        for group in groups(len(questions), len(documents), size):
            engine = MACEngine(model, part_of(whole.bank, [documents[index] for index in group]))
            began = time.perf_counter()
            with model.without_document_prior() if without_prior else nullcontext():
                while len(answers) < min(group.stop, len(questions)):
                    batch = questions[len(answers) : min(len(answers) + batch_size, group.stop)]
                    answers += engine.answer([question.question for question in batch], batch_size=batch_size)
                    bar.advance(len(batch))
            seconds += time.perf_counter() - began
    verdicts = judge(questions, answers)
    return summarize(name, questions, verdicts, size, None, seconds), verdicts


def groups(questions: int, documents: int, size: int) -> Iterator[range]:
    """Yields consecutive ranges of `size` documents that together cover the documents of all questions, in order.

    If the stream ends before the last range is full, that range starts earlier.
    """
    for first in range(0, questions, size):
        stop = min(first + size, documents)
        yield range(stop - size, stop)


def part_of(bank: Bank, documents: Sequence[Document]) -> MemoryBank:
    """Makes a bank with some documents of another bank; copies their memory tokens instead of encoding again."""
    import torch

    from mac_rag.bank.bank import MemoryBank

    part = MemoryBank(bank.fingerprint)
    rows = [bank[document.id].phi for document in documents]
    part.put(documents, torch.cat(rows), [len(phi) for phi in rows])
    return part


if __name__ == "__main__":
    run_command(main)
