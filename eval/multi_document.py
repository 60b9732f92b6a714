"""Questions that no single document answers: `python -m eval.multi_document --help`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.harness.benchmark import AnswersOption
from eval.harness.command import (
    BatchOption,
    DeviceOption,
    ModelOption,
    OutputOption,
    SeedOption,
    report,
    whole_numbers,
)
from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say

if TYPE_CHECKING:
    from eval.harness.protocol import Outcome
    from eval.harness.results import Row
    from mac_rag.data.types import QADataset


def main(
    context: typer.Context,
    model: ModelOption = "mac-tiny",
    k: Annotated[
        str, typer.Option("--k", help="Documents that BM25 puts in front; several numbers separated by commas.")
    ] = "1,3,5",
    documents: Annotated[int, typer.Option(min=1, help="Documents of the stream.")] = 300,
    questions: Annotated[int, typer.Option(min=1, help="Questions of each kind, at most.")] = 100,
    split: Annotated[str, typer.Option(help="Split of the newswire: train, val or test.")] = "test",
    seed: SeedOption = 0,
    batch_size: BatchOption = 32,
    device: DeviceOption = None,
    answers: AnswersOption = None,
    output: OutputOption = None,
) -> None:
    """Ask two-hop, comparison and counting questions about generated news, whose answers need two to four documents.

    Answers come from the LM alone, from memory, from BM25's documents, and from both. Recall is the share of questions
    all of whose documents were retrieved.
    `over_retrieval` is how far memory alone is above BM25's documents at the smallest k in exact match, with its 95 %
    interval.
    """
    from eval.harness.results import result_path

    path = result_path(output, "multi_document")
    ks = whole_numbers("--k", k)
    from mac_rag.data.newswire.generate import SPLITS
    from mac_rag.errors import ConfigError
    from pipelines.corpora.multi_document import generate_multi_document

    if split not in SPLITS:
        raise ConfigError(f"newswire has no split {split!r}; choose one of {', '.join(SPLITS)}")
    dataset = generate_multi_document(split, documents, seed=seed, questions_per_kind=questions)
    count = len(dataset.questions)
    if not count:
        raise ConfigError(f"--documents {documents} are too few for a question about several; give 30 or more")
    say(f"Generated newswire: {len(dataset.documents):,} documents, {count:,} questions, split {split}")

    from eval.harness.kept_answers import KeptAnswers, answer_source
    from eval.harness.protocol import run_protocol
    from mac_rag.engine import MACEngine
    from mac_rag.model import MACModel
    from mac_rag.retrieval import BM25Retriever

    loaded = MACModel.from_pretrained(model, device=device)
    engine = MACEngine(loaded)
    outcome = run_protocol(
        engine,
        dataset,
        {"bm25": BM25Retriever()},
        ks,
        kept=None if answers is None else KeptAnswers(answers, answer_source(loaded, dataset.documents)),
        batch_size=batch_size,
        seed=seed,
    )
    report(
        path,
        experiment="multi_document",
        options=context.params,
        rows=rows_by_kind(outcome, dataset, seed=seed),
        samples=outcome.samples,
        adaptation=outcome.adaptation,
        dataset=dataset,
        model=loaded,
    )


def rows_by_kind(outcome: Outcome, stream: QADataset, *, seed: int = 0) -> list[Row]:
    """The protocol's rows, each for the questions of each kind alone.

    Args:
        outcome: the protocol's, whose samples are all questions of the stream in their order.
        stream: the stream.
        seed: random seed of the bootstrap.

    Returns:
        Rows with the kind in front of their names, and those of all questions. Gains are over the row without memory,
        as the protocol's are; the recall of a row is the share of its questions all of whose documents were retrieved.
    """
    from eval.harness.protocol import summarize
    from eval.harness.results import Gain
    from pipelines.corpora.multi_document import KINDS

    rows: list[Row] = []
    ks = [row.k for row in outcome.rows if row.k is not None]
    fewest = next((row.name for row in outcome.rows if row.k == min(ks, default=None) and row.gain is None), None)
    for kind in (*KINDS, "all"):
        chosen = [
            (question, sample)
            for question, sample in zip(stream.questions, outcome.samples, strict=True)
            if kind == "all" or question.id.startswith(f"{kind}-")
        ]
        if not chosen:
            continue
        questions = [question for question, _ in chosen]
        without = ""
        for whole in outcome.rows:
            verdicts = [sample.rows[whole.name] for _, sample in chosen]
            row = summarize(f"{kind}: {whole.name}", questions, verdicts, len(stream.documents), whole.k, 0.0)
            gain = None
            measures: dict[str, float] = {}
            if whole.gain is None:
                without = whole.name
            else:
                gain = Gain.over(verdicts, [sample.rows[without] for _, sample in chosen], seed=seed)
                if whole.k is None and fewest is not None:
                    ahead = Gain.over(verdicts, [sample.rows[fewest] for _, sample in chosen], seed=seed).em
                    measures = {"over_retrieval": ahead.mean}
                    measures |= {"over_retrieval_low": ahead.low, "over_retrieval_high": ahead.high}
            update: dict[str, Any] = {"gain": gain, "seconds": None, "measures": measures, "settings": {"kind": kind}}
            if whole.k is not None:
                found = [verdict.retrieved for verdict in verdicts]
                update["recall_at_k"] = all_retrieved(found, [(q.gold, *q.further_ids) for q in questions])
            rows.append(row.model_copy(update=update))
    return rows


def all_retrieved(retrieved: Sequence[Sequence[str]], evidence: Sequence[Sequence[str]]) -> float:
    """Share of questions all of whose documents are among the retrieved ones."""
    found = [set(needed) <= set(ids) for ids, needed in zip(retrieved, evidence, strict=True)]
    return sum(found) / len(found)


if __name__ == "__main__":
    run_command(main)
