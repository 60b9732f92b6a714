"""The steps of `eval.paper` with data sets and arguments, the models that they need, and their records.

At the paper's scale, `runs/<preset>/<stage>/best` is trained on StreamingQA, `runs/<preset>/<stage>-<data set>/best` on
another data set. MAC is trained around an LM that was tuned on questions before: `runs/<preset>/tune_qa/best`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from eval.harness.scales import SCALES, Scale, Setup, command_of
from mac_rag.atomic_files import write_text
from mac_rag.config import Config
from mac_rag.errors import ConfigError, DataError
from mac_rag.model.presets import PAPER, PRESETS, preset
from mac_rag.untrusted_files import read_json
from pipelines.recipe import read_recipe

DATASETS = ("streamingqa", "squad", "archivalqa")
LARGEST = "runs/llama2-7b/train-joint/best"  # trained with memory and retrieved documents
RECORDS = "steps.json"
_LARGEST_FILE = 16 << 20  # bytes
# Experiments that update the LM on each document; CaMeLS weighs tokens by a proxy, tuned on questions of the data set.
_UPDATING = ("main_table", "adaptation_cost", "retention", "ood", "perplexity")
PROXY = "runs/distilgpt2/tune_qa/best"
# Questions to train on, after CaMeLS (Hu et al., 2023): an epoch is one pass over them.
QUESTIONS = {"streamingqa": 21_000, "squad": 39_893, "archivalqa": 21_700}
EPOCHS = 50
FIRST = "streamingqa"  # whose models have no data set in their names
# The questions that are set aside for tuning the LM: splits for training and validation.
TUNING_SPLITS = {
    "streamingqa": ("qa_train", "qa_val"), "squad": ("qa_lt", "qa_lt_val"), "archivalqa": ("qa_lt", "qa_lt_val"),
}  # fmt: skip
_JOINT = "-joint"
_PATH = re.compile(
    rf"runs/(?P<preset>[^/]+)/(?P<task>train|tune_qa)(?P<joint>{_JOINT})?(?:-(?P<dataset>{'|'.join(TUNING_SPLITS)}))?/best"
)


@dataclass(frozen=True)
class TrainedModel:
    """A model that a recipe leaves: for task `tune_qa` the LM alone; `joint` if trained with retrieved documents."""

    preset: str
    task: str
    joint: bool
    dataset: str

    @classmethod
    def of(cls, path: str) -> TrainedModel:
        """The model of a path."""
        match = _PATH.fullmatch(path)
        if match is None:
            raise ConfigError(f"{path!r} is no model of the paper's recipes (runs/PRESET/train/best)")
        return cls(match["preset"], match["task"], match["joint"] is not None, match["dataset"] or FIRST)

    @property
    def folder(self) -> str:
        """The folder of its run."""
        dataset = "" if self.dataset == FIRST else f"-{self.dataset}"
        return f"runs/{self.preset}/{self.task}{_JOINT if self.joint else ''}{dataset}"

    @property
    def path(self) -> str:
        """The model itself."""
        return f"{self.folder}/best"

    @property
    def starts_from(self) -> TrainedModel | None:
        """The tuned LM that it is trained around; None for an LM."""
        return None if self.task == "tune_qa" else TrainedModel(self.preset, "tune_qa", self.joint, self.dataset)

    @property
    def recipe(self) -> str:
        """Name of its recipe."""
        return f"{self.preset}/{self.task}{_JOINT if self.joint else ''}"

    def overrides(self, data: Path) -> tuple[str, ...]:
        """Values of the recipe with the folder of the data set, as `--set` takes them."""
        values = [f"data.name={self.dataset}", f"data.path={data}"]
        if self.task == "tune_qa":
            train, val = TUNING_SPLITS[self.dataset]
            values += [f"data.train={train}", f"data.val={val}"]
        elif self.dataset != FIRST:  # whose length the recipes have
            trainer = read_recipe(self.recipe, None).values["trainer"]
            epoch = QUESTIONS[self.dataset] // (trainer["batch_size"] * trainer["accumulate"])
            values += [f"trainer.steps={EPOCHS * epoch}", f"trainer.warmup_steps={min(trainer['warmup_steps'], epoch)}"]
            values += [f"trainer.{name}={epoch}" for name in ("validate_every", "save_every")]
        if self.starts_from is not None:
            values.append(f"base_lm.name={self.starts_from.path}")
        return tuple(values)

    def command(self, data: Path) -> str:
        """The command line that trains it on the data set in a folder."""
        words = ["python", "-m", "pipelines.train", "--config", self.recipe, "--output", self.folder]
        for value in self.overrides(data):
            words += ["--set", value]
        return shlex.join(words)


def tuned_lm(name: str, dataset: str) -> TrainedModel | None:
    """The LM that variants of a preset are trained around; None if no recipe tunes it on the data set."""
    return TrainedModel(name, "tune_qa", False, dataset) if name in PAPER and dataset in TUNING_SPLITS else None


def trained_on(path: str, dataset: str, name: str | None = None) -> str:
    """The path of the same model, trained on another data set, and around the LM of another preset if one is named."""
    model = TrainedModel.of(path)
    return replace(model, dataset=dataset, preset=name or model.preset).path


def models_to_train(paths: Iterable[str]) -> list[TrainedModel]:
    """The models of some paths that are missing, and the LMs that they start from, in the order of training.

    Raises:
        ConfigError: for a path that is none of a trained model.
    """
    needed: dict[str, TrainedModel] = {}
    for model in map(TrainedModel.of, paths):
        for each in (model.starts_from, model):
            if each is not None and not Path(each.path).is_dir():
                needed.setdefault(each.path, each)
    return list(needed.values())


@dataclass(frozen=True)
class Plan:
    """One experiment.

    Attributes:
        experiment: its name.
        paper: data sets of the paper's scale.
        newswire: True if the tiny scale runs it, on newswire.
        scaled: True if its command has the option --scale.
        tiny_arguments, paper_arguments: further arguments on newswire, and at the paper's scale.
        own_model: True if the model that it evaluates at the paper's scale is trained on the step's data set.
        trained_on: the data set of the option --trained-on at the paper's scale; empty without such an option.
        models: presets of the paper's scale, each for a step of its own; empty for the one of `eval.harness.scales`.
    """

    experiment: str
    paper: tuple[str, ...]
    newswire: bool = True
    scaled: bool = True
    tiny_arguments: tuple[str, ...] = ()
    paper_arguments: tuple[str, ...] = ()
    own_model: bool = False
    trained_on: str = ""
    models: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """One run of one experiment.

    Attributes:
        name: name of the experiment, and of the data set unless it is newswire; unique among the steps.
        arguments: arguments of its command, without --output.
        missing: the reason why the step cannot run; empty if it can.
    """

    name: str
    experiment: str
    arguments: tuple[str, ...]
    missing: str = ""

    def command(self, output: Path) -> tuple[str, ...]:
        """The module and its arguments, for `python -m`."""
        return (*command_of(self.experiment), *self.arguments, "--output", str(self.result(output)))

    def shown(self, output: Path) -> str:
        """The command line that the result file records."""
        return shlex.join(["python", "-m", *self.command(output)])

    def result(self, output: Path) -> Path:
        """The result file in the folder of results."""
        return output / f"{self.name}.json"


_PUBLISHED = ("--protocol", "published")


def _retrieval(dataset: str, *, newswire: bool = False, paper: bool = True) -> Plan:
    """Table 2 on one data set; the paper has ArchivalQA alone. On newswire all three commands do the same."""
    return Plan(
        dataset,
        (dataset,) if paper else (),
        newswire=newswire,
        scaled=False,
        tiny_arguments=("--retriever", "bm25", "--k", "1,3,5", "--documents", "512", "--questions", "256"),
        paper_arguments=("--retriever", "bm25,contriever,dpr", "--k", "1,3,5", "--documents", "1665", *_PUBLISHED),
        own_model=True,
    )


PLANS = (
    Plan(
        "main_table",
        DATASETS,
        tiny_arguments=("--questions", "500"),
        paper_arguments=_PUBLISHED,
        own_model=True,
        models=tuple(PAPER),
    ),
    _retrieval("archivalqa", newswire=True),
    _retrieval("squad", paper=False),
    _retrieval("streamingqa", paper=False),
    Plan("adaptation_cost", ("streamingqa",)),
    Plan("retention", ("streamingqa",)),
    Plan("dropout_memory", ("streamingqa",)),
    Plan("hierarchical", ("archivalqa",), own_model=True),
    Plan("cross_attention", ("streamingqa",)),
    Plan("reduction", ("streamingqa",)),
    Plan("peft", ("streamingqa",), paper_arguments=_PUBLISHED),
    Plan("ood", ("squad", "archivalqa"), trained_on="streamingqa", paper_arguments=_PUBLISHED),
    Plan("perplexity", ("streamingqa",)),
    Plan("amortization", ("streamingqa",), paper_arguments=_PUBLISHED),
    Plan("quantization", DATASETS, paper_arguments=_PUBLISHED),
    Plan("bank_size", (), scaled=False, tiny_arguments=("--sizes", "32,256,1665", "--questions", "512")),
    Plan("conflict", ("archivalqa",), own_model=True),
)


def steps(scale: Scale, data: Path | None, seed: int) -> list[Step]:
    """All steps of one scale. The tiny scale runs on newswire, the paper's on its data sets.

    Args:
        data: a folder with a folder for each data set, or for some of them; for the paper's scale alone.
    """
    if scale == "tiny":
        if data is not None:
            raise ConfigError(f"--data {data} is for --scale paper; the tiny scale runs on generated news")
        return [
            Step(plan.experiment, plan.experiment, (*_common(plan, scale, seed), *plan.tiny_arguments))
            for plan in PLANS
            if plan.newswire
        ]
    folders = {name: data / name for name in DATASETS if data is not None and (data / name).is_dir()}
    if data is not None and not folders:
        raise ConfigError(f"--data {data} has none of the folders {', '.join(DATASETS)}")
    return [
        _on_data(plan, dataset, folders, seed, name)
        for plan in PLANS
        for name in plan.models or (None,)
        for dataset in plan.paper
    ]


def _common(plan: Plan, scale: Scale, seed: int) -> tuple[str, ...]:
    return (*(("--scale", scale) if plan.scaled else ()), "--seed", str(seed))


def _on_data(plan: Plan, dataset: str, folders: Mapping[str, Path], seed: int, model: str | None) -> Step:
    """The step of an experiment on one data set, around the LM of a preset if one is named, at the paper's scale."""
    name = "-".join(dict.fromkeys(part for part in (plan.experiment, model, dataset) if part))
    arguments = [*_common(plan, "paper", seed)]
    needed = {"--data": dataset, **({"--trained-on": plan.trained_on} if plan.trained_on else {})}
    for option, each in needed.items():
        arguments += [option, str(folders.get(each, f"DATA/{each}"))]
    if plan.own_model:
        arguments += _own_model(plan, dataset, model)
    if model is not None and PAPER[model].base_lm.name not in _PROXIED:
        arguments += _LARGE
    lacking = [each for each in needed.values() if each not in folders]
    missing = f"no folder {' and no folder '.join(lacking)} in --data" if lacking else ""
    return Step(name, plan.experiment, (*arguments, *plan.paper_arguments), missing)


