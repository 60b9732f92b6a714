"""The paper's protocol as a command: its options, and one run of it."""

# ruff: noqa: ARG001 - options reach run_benchmark as context.params

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.harness.command import (
    MODEL_HELP,
    NEWSWIRE_DOCUMENTS,
    BatchOption,
    DeviceOption,
    OutputOption,
    ProtocolOption,
    SeedOption,
    report,
    whole_numbers,
)
from eval.harness.streams import open_stream
from mac_rag.cli.terminal import say
from mac_rag.shipped_models import DEFAULT_MODEL

if TYPE_CHECKING:
    from mac_rag.retrieval.base import Retriever

BenchmarkModel = Annotated[
    str | None, typer.Option(help=MODEL_HELP, show_default=f"mac-tiny on newswire, {DEFAULT_MODEL} on --data")
]
RetrieverOption = Annotated[
    str,
    typer.Option(
        help="Also answer from retrieved documents, alone and with MAC: none, or one or more of bm25, minilm, "
        "hybrid, contriever, contriever-msmarco, dpr, sentence-transformers:MODEL and module:attr, with commas."
    ),
]
KOption = Annotated[
    str, typer.Option("--k", help="Documents retrieved for each question; several numbers separated by commas.")
]
WeightOption = Annotated[
    str | None,
    typer.Option(
        help="Weights of the memory against the LM alone after retrieved documents (lambda): numbers above 0 "
        "and at most 1, separated by commas; 1 is the paper's.",
        show_default="the model's own",
    ),
]
StreamOption = Annotated[
    int | None, typer.Option(min=1, help="Documents of the stream, from its beginning.", show_default="all")
]
SplitOption = Annotated[str, typer.Option(help="Split of the data set to stream.")]
QuestionsOption = Annotated[
    int | None, typer.Option(min=1, help="At most this many questions, drawn by --seed.", show_default="all")
]
OneKOption = Annotated[int, typer.Option("--k", min=1, help="Retrieved documents before a question.")]
AnswersOption = Annotated[
    Path | None,
    typer.Option(
        help="Keep each answer in this file and generate only the answers that it lacks: an interrupted run "
        "continues, and further questions and rows generate nothing twice."
    ),
]
ExportOption = Annotated[
    Path | None,
    typer.Option(
        help="Also write the answers of each row to this folder, as records of ragas (ROW.ragas.jsonl) and of "
        "RAGChecker (ROW.ragchecker.json)."
    ),
]


def model_for(model: str | None, data: Path | str | None) -> str:
    """The model that the option names, or else the one that reads the data."""
    return model or ("mac-tiny" if data is None else DEFAULT_MODEL)


def benchmark_command(
    benchmark: str, title: str, *, home: str | None = None, stream: int | None = NEWSWIRE_DOCUMENTS
) -> Callable[..., None]:
    """Makes the command of one benchmark: `python -m eval.<benchmark>`.

    Args:
        benchmark: name of the data set in `mac_rag.data.load_dataset`.
        title: name of the data set in messages.
        home: where users find the files, for a data set whose questions have moments, so that generated news cannot
            stand in for it; None for any other.
        stream: documents of the stream without --documents; None for all.
    """

    def main(
        context: typer.Context,
        model: BenchmarkModel = None,
        retriever: RetrieverOption = "none",
        k: KOption = "5",
        memory_weight: WeightOption = None,
        data: Annotated[
            Path | None,
            typer.Option(
                help="Folder of the data set's files.", show_default="the embedded newswire sample, if it can stand in"
            ),
        ] = None,
        split: SplitOption = "test",
        documents: StreamOption = stream,
        questions: QuestionsOption = None,
        protocol: ProtocolOption = "strict",
        seed: SeedOption = 0,
        batch_size: BatchOption = 32,
        device: DeviceOption = None,
        answers: AnswersOption = None,
        export: ExportOption = None,
        output: OutputOption = None,
    ) -> None:
        if data is None and home is not None:
            from mac_rag.errors import ConfigError

            raise ConfigError(f"eval.{benchmark} needs --data, a folder with the files of {title}; they are {home}")
        if data is None:
            about = f"The embedded newswire sample, because no --data was given for {title}"
        else:
            about = f"{title} from {data}"
        run_benchmark(benchmark, None if data is None else f"{benchmark}:{data}", about, context.params)

    main.__doc__ = (
        f"Evaluate on {title}: adapt to a stream of documents, then ask all questions about them.\n\n"
        "Answers come from the LM alone and from MAC's memory alone; with --retriever also from retrieved documents, "
        "without and with the memory. "
        + (
            f"Without --data a generated stream of news takes the place of {title}."
            if home is None
            else "Rows that are dated ask as of the moment of each question: later documents have no influence."
        )
    )
    return main


