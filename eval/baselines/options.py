"""Options of the commands that compare systems, and the factory of systems that the options describe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eval.harness.scales import Scale, Setup
from eval.harness.streams import open_stream

if TYPE_CHECKING:
    from eval.baselines.factory import SystemFactory

# Names of the compared methods, as options accept them.
FINE_TUNING = ("uniform", "salient-spans", "camels")
ADAPTING = (*FINE_TUNING, "ccm", "mac")
METHODS = ("zero-shot", "few-shot", "retriever", *ADAPTING)
LMOption = Annotated[
    str | None,
    typer.Option(
        help="Name or folder of the LM that fine-tuning and CCM start from.",
        show_default="the model's own, loaded again if it is quantised; at the paper's scale, what tune_qa leaves",
    ),
]
RateOption = Annotated[
    float | None,
    typer.Option(
        min=0, help="Learning rate of all fine-tuning.", show_default="fixed, as in the paper's experiment on retention"
    ),
]


def open_factory(
    setup: Setup,
    path: Path,
    *,
    scale: Scale,
    data: str | None,
    seed: int,
    device: str | None,
    batch_size: int,
    lm: str | None = None,
) -> SystemFactory:
    """Makes the factory of systems around a command's model.

    Args:
        setup: the experiment's setup, which names the model.
        path: the result file; trained networks are cached in `trained/` beside it.
        scale, data, seed, device, batch_size: the command's options.
        lm: the command's option; None for the setup's.

    Raises:
        ModelLoadError: if there is no such model.
    """
    from eval.baselines.factory import SCALES, SystemFactory
    from mac_rag.data.types import QADataset
    from mac_rag.model import MACModel

    baselines = SCALES[scale]

    def dataset(split: str, documents: int) -> QADataset:
        return open_stream(data, split, documents, seed=seed, scale=scale)[0]

    return SystemFactory(
        MACModel.from_pretrained(setup.model, device=device),
        baselines,
        lambda: dataset("train", baselines.training_documents),
        lambda: dataset("val", baselines.validation_documents),
        folder=path.parent / "trained",
        batch_size=batch_size,
        seed=seed,
        lm=setup.lm if lm is None else lm,
    )


def searched_notes(factory: SystemFactory) -> list[str]:
    """Writes the searched learning rates as notes for the result."""
    return [
        f"{method}: F1 on {len(factory.validation_set.documents):,} validation documents by learning rate: "
        + ", ".join(f"{rate:g}: {100 * f1:.1f} %" for rate, f1 in f1_by_rate.items())
        for method, f1_by_rate in factory.searched.items()
    ]


def chosen_methods(text: str, among: tuple[str, ...] = METHODS) -> list[str]:
    """Parses an option's value: the distinct methods, in their order.

    Args:
        text: names of methods, separated by commas.
        among: the names that the option accepts.

    Raises:
        ConfigError: for an unknown method, or no method.
    """
    from mac_rag.errors import ConfigError

    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in among]
    if unknown or not names:
        raise ConfigError(f"--methods {text!r}: choose among {', '.join(among)}")
    return names
