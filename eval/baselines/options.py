"""What the commands that compare systems share: their options, and the way from options to a bench."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eval.baselines.methods import METHODS
from eval.harness.streams import Setup, open_stream

if TYPE_CHECKING:
    from eval.baselines.factory import Bench
    from eval.baselines.finetuning import AnswerTuning

TrainedOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder of networks that baselines need trained; those found there are not trained again.",
        show_default="trained/ beside the result",
    ),
]
RateOption = Annotated[
    float | None,
    typer.Option(min=0, help="Of all fine-tuning.", show_default="fixed, as in the paper's experiment on retention"),
]
# The paper's sizes and model of tables 1 and 9, and of figures 2 and 3.
SETUPS = {"tiny": Setup("mac-tiny", 1665), "paper": Setup("runs/gpt2-xl/train/best", 1665)}


def open_bench(
    setup: Setup,
    path: Path,
    *,
    scale: str,
    data: str | None,
    seed: int,
    device: str | None,
    batch_size: int,
    trained: Path | None = None,
    tuning: AnswerTuning | None = None,
    retriever: str = "bm25",
) -> Bench:
    """A bench around the model of a command.

    Args:
        setup: names the model.
        path: of the result; networks are kept beside it unless `trained` says where.
        scale, data, seed, device, batch_size, trained: the command's options.
        tuning, retriever: see `Bench`.

    Raises:
        ModelLoadError: when there is no such model.
    """
    from eval.baselines.factory import Bench
    from eval.baselines.setups import SETUPS as BASELINES
    from mac_rag.data.types import QADataset
    from mac_rag.model import MACModel

    baselines = BASELINES[scale]
    wanted = {"train": baselines.training_documents, "val": baselines.validation_documents}

    def dataset(split: str) -> QADataset:
        sizes = Setup(setup.model, wanted[split])
        return open_stream(data, split, sizes, seed, scale=scale)[0]

    return Bench(
        MACModel.from_pretrained(setup.model, device=device),
        baselines,
        lambda: dataset("train"),
        lambda: dataset("val"),
        folder=trained or path.parent / "trained",
        tuning=tuning,
        retriever=retriever,
        batch_size=batch_size,
        seed=seed,
    )


def searched_notes(bench: Bench) -> list[str]:
    """What the search of learning rates found, for the result."""
    return [
        f"{method}: F1 on {len(bench.validation_set.documents):,} validation documents by learning rate: "
        + ", ".join(f"{rate:g}: {100 * f1:.1f} %" for rate, f1 in found.items())
        for method, found in bench.searched.items()
    ]


def chosen_methods(text: str, among: tuple[str, ...] = METHODS) -> list[str]:
    """The methods of an option, in the order given.

    Raises:
        ConfigError: for an unknown one, or none.
    """
    from mac_rag.errors import ConfigError

    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in among]
    if unknown or not names:
        raise ConfigError(f"--methods {text!r}: choose among {', '.join(among)}")
    return names