# LMs with the tokenizer of CaMeLS's proxy. Adam on all weights of another, LLaMA-2-7B, takes 112 GiB, and the paper has
# no CaMeLS of it, which needs more.
_PROXIED = {PAPER[name].base_lm.name for name in ("distilgpt2", "gpt2-large", "gpt2-xl")}
_LARGE = ("--methods", "zero-shot,few-shot,retriever,uniform,salient-spans,ccm,mac", "--lora-rank", "16")


def _own_model(plan: Plan, dataset: str, name: str | None) -> tuple[str, ...]:
    """Arguments that name the model trained on a data set, and the LM of its baselines if its own is in 4 bit."""
    setup = SCALES["paper"].get(plan.experiment, Setup(LARGEST, 0))
    whole = name is not None and PAPER[name].base_lm.quantization == "none"
    lm = () if setup.lm is None or whole else ("--lm", trained_on(setup.lm, dataset, name))
    return ("--model", trained_on(setup.model, dataset, name), *lm)


def models_needed(step: Step) -> list[str]:
    """The trained models that a step loads at the paper's scale, by path.

    Raises:
        ConfigError: for a preset that does not exist, or a model that no recipe trains.
    """
    setup = SCALES["paper"].get(step.experiment, Setup(LARGEST, 0))
    own = argument(step, "--model")
    name, lm = own or setup.model, argument(step, "--lm") or (setup.lm if own is None else None)
    paths = []
    if name in PRESETS:
        tuned = tuned_lm(name, Path(argument(step, "--data") or "").name)
        paths += [] if tuned is None else [tuned.path]
        if step.experiment == "perplexity":  # whose baselines start from the LM of a trained model
            paths.append(f"runs/{name}/train/best")
    else:
        preset(TrainedModel.of(name).preset)
        paths.append(name)
    if step.experiment in _UPDATING:
        paths += [] if lm is None else [lm]
    dataset = camels_of(step)
    return paths if dataset is None else [*paths, trained_on(PROXY, dataset)]


