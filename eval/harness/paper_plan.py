"""The steps of `eval.paper`: every experiment, on what data, with which arguments, and how long it takes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eval.harness.scales import Scale
from mac_rag.errors import ConfigError

DATASETS = ("streamingqa", "squad", "archivalqa")
LARGEST = "runs/llama2-7b/train/best"


@dataclass(frozen=True)
class Plan:
    """One experiment.

    Attributes:
        experiment: the module, `eval.<experiment>`.
        minutes: that it takes at the tiny scale on two CPU cores.
        paper: data sets that it runs on at the paper's scale.
        also: data sets that it runs on at the tiny scale too, where they were given.
        newswire: whether the tiny scale runs on newswire.
        scaled: whether the module has --scale.
        tiny_arguments, also_arguments, paper_arguments: further ones: on newswire, on the data sets in `also`, whose
            documents are longer than newswire's, and at the paper's scale.
    """

    experiment: str
    minutes: float
    paper: tuple[str, ...]
    also: tuple[str, ...] = ()
    newswire: bool = True
    scaled: bool = True
    tiny_arguments: tuple[str, ...] = ()
    also_arguments: tuple[str, ...] = ()
    paper_arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """One run of one experiment.

    Attributes:
        name: the experiment, and the data set if it is not the newswire.
        arguments: of the module, but --output.
        missing: why it cannot be run; empty where it can.
        minutes: that it should take; None where nobody knows.
    """

    name: str
    experiment: str
    arguments: tuple[str, ...]
    missing: str = ""
    minutes: float | None = None

    def command(self, output: Path) -> tuple[str, ...]:
        """The module and its arguments, as Python's -m takes them."""
        return (f"eval.{self.experiment}", *self.arguments, "--output", str(self.result(output)))

    def shown(self, output: Path) -> str:
        """The command as its result names it."""
        return shlex.join(["python", "-m", *self.command(output)])

    def result(self, output: Path) -> Path:
        return output / f"{self.name}.json"


def _retrieval(dataset: str, *, newswire: bool = False) -> Plan:
    """Table 2 on one data set. On newswire all three would be the same, so one of them runs there."""
    few = ("--retriever", "bm25", "--k", "1,3,5", "--documents", "512", "--questions", "256")
    return Plan(
        dataset,
        1,
        (dataset,),
        also=() if newswire else (dataset,),
        newswire=newswire,
        scaled=False,
        tiny_arguments=few,
        also_arguments=few,
        paper_arguments=("--model", LARGEST, "--retriever", "bm25,contriever,dpr", "--k", "1,3,5"),
    )


PLANS = (
    Plan(
        "main_table",
        6,
        DATASETS,
        also=("squad",),
        tiny_arguments=("--questions", "500"),
        also_arguments=("--documents", "256", "--questions", "256"),
    ),
    _retrieval("archivalqa", newswire=True),
    _retrieval("squad"),
    _retrieval("streamingqa"),
    Plan("adaptation_cost", 1, ("streamingqa",)),
    Plan(
        "retention",
        4,
        ("streamingqa",),
        also=("squad",),
        also_arguments=("--first", "50", "--further", "350", "--step", "50", "--questions", "100"),
    ),
    Plan("dropout_memory", 4, ("streamingqa",)),
    Plan("hierarchical", 1, ("archivalqa",)),
    Plan("cross_attention", 1, ("streamingqa",)),
    Plan("reduction", 1, ("streamingqa",)),
    Plan("peft", 4, ("streamingqa",)),
    Plan(
        "ood",
        1,
        ("squad", "archivalqa"),
        also=("squad",),
        also_arguments=("--documents", "256", "--questions", "256"),
    ),
    Plan("perplexity", 2, ("streamingqa",)),
    Plan("amortization", 4, ("streamingqa",)),
    Plan("quantization", 2, DATASETS),
    Plan("contamination", 1, ("streamingqa",)),
    Plan(
        "bank_size",
        1,
        (),
        scaled=False,
        tiny_arguments=("--sizes", "32,256,1665", "--questions", "512"),
    ),
    Plan("conflict", 1, ("archivalqa",)),
)


def steps(scale: Scale, data: Path | None, seed: int) -> list[Step]:
    """Every step of one scale; at the tiny scale those on newswire come first.

    Args:
        data: the folder that holds a folder for each data set.
        seed: of all steps.

    Raises:
        ConfigError: when that folder has none of them.
    """
    given = {name: data / name for name in DATASETS if data is not None and (data / name).is_dir()}
    if data is not None and not given:
        raise ConfigError(f"--data {data} has none of the folders {', '.join(DATASETS)}")
    if scale == "paper":
        return [step for plan in PLANS for step in _on_data(plan, scale, plan.paper, plan.paper_arguments, given, seed)]
    newswire = [
        Step(plan.experiment, plan.experiment, (*_common(plan, scale, seed), *plan.tiny_arguments), "", plan.minutes)
        for plan in PLANS
        if plan.newswire
    ]
    others = [step for plan in PLANS for step in _on_data(plan, scale, plan.also, plan.also_arguments, given, seed)]
    return [*newswire, *others]


def _common(plan: Plan, scale: Scale, seed: int) -> tuple[str, ...]:
    return (*(("--scale", scale) if plan.scaled else ()), "--seed", str(seed))


def _on_data(
    plan: Plan, scale: Scale, datasets: tuple[str, ...], arguments: tuple[str, ...], given: dict[str, Path], seed: int
) -> Iterator[Step]:
    for dataset in datasets:
        name = plan.experiment if plan.experiment == dataset else f"{plan.experiment}-{dataset}"
        folder = given.get(dataset)
        source = ("--data", str(folder or f"DATA/{dataset}"))
        missing = "" if folder else f"no folder {dataset} in --data"
        minutes = plan.minutes if scale == "tiny" else None
        yield Step(name, plan.experiment, (*_common(plan, scale, seed), *source, *arguments), missing, minutes)
