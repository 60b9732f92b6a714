"""Options of the commands that compare systems."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
LoraOption = Annotated[
    int | None,
    typer.Option(
        "--lora-rank",
        min=1,
        help="Fine-tune low-rank updates of this rank; those of a quantised LM, if --lm names no other (QLoRA).",
        show_default="all weights",
    ),
]
UnrelatedOption = Annotated[
    Path | None,
    typer.Option(
        help="File of unrelated texts on which CaMeLS keeps the LM's predictions; published: 8,000 of OpenWebText.",
        show_default="other training documents",
    ),
]
RateOption = Annotated[
    float | None,
    typer.Option(
        min=0, help="Learning rate of all fine-tuning.", show_default="fixed, as in the paper's experiment on retention"
    ),
]


def chosen_methods(text: str, among: tuple[str, ...] = METHODS) -> list[str]:
    """Parses the value of --methods: the distinct methods, in their order."""
    from mac_rag.errors import ConfigError

    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in among]
    if unknown or not names:
        raise ConfigError(f"--methods {text!r}: choose among {', '.join(among)}")
    return names
