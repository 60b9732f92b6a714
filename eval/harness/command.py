"""Options of the evaluation commands, and the report of a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.harness.scales import Protocol, Scale
from mac_rag.cli.terminal import say

if TYPE_CHECKING:
    from eval.harness.results import Adaptation, Quote, Row, Sample
    from mac_rag.data.types import QADataset
    from mac_rag.model import MACModel

NEWSWIRE_DOCUMENTS = 1665  # the paper's stream
MODEL_HELP = "A MAC model: a shipped one, a folder, or a repository on the Hub."
ModelOption = Annotated[str, typer.Option(help=MODEL_HELP)]
SeedOption = Annotated[
    int, typer.Option(help="Random seed of the generated stream and of the questions that --questions draws.")
]
OutputOption = Annotated[
    Path | None, typer.Option(help="The result file.", show_default="results/<experiment>-<time>.json")
]
ScaleOption = Annotated[
    Scale,
    typer.Option(help="Sizes and models: tiny runs on any machine in minutes, paper is the paper's and needs --data."),
]
ProtocolOption = Annotated[
    Protocol,
    typer.Option(
        help="strict: ours. published: that of the paper's code: a shuffled choice of documents, 12 diverse beams, the "
        "shortest accepted answer, and a match of its beginning as EM."
    ),
]
BatchOption = Annotated[int, typer.Option(min=1, help="Questions of one batch.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...", show_default="a GPU if there is one")]


def generated(split: str, documents: int, seed: int) -> QADataset:
    """Generates a stream of newswire with one question for each document."""
    from mac_rag.data import SPLITS
    from mac_rag.data.newswire.generate import generate
    from mac_rag.errors import ConfigError

    if split not in SPLITS["newswire"]:
        raise ConfigError(
            f"newswire has no split {split!r}; choose one of {', '.join(SPLITS['newswire'])}, or give --data"
        )
    return generate(split, documents, seed=seed)


def whole_numbers(option: str, text: str) -> list[int]:
    """Parses the value of an option that takes several whole numbers: the distinct ones, ascending."""
    from mac_rag.errors import ConfigError

    try:
        numbers = sorted({int(number) for number in text.split(",")})
    except ValueError:
        raise ConfigError(f"{option} takes whole numbers separated by commas, got {text!r}") from None
    if numbers[0] < 1:
        raise ConfigError(f"{option} must be at least 1, got {text!r}")
    return numbers


def report(
    path: Path,
    *,
    experiment: str,
    options: Mapping[str, Any],
    rows: Sequence[Row],
    samples: Sequence[Sample] = (),
    adaptation: Adaptation | None = None,
    dataset: QADataset | None = None,
    source: str = "generated",
    model: MACModel | None = None,
    not_run: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
    quotes: Sequence[Quote] = (),
    table: Sequence[Row] | None = None,
    further: bool = False,
) -> None:
    """Writes the result file and prints its table.

    Args:
        path: the result file, as `result_path` returned it.
        experiment: name of the module, `eval.<experiment>`.
        options: all options of the command; `seed` is among them, and `model` if there is a model.
        samples: the answers to each question; empty if no questions were asked.
        dataset: the stream; None if the rows are of several streams.
        source: folder of the data set, or "generated".
        model: the evaluated model; None if the rows are of several models.
        adaptation, rows, not_run, notes, quotes: see `eval.harness.results.Result`.
        table: the rows to print; None for all.
        further: True to print a second table, with the scores that do not fit into the first.
    """
    from eval.harness.results import Data, Model, Result, provenance, published_lm
    from eval.harness.row_table import show, show_further

    result = Result(
        **provenance(experiment),
        scale=options.get("scale"),
        protocol=options.get("protocol", "strict"),
        config={name: str(value) if isinstance(value, Path) else value for name, value in options.items()},
        seed=options["seed"],
        model=None
        if model is None
        else Model(
            name=options["model"],
            lm=published_lm(model.base_lm.model.config),
            fingerprint=model.fingerprint,
            answer_digest=model.answer_digest,
            device=str(model.device),
            config=model.config.model_dump(mode="json"),
        ),
        data=None
        if dataset is None
        else Data(
            name=dataset.name,
            split=dataset.split,
            source=source,
            documents=len(dataset.documents),
            questions=len(dataset.questions),
        ),
        adaptation=adaptation,
        rows=tuple(rows),
        not_run=dict(not_run or {}),
        notes=tuple(notes),
        quotes=tuple(quotes),
    ).write(path, samples)
    where = "" if dataset is None else f" on {dataset.name} ({dataset.split})"
    show(result.rows if table is None else table, title=f"{options.get('model', experiment)}{where}")
    if further:
        show_further(result.rows)
    if adaptation is not None:
        say(
            f"Adapted to {adaptation.documents:,} documents in {adaptation.seconds:.1f} s"
            f" ({adaptation.rows:,} rows of memory, {adaptation.chunked:,} documents in chunks)."
        )
    for what, why in result.not_run.items():
        say(f"Not run: {what}: {why}")
    for note in result.notes:
        say(f"Note: {note}")
    say(f"Result: {path}")
