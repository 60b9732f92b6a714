"""What an experiment runs on: its model and sizes at each scale, and the newswire or a data set from a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.harness.command import MODEL_HELP, generated

if TYPE_CHECKING:
    from mac_rag.data.types import QADataset

DataOption = Annotated[
    str | None,
    typer.Option(
        help="The data set: a folder named squad, streamingqa or archivalqa, or NAME:FOLDER.",
        show_default="the generated newswire",
    ),
]
ModelByScale = Annotated[
    str | None,
    typer.Option(
        help=MODEL_HELP,
        show_default="mac-tiny; at the paper's scale, what its recipe leaves under runs/",
    ),
]
TrainedModel = Annotated[
    str | None,
    typer.Option(
        help="What the trainings start from: at the tiny scale a MAC model, at the paper's one of its presets.",
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
    int | None, typer.Option(min=1, help="Ask at most so many questions.", show_default="by scale")
]


@dataclass(frozen=True)
class Setup:
    """What an experiment runs on at one scale, where its options do not say otherwise.

    Attributes:
        model: name or folder of a MAC model. There are no published checkpoints of the paper's models; those named here
            are what `python -m pipelines.train --config <preset>/train --output runs/<preset>/train` leaves.
        documents: of the stream.
        questions: at most so many; None for all.
    """

    model: str
    documents: int
    questions: int | None = None

    def but(self, model: str | None, documents: int | None, questions: int | None) -> Setup:
        """The same with what the options say."""
        return Setup(
            self.model if model is None else model,
            self.documents if documents is None else documents,
            self.questions if questions is None else questions,
        )

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a command with these in their places, for its result."""
        return {**given, **asdict(self)}


def named_folder(data: str) -> tuple[str, Path]:
    """The data set and the folder that `--data` names: `streamingqa:/corpora/sqa`, or `data/streamingqa` for short.

    Raises:
        ConfigError: when neither part is the name of a data set.
    """
    from mac_rag.data import SPLITS
    from mac_rag.errors import ConfigError

    name, colon, folder = data.partition(":")
    if not colon:
        name, folder = Path(data).name, data
    if name not in SPLITS or name == "newswire":
        names = [known for known in SPLITS if known != "newswire"]
        raise ConfigError(
            f"--data {data!r} names no data set; give a folder of the name {', '.join(names[:-1])} or {names[-1]}, "
            f"or NAME:FOLDER, such as {names[0]}:{folder}"
        )
    return name, Path(folder)


def open_stream(data: str | None, split: str, setup: Setup, seed: int, *, scale: str) -> tuple[QADataset, str]:
    """The first documents of a stream with their questions, and where they came from.

    Args:
        data: as `--data` gives it; None for generated newswire.
        split: `train`, `val` or `test`, which all data sets have.
        setup: how many documents, and of how many of their questions a sample is drawn.
        seed: of the generated stream, and of drawing questions.
        scale: at the paper's, the data must be given.

    Raises:
        ConfigError: for a name that is no data set, or none at the paper's scale.
        DataError: for files that are missing or malformed.
    """
    from eval.harness.protocol import some_questions
    from mac_rag.data import load_dataset
    from mac_rag.errors import ConfigError

    if data is not None:
        name, folder = named_folder(data)
        dataset, source = load_dataset(name, split, folder, documents=setup.documents), str(folder)
    elif scale == "paper":
        raise ConfigError("--scale paper runs on the paper's data sets; give one with --data")
    else:
        dataset, source = generated(split, setup.documents, seed), "generated"
    return some_questions(dataset, setup.questions, seed), source
