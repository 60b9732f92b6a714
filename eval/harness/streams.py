"""The stream of an experiment, generated newswire or a data set from files, and the options that choose it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from filelock import FileLock

from eval.harness.command import MODEL_HELP, NEWSWIRE_DOCUMENTS, generated
from eval.harness.scales import Protocol, Scale
from mac_rag.cli.terminal import say

if TYPE_CHECKING:
    from mac_rag.data.types import QADataset

DataOption = Annotated[
    str | None,
    typer.Option(
        help="The data set: a folder named squad, streamingqa, archivalqa, timeqa or realtimeqa, NAME:FOLDER, or a "
        "file, a folder or hub:OWNER/NAME with data of your own.",
        show_default="the generated newswire",
    ),
]
ModelByScale = Annotated[
    str | None,
    typer.Option(help=MODEL_HELP, show_default="mac-tiny; at the paper's scale, what its recipe leaves under runs/"),
]
TrainedModel = Annotated[
    str | None,
    typer.Option(
        help="The model that trainings start from: a MAC model at the tiny scale, a preset at the paper's.",
        show_default="mac-tiny; at the paper's scale, the preset that the paper used",
    ),
]
StepsOption = Annotated[
    int | None, typer.Option(min=1, help="Steps of each training.", show_default="by scale; about a minute at tiny")
]
TrainingRateOption = Annotated[
    float | None,
    typer.Option(
        min=0, help="Learning rate of each training; a pretrained model needs a low one.", show_default="by scale"
    ),
]
DocumentsOption = Annotated[
    int | None, typer.Option(min=2, help="Documents of the stream, from its beginning.", show_default="by scale")
]
QuestionsOption = Annotated[
    int | None, typer.Option(min=1, help="At most this many questions, drawn by --seed.", show_default="by scale")
]


def named_data(data: str) -> tuple[str, Path]:
    """Parses `--data` into name and path: `streamingqa:/corpora/sqa`, or `data/streamingqa` for short.

    A file or folder of another name is the user's own data, `own:PATH`, and so is `hub:OWNER/NAME`.
    """
    from mac_rag.data import SPLITS
    from mac_rag.data.readers import HUB
    from mac_rag.errors import ConfigError

    if data.startswith(HUB):
        return "own", Path(data)
    names = [known for known in SPLITS if known not in ("newswire", "own")]
    name, colon, path = data.partition(":")
    if colon and name in (*names, "own"):
        return name, Path(path)
    if Path(data).name in names:
        return Path(data).name, Path(data)
    if data and Path(data).exists():
        return "own", Path(data)
    raise ConfigError(
        f"--data {data!r} names no data set; give a folder of the name {', '.join(names[:-1])} or {names[-1]}, "
        f"NAME:FOLDER, such as {names[0]}:{path or data}, or a file or folder of your own that exists"
    )


def open_stream(
    data: str | None,
    split: str,
    documents: int | None,
    questions: int | None = None,
    *,
    seed: int,
    scale: Scale,
    columns: Mapping[str, str] | None = None,
    protocol: Protocol = "strict",
) -> tuple[QADataset, str]:
    """Opens the first documents of a stream with their questions; returns it with its folder, or "generated".

    Args:
        data: the value of `--data`; None for generated newswire.
        split: `train`, `val` or `test`; every data set has all three, but RealTimeQA has `test` alone.
        documents: number of documents, from the beginning of the stream; None for all of a data set, and a sample of
            newswire.
        questions: at most this many of their questions, drawn by the seed; None for all.
        scale: the paper's scale needs `data`.
        columns: for data of the user's own, field -> column, if a column has another name than the field.
        protocol: `published` takes documents of a stream that is shuffled by the seed.

    Raises:
        ConfigError: if `data` names no data set, or is None at the paper's scale.
        DataError: if files are missing or malformed.
    """
    from eval.harness.protocol import some_questions
    from mac_rag.data import load_dataset
    from mac_rag.errors import ConfigError

    if data is not None:
        name, path = named_data(data)
        count = documents if protocol == "strict" else None
        dataset, source = load_dataset(name, split, path, documents=count, columns=columns), str(path)
        for note in dataset.notes:
            say(note, err=True)
    elif scale == "paper":
        raise ConfigError("--scale paper runs on the paper's data sets; give one with --data")
    else:
        dataset, source = generated(split, documents or NEWSWIRE_DOCUMENTS, seed), "generated"
    if protocol == "published":
        from eval.harness.published import shuffled_choice

        dataset = shuffled_choice(dataset, documents, seed)
    return some_questions(dataset, questions, seed), source


def locked(place: Path) -> FileLock:
    """A lock for experiments that run side by side and make the same file or folder."""
    place.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(place.with_name(f"{place.name}.lock"))


def write_once(path: Path, make: Callable[[], QADataset]) -> None:
    """Writes a data set as CSV in the format of ArchivalQA, unless the file exists; the file is whole at any time.

    Raises:
        DataError: if the format cannot hold the data set.
    """
    from mac_rag.data.archivalqa import write_archivalqa

    with locked(path):
        if not path.exists():
            write_archivalqa(make(), path)
