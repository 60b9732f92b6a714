"""The steps of `eval.paper`: every experiment with its data sets, arguments and expected time."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eval.harness.scales import Scale
from mac_rag.errors import ConfigError

DATASETS = ("streamingqa", "squad", "archivalqa")
LARGEST = "runs/llama2-7b/train-joint/best"  # trained with memory and retrieved documents


@dataclass(frozen=True)
class Plan:
    """One experiment.

    Attributes:
        experiment: name of the module, `eval.<experiment>`.
        minutes: expected time at the tiny scale on two CPU cores.
        paper: data sets of the paper's scale.
        also: data sets of the tiny scale beside newswire, where `--data` has them.
        newswire: True if the tiny scale runs on newswire.
        scaled: True if the module has the option --scale.
        tiny_arguments: further arguments on newswire.
        also_arguments: further arguments on the data sets in `also`, whose documents are longer than newswire's.
        paper_arguments: further arguments at the paper's scale.
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
        name: name of the experiment, and of the data set unless it is newswire; unique among the steps.
        experiment: name of the module, `eval.<experiment>`.
        arguments: arguments of the module, without --output.
        missing: the reason why the step cannot run; empty if it can.
        minutes: expected time; None if unknown.
    """

    name: str
    experiment: str
    arguments: tuple[str, ...]
    missing: str = ""
    minutes: float | None = None

    def command(self, output: Path) -> tuple[str, ...]:
        """The module and its arguments, for `python -m`."""
        return (f"eval.{self.experiment}", *self.arguments, "--output", str(self.result(output)))

    def shown(self, output: Path) -> str:
        """The command line that the result file records."""
        return shlex.join(["python", "-m", *self.command(output)])

    def result(self, output: Path) -> Path:
        """The result file in the folder of results."""
        return output / f"{self.name}.json"


def _retrieval(dataset: str, *, newswire: bool = False) -> Plan:
    """Table 2 on one data set. On newswire all three modules would do the same, so only one of them runs there."""
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
    """All steps of one scale; at the tiny scale the steps on newswire come first.

    Args:
        scale: `tiny` or `paper`.
        data: a folder with a folder for each data set, or for some of them; None for newswire alone.
        seed: random seed of all steps.

    Raises:
        ConfigError: if the folder has none of the data sets.
    """
    folders = {name: data / name for name in DATASETS if data is not None and (data / name).is_dir()}
    if data is not None and not folders:
        raise ConfigError(f"--data {data} has none of the folders {', '.join(DATASETS)}")
    if scale == "paper":
        return [
            step for plan in PLANS for step in _on_data(plan, scale, plan.paper, plan.paper_arguments, folders, seed)
        ]
    newswire = [
        Step(plan.experiment, plan.experiment, (*_common(plan, scale, seed), *plan.tiny_arguments), "", plan.minutes)
        for plan in PLANS
        if plan.newswire
    ]
    others = [step for plan in PLANS for step in _on_data(plan, scale, plan.also, plan.also_arguments, folders, seed)]
    return [*newswire, *others]


def _common(plan: Plan, scale: Scale, seed: int) -> tuple[str, ...]:
    return (*(("--scale", scale) if plan.scaled else ()), "--seed", str(seed))


def _on_data(
    plan: Plan, scale: Scale, datasets: tuple[str, ...], arguments: tuple[str, ...], folders: dict[str, Path], seed: int
) -> Iterator[Step]:
    for dataset in datasets:
        name = plan.experiment if plan.experiment == dataset else f"{plan.experiment}-{dataset}"
        folder = folders.get(dataset)
        source = ("--data", str(folder or f"DATA/{dataset}"))
        missing = "" if folder else f"no folder {dataset} in --data"
        minutes = plan.minutes if scale == "tiny" else None
        yield Step(name, plan.experiment, (*_common(plan, scale, seed), *source, *arguments), missing, minutes)