def camels_of(step: Step) -> str | None:
    """The data set on which a step trains CaMeLS, once for all steps; None for a step without CaMeLS."""
    if step.experiment not in _UPDATING or "camels" not in (argument(step, "--methods") or "camels"):
        return None
    return Path(argument(step, "--trained-on") or argument(step, "--data") or FIRST).name


def argument(step: Step, option: str) -> str | None:
    """The value of an option among a step's arguments."""
    return step.arguments[step.arguments.index(option) + 1] if option in step.arguments else None


class StepRecord(Config):
    """The outcome of one step; its result is `<name>.json`, and `reason` tells why it failed or was not run."""

    name: str
    experiment: str
    status: Literal["done", "failed", "not run"]
    reason: str = ""


def write_records(folder: Path, records: Sequence[StepRecord]) -> None:
    """Writes the records of a folder of results; the file is whole at any time."""
    write_text(folder / RECORDS, json.dumps([record.model_dump() for record in records], indent=1) + "\n")


def read_records(folder: Path) -> list[StepRecord]:
    """Reads the records of a folder of results; none if `eval.paper` has not run there."""
    path = folder / RECORDS
    if not path.exists():
        return []
    try:
        return [StepRecord.parse(record, path) for record in read_json(path, _LARGEST_FILE, follow=True)]
    except (ValueError, TypeError, ConfigError) as error:
        raise DataError(f"{path} is damaged; delete it: {error}") from None
