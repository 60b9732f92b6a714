"""Does a model know when its memory does not hold the answer? `python -m eval.unanswerable --help`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from eval.harness.benchmark import BenchmarkModel, OneKOption, SplitOption, model_for
from eval.harness.command import BatchOption, DeviceOption, OutputOption, SeedOption, report
from eval.harness.streams import DataOption, open_stream
from mac_rag.cli.run import run_command

COVERAGES = (0.2, 0.4, 0.6, 0.8, 1.0)  # points of the risk-coverage curve


def main(
    context: typer.Context,
    model: BenchmarkModel = None,
    data: DataOption = None,
    split: SplitOption = "test",
    documents: Annotated[int, typer.Option(min=2, help="Documents of the stream, from its beginning.")] = 1000,
    questions: Annotated[int, typer.Option(min=2, help="Questions, half of them without their answers.")] = 400,
    retriever: Annotated[
        str, typer.Option(help="Answer after the documents of this retriever instead of from memory alone.")
    ] = "none",
    k: OneKOption = 5,
    seed: SeedOption = 0,
    batch_size: BatchOption = 32,
    device: DeviceOption = None,
    output: OutputOption = None,
) -> None:
    """Measure confidence if the answers to half of the questions are taken out of memory.

    For every second question the bank lacks its document and every other that holds one of its answers. `auroc` tells
    how well confidence orders right answers before wrong ones, `auroc_answerable` questions with an answer in memory
    before those without. `ece` is the expected calibration error, `risk_at_...` the share of wrong answers among the
    most confident ones, and `half_gain` the precision of the more confident half over that of all. An answer is right
    if its F1 is at least 0.5. Further rows compare single kinds of evidence, which are not calibrated.

    Take another split than the one that the calibration was fitted on.
    """
    from eval.harness.protocol import judge, samples, summarize
    from eval.harness.results import Row, result_path
    from mac_rag.asking import calibration_of
    from mac_rag.engine import Answer, MACEngine
    from mac_rag.model import MACModel
    from mac_rag.model.calibration import EVIDENCE
    from mac_rag.retrieval.registry import make_retriever
    from pipelines.tasks.calibrate import guesses

    path = result_path(output, "unanswerable")
    dataset, source = open_stream(data, split, documents, seed=seed, scale="tiny")
    chosen = model_for(model, data)
    loaded = MACModel.from_pretrained(chosen, device=device)
    logistic = calibration_of(loaded, "memory" if retriever == "none" else "documents")
    engine = MACEngine(loaded, retriever=make_retriever(retriever), k=k)
    began = time.perf_counter()
    found, evidence, mode = guesses(engine, dataset, questions, seed=seed, batch_size=batch_size)
    seconds = time.perf_counter() - began
    right, answerable = [guess.right for guess in found], [guess.answerable for guess in found]
    asked = [guess.question for guess in found]
    verdicts = judge(asked, [Answer(guess.text, (), (), False) for guess in found])
    confidence = logistic.probability(evidence).tolist()
    row = summarize(f"{mode}: confidence", asked, verdicts, len(dataset.documents), None, seconds)
    of_confidence = {
        "k": None if retriever == "none" else k,
        "measures": measures(confidence, right, answerable),
        "truncated": None,
    }
    rows = [row.model_copy(update=of_confidence)]
    rows += [
        Row(
            name=f"{mode}: {kind} alone",
            questions=len(found),
            measures={"auroc": auroc(column, right), "auroc_answerable": auroc(column, answerable)},
        )
        for kind, column in zip(EVIDENCE, evidence.T.tolist(), strict=True)
        if len(set(column)) > 1
    ]
    report(
        path,
        experiment="unanswerable",
        options={**context.params, "model": chosen},
        rows=rows,
        samples=samples(asked, {rows[0].name: verdicts}),
        dataset=dataset,
        source=source,
        model=loaded,
        notes=[
            f"The calibration was fitted on {logistic.questions} questions: {logistic.data}.",
            f"{sum(answerable)} of {len(found)} questions have their answers in memory.",
        ],
    )


def measures(confidence: Sequence[float], right: Sequence[bool], answerable: Sequence[bool]) -> dict[str, float]:
    """The figures of one kind of confidence, by the names in the command's help."""
    figures = {
        "auroc": auroc(confidence, right),
        "auroc_answerable": auroc(confidence, answerable),
        "ece": expected_calibration_error(confidence, right),
    }
    precision = sum(right) / len(right)
    if precision:
        figures["half_gain"] = (1 - risk_at_coverage(confidence, right, 0.5)) / precision
    return figures | {
        f"risk_at_{round(100 * coverage)}": risk_at_coverage(confidence, right, coverage) for coverage in COVERAGES
    }


def auroc(scores: Sequence[float], positive: Sequence[bool]) -> float:
    """Estimates the probability that a positive example scores above a negative one; a tie counts half.

    NaN without one of both kinds.

    Examples:
        >>> auroc([0.9, 0.8, 0.8, 0.1], [True, True, False, False])
        0.875
    """
    import numpy as np

    values, labels = np.asarray(scores, dtype=np.float64), np.asarray(positive, dtype=bool)
    ours, theirs = np.sort(values[labels]), np.sort(values[~labels])
    if not len(ours) or not len(theirs):
        return float("nan")
    below = np.searchsorted(theirs, ours, side="left").sum()
    ties = np.searchsorted(theirs, ours, side="right").sum() - below
    return float((below + ties / 2) / (len(ours) * len(theirs)))


def expected_calibration_error(scores: Sequence[float], right: Sequence[bool]) -> float:
    """Mean distance between confidence and the share of right answers, over ten equal bins (Naeini et al., 2015).

    Examples:
        >>> expected_calibration_error([0.75, 0.75, 0.75, 0.75, 0.25], [True, True, True, False, False])
        0.05
    """
    import numpy as np

    values, labels = np.asarray(scores, dtype=np.float64), np.asarray(right, dtype=np.float64)
    place = np.minimum((10 * values).astype(int), 9)
    gaps = [abs((values - labels)[place == number].sum()) for number in range(10)]
    return float(sum(gaps) / len(values))


def risk_at_coverage(scores: Sequence[float], right: Sequence[bool], coverage: float) -> float:
    """Share of wrong answers among the most confident ones: the risk-coverage curve (El-Yaniv and Wiener, 2010).

    At least one answer counts; where confidence is equal, answers count in equal parts.

    Examples:
        >>> risk_at_coverage([0.9, 0.8, 0.3, 0.2], [True, False, True, False], 0.5)
        0.5
    """
    import numpy as np

    values, labels = np.asarray(scores, dtype=np.float64), np.asarray(right, dtype=np.float64)
    count = max(1, round(coverage * len(values)))
    least = np.sort(values)[-count]
    above, equal = values > least, values == least
    wrong = (1 - labels[above]).sum() + (1 - labels[equal]).mean() * (count - above.sum())
    return float(wrong / count)


if __name__ == "__main__":
    run_command(main)
