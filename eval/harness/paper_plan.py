"""The steps of `eval.paper`: every experiment with its data sets, arguments and expected time."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eval.harness.paper_models import trained_on
from eval.harness.scales import SCALES, Scale, Setup
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
        own_model: True if the model that it evaluates at the paper's scale is trained on the step's data set.
        trained_on: the data set of the option --trained-on at the paper's scale; empty without such an option.
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
    own_model: bool = False
    trained_on: str = ""


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
        paper_arguments=("--retriever", "bm25,contriever,dpr", "--k", "1,3,5"),
        own_model=True,
    )


PLANS = (
    Plan(
        "main_table",
        6,
        DATASETS,
        also=("squad",),
        tiny_arguments=("--questions", "500"),
        also_arguments=("--documents", "256", "--questions", "256"),
        own_model=True,
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
    Plan("hierarchical", 1, ("archivalqa",), own_model=True),
    Plan("cross_attention", 1, ("streamingqa",)),
    Plan("reduction", 1, ("streamingqa",)),
    Plan("peft", 4, ("streamingqa",)),
    Plan(
        "ood",
        1,
        ("squad", "archivalqa"),
        also=("squad",),
        also_arguments=("--documents", "256", "--questions", "256"),
        trained_on="streamingqa",
    ),
    Plan("perplexity", 2, ("streamingqa",)),
    Plan("amortization", 4, ("streamingqa",)),
    Plan("quantization", 2, DATASETS),
    Plan(
        "bank_size",
        1,
        (),
        scaled=False,
        tiny_arguments=("--sizes", "32,256,1665", "--questions", "512"),
    ),
    Plan("conflict", 1, ("archivalqa",), own_model=True),
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
        options = {"--data": dataset}
        if scale == "paper" and plan.trained_on:
            options["--trained-on"] = plan.trained_on
        source = tuple(
            text for option, each in options.items() for text in (option, str(folders.get(each, f"DATA/{each}")))
        )
        lacking = [each for each in options.values() if each not in folders]
        missing = f"no folder {' and no folder '.join(lacking)} in --data" if lacking else ""
        minutes = plan.minutes if scale == "tiny" else None
        model = _own_model(plan, dataset) if scale == "paper" and plan.own_model else ()
        yield Step(name, plan.experiment, (*_common(plan, scale, seed), *source, *model, *arguments), missing, minutes)


def _own_model(plan: Plan, dataset: str) -> tuple[str, ...]:
    """Arguments that name the model of the paper's scale that is trained on a data set, and the LM of its baselines."""
    setup = SCALES["paper"].get(plan.experiment, Setup(LARGEST, 0))
    lm = () if setup.lm is None else ("--lm", trained_on(setup.lm, dataset))
    return ("--model", trained_on(setup.model, dataset), *lm)
