"""Options of the evaluation commands, the commands of the benchmarks, and the report of a result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.harness.scales import Scale
from mac_rag import DEFAULT_MODEL
from mac_rag.cli.terminal import say

if TYPE_CHECKING:
    from eval.harness.results import Adaptation, Row, Sample
    from mac_rag.data.types import QADataset
    from mac_rag.model import MACModel
    from mac_rag.retrieval.base import Retriever

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
BatchOption = Annotated[int, typer.Option(min=1, help="Questions of one batch.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...", show_default="a GPU if there is one")]


def benchmark_command(benchmark: str, title: str) -> Callable[..., None]:
    """The command of one benchmark: `python -m eval.<benchmark>`.

    Args:
        benchmark: name of the data set in `mac_rag.data.load_dataset`.
        title: name of the data set in messages.
    """

    def main(
        context: typer.Context,
        model: Annotated[
            str | None,
            typer.Option(
                help=MODEL_HELP,
                show_default=f"mac-tiny on newswire, {DEFAULT_MODEL} on --data",
            ),
        ] = None,
        retriever: Annotated[
            str,
            typer.Option(
                help="Also answer from retrieved documents, alone and with MAC: none, or one or more of bm25, minilm, "
                "hybrid, contriever, contriever-msmarco, dpr, sentence-transformers:MODEL and module:attr, with commas."
            ),
        ] = "none",
        k: Annotated[
            str, typer.Option("--k", help="Documents retrieved for each question; several numbers separated by commas.")
        ] = "5",
        memory_weight: Annotated[
            str | None,
            typer.Option(
                help="Weights of the memory against the LM alone behind retrieved documents (lambda): numbers above 0 "
                "and at most 1, separated by commas; 1 is the paper's.",
                show_default="the model's own",
            ),
        ] = None,
        data: Annotated[
            Path | None,
            typer.Option(help="Folder of the data set's files.", show_default="the embedded newswire sample"),
        ] = None,
        split: Annotated[str, typer.Option(help="Split of the data set to stream.")] = "test",
        documents: Annotated[int, typer.Option(min=1, help="Documents of the stream, from its beginning.")] = 1665,
        questions: Annotated[
            int | None, typer.Option(min=1, help="At most this many questions, drawn by --seed.", show_default="all")
        ] = None,
        seed: SeedOption = 0,
        batch_size: BatchOption = 32,
        device: DeviceOption = None,
        answers: Annotated[
            Path | None,
            typer.Option(
                help="Keep each answer in this file and generate only the answers that it lacks: an interrupted run "
                "continues, and further questions and rows generate nothing twice."
            ),
        ] = None,
        output: OutputOption = None,
    ) -> None:
        from eval.harness.results import result_path

        model = model or ("mac-tiny" if data is None else DEFAULT_MODEL)

        path = result_path(output, benchmark)
        ks = whole_numbers("--k", k)
        memory_weights = _memory_weights(memory_weight)
        names = list(dict.fromkeys(name.strip() for name in retriever.split(",") if name.strip() != "none"))
        from mac_rag.retrieval.registry import make_retriever

        retrievers: dict[str, Retriever] = {}
        for name in names:
            made = make_retriever(name, progress=True)
            if made is not None:
                retrievers[name] = made
        dataset, source = _load(benchmark, title, data, split, documents, questions, seed)
        from eval.harness.kept_answers import KeptAnswers, answer_source
        from eval.harness.protocol import run_protocol
        from mac_rag.engine import MACEngine
        from mac_rag.model import MACModel

        loaded = MACModel.from_pretrained(model, device=device)
        outcome = run_protocol(
            MACEngine(loaded),
            dataset,
            retrievers,
            ks,
            memory_weights=memory_weights,
            kept=None if answers is None else KeptAnswers(answers, answer_source(loaded, dataset.documents)),
            batch_size=batch_size,
            seed=seed,
            progress=True,
        )
        report(
            path,
            experiment=benchmark,
            options={**context.params, "model": model},
            rows=outcome.rows,
            samples=outcome.samples,
            adaptation=outcome.adaptation,
            dataset=dataset,
            source=source,
            model=loaded,
        )

    main.__doc__ = (
        f"Evaluate on {title}: adapt to a stream of documents, then ask all questions about them.\n\n"
        "Answers come from the LM alone and from MAC's memory alone; with --retriever also from retrieved documents, "
        f"without and with the memory. Without --data a generated stream of news takes the place of {title}."
    )
    return main


def _load(
    benchmark: str, title: str, data: Path | None, split: str, documents: int, questions: int | None, seed: int
) -> tuple[QADataset, str]:
    """The stream and its source; prints both as the first line of the output."""
    from eval.harness.protocol import some_questions
    from mac_rag.data import load_dataset

    if data is None:
        dataset, source = generated(split, documents, seed), "generated"
        about = f"The embedded newswire sample, because no --data was given for {title}"
    else:
        dataset, source = load_dataset(benchmark, split, data, documents=documents), str(data)
        about = f"{title} from {data}"
    dataset = some_questions(dataset, questions, seed)
    say(f"{about}: {len(dataset.documents):,} documents, {len(dataset.questions):,} questions, split {split}")
    return dataset, source


def generated(split: str, documents: int, seed: int) -> QADataset:
    """A stream of generated newswire with one question for each document.

    Args:
        split: `train`, `val` or `test`.
        documents: number of documents.
        seed: random seed of the stream.

    Raises:
        ConfigError: for another split.
    """
    from mac_rag.data import SPLITS
    from mac_rag.data.newswire.generate import generate
    from mac_rag.errors import ConfigError

    if split not in SPLITS["newswire"]:
        raise ConfigError(
            f"newswire has no split {split!r}; choose one of {', '.join(SPLITS['newswire'])}, or give --data"
        )
    return generate(split, documents, seed=seed)


def whole_numbers(option: str, text: str) -> list[int]:
    """The value of an option that takes several whole numbers: its distinct numbers, ascending.

    Args:
        option: name of the option, for messages.
        text: numbers separated by commas.

    Raises:
        ConfigError: for anything but whole numbers of at least 1.
    """
    from mac_rag.errors import ConfigError

    try:
        numbers = sorted({int(number) for number in text.split(",")})
    except ValueError:
        raise ConfigError(f"{option} takes whole numbers separated by commas, got {text!r}") from None
    if numbers[0] < 1:
        raise ConfigError(f"{option} must be at least 1, got {text!r}")
    return numbers


def _memory_weights(text: str | None) -> list[float]:
    """The distinct numbers of --memory-weight, in their order; none without the option.

    Raises:
        ConfigError: for anything but numbers above 0 and at most 1.
    """
    from mac_rag.errors import ConfigError

    try:
        numbers = [] if text is None else list(dict.fromkeys(float(number) for number in text.split(",")))
        if not all(0 < number <= 1 for number in numbers):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--memory-weight takes numbers above 0 and at most 1, separated by commas, got {text!r}"
        ) from None
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
    table: Sequence[Row] | None = None,
) -> None:
    """Writes the result file and prints its table.

    Args:
        path: the result file, as `result_path` returned it.
        experiment: name of the module, `eval.<experiment>`.
        options: all options of the command; `seed` is among them, and `model` if there is a model.
        rows: the rows of the result.
        samples: the answers to each question; empty if no questions were asked.
        adaptation: size and time of the adaptation; None if no single one is measured.
        dataset: the stream; None if the rows are of several streams.
        source: folder of the data set, or "generated".
        model: the evaluated model; None if the rows are of several models.
        not_run, notes: see `eval.harness.results.Result`.
        table: the rows to print; None for all.
    """
    from eval.harness.results import Data, Model, Result, provenance, show

    result = Result(
        **provenance(experiment),
        scale=options.get("scale"),
        config={name: str(value) if isinstance(value, Path) else value for name, value in options.items()},
        seed=options["seed"],
        model=None
        if model is None
        else Model(
            name=options["model"],
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
    ).write(path, samples)
    where = "" if dataset is None else f" on {dataset.name} ({dataset.split})"
    show(result.rows if table is None else table, title=f"{options.get('model', experiment)}{where}")
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