def run_benchmark(
    experiment: str,
    data: str | None,
    about: str,
    options: Mapping[str, Any],
    columns: Mapping[str, str] | None = None,
) -> None:
    """Runs the protocol of `eval.<experiment>` with a command's options, and writes and prints its result.

    Args:
        data, columns: as `open_stream` takes them.
        about: description of the stream for the first line of the output.

    Raises:
        ConfigError: for an invalid option, before the stream is loaded.
    """
    from eval.harness.export import export_records
    from eval.harness.kept_answers import KeptAnswers, answer_source
    from eval.harness.protocol import run_protocol
    from eval.harness.published import departures
    from eval.harness.results import result_path, writable_folder
    from mac_rag.engine import MACEngine
    from mac_rag.errors import ConfigError
    from mac_rag.model import MACModel
    from mac_rag.retrieval.registry import make_retriever

    path = result_path(options["output"], experiment)
    folder: Path | None = options["export"]
    if folder is not None:
        writable_folder(folder, "--export")
    ks = whole_numbers("--k", options["k"])
    memory_weights = _memory_weights(options["memory_weight"])
    if memory_weights and options["protocol"] == "published":
        raise ConfigError(
            f"--memory-weight {options['memory_weight']} is not of the published protocol, which has LM(d + x; phi*) "
            "alone; leave it out, or take --protocol strict"
        )
    retrievers: dict[str, Retriever] = {}
    for name in dict.fromkeys(name.strip() for name in options["retriever"].split(",")):
        made = make_retriever(name, progress=True)
        if made is not None:
            retrievers[name] = made
    size, protocol = (options["documents"], options["questions"]), options["protocol"]
    dataset, source = open_stream(
        data, options["split"], *size, seed=options["seed"], scale="tiny", columns=columns, protocol=protocol
    )
    say(f"{about}: {len(dataset.documents):,} documents, {len(dataset.questions):,} questions, split {dataset.split}")
    model_name = model_for(options["model"], options["data"])
    loaded = MACModel.from_pretrained(model_name, device=options["device"])
    answers = options["answers"]
    outcome = run_protocol(
        MACEngine(loaded),
        dataset,
        retrievers,
        ks,
        memory_weights=memory_weights,
        kept=None if answers is None else KeptAnswers(answers, answer_source(loaded, dataset.documents, protocol)),
        batch_size=options["batch_size"],
        seed=options["seed"],
        protocol=protocol,
    )
    report(
        path,
        experiment=experiment,
        options={**options, "model": model_name},
        rows=outcome.rows,
        samples=outcome.samples,
        adaptation=outcome.adaptation,
        dataset=dataset,
        source=source,
        model=loaded,
        notes=[*dataset.notes, *departures(protocol, loaded)],
        further=True,
    )
    if folder is not None:
        files = export_records(folder, outcome.samples, dataset.documents)
        say(f"Records for ragas and RAGChecker: {len(files)} files in {folder}")


def _memory_weights(text: str | None) -> list[float]:
    """Parses the distinct numbers of --memory-weight, in their order; none without the option."""
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
