"""A rehearsal of `eval.paper`: what each step would run, with the true sizes of its models and without weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from eval.harness.command import NEWSWIRE_DOCUMENTS
from eval.harness.paper_models import TrainedModel, tuned_lm, with_starts
from eval.harness.paper_plan import Step
from eval.harness.scales import SCALES, Scale, Setup
from eval.harness.variants import Part, Training
from mac_rag.config import BaseLMConfig
from mac_rag.errors import MACError
from mac_rag.model.presets import PRESETS, merged, preset
from pipelines.planning.answering import Asking
from pipelines.planning.report import make_plan
from pipelines.planning.subject import Subject, subject
from pipelines.recipe import load_recipe
from pipelines.tasks.train_config import TrainConfig
from pipelines.tasks.tune_qa import TuneConfig

# Experiment -> name of a variant -> the part that starts anew at the tiny scale, and the changes of the recipe.
Variants = Mapping[str, Mapping[str, tuple[Part | None, Mapping[str, Any]]]]
# Experiments that update the LM on each document, with Adam and all weights in fp32; CaMeLS weighs tokens by a proxy.
_UPDATING = ("main_table", "adaptation_cost", "retention", "ood", "perplexity")
_PROXY = TrainedModel("distilgpt2", "tune_qa", False, "streamingqa")  # of CaMeLS
_BATCH = 32  # questions of one generation
# Experiments with documents in front of the questions, and tokens of a prompt with and without them.
_READING = ("main_table", "archivalqa", "squad", "streamingqa", "contamination", "conflict")
_LONG, _SHORT = 2048, 128
_PASSAGE = 1024  # tokens of a document that the LM is updated on at once, at most


@dataclass(frozen=True)
class Use:
    """What a step does with one model.

    Attributes:
        what: what it does.
        weights: number of weights of the model.
        bytes: estimated memory on one GPU.
    """

    what: str
    weights: int
    bytes: int


@dataclass
class Rehearsed:
    """A step that was walked through.

    Attributes:
        step: the step.
        needs: trained models that it loads, by path.
        uses: what it does with models.
        fault: why it could not run, other than for data and models that are missing; empty if it could.
    """

    step: Step
    needs: dict[str, TrainedModel] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    fault: str = ""


def rehearse(steps: Sequence[Step], scale: Scale, variants: Variants) -> list[Rehearsed]:
    """Walks through steps: every model is built from its true sizes, and every recipe is read.

    Args:
        steps: the steps.
        scale: their scale. At the tiny scale trained variants of a model are as large as the model.
        variants: the variants that experiments train at the paper's scale.
    """
    return [_rehearsed(step, scale, variants.get(step.experiment, {})) for step in steps]


def models_to_train(rehearsed: Iterable[Rehearsed]) -> list[TrainedModel]:
    """The trained models that steps without faults need and that are not there, in the order in which to train them."""
    needed = {path: model for each in rehearsed if not each.fault for path, model in each.needs.items()}
    return [model for model in with_starts(needed) if not Path(model.path).is_dir()]


def training_use(model: TrainedModel, data: Path) -> Use:
    """The training of a model.

    Args:
        model: the model.
        data: folder of its data set.

    Raises:
        ConfigError: for a recipe that cannot be read with its values.
    """
    kind: type[TrainConfig] | type[TuneConfig] = TrainConfig if model.task == "train" else TuneConfig
    recipe = load_recipe(kind, model.recipe, list(model.overrides(data)))
    plan = make_plan(Subject(model.path, _with_published_lm(recipe, model.preset)), Asking())
    return Use(f"trains {model.path}", sum(plan.parameters.values()), plan.training.total)


def _rehearsed(step: Step, scale: Scale, variants: Mapping[str, tuple[Part | None, Mapping[str, Any]]]) -> Rehearsed:
    found = Rehearsed(step)
    setup = SCALES[scale].get(step.experiment, Setup("mac-tiny", NEWSWIRE_DOCUMENTS))
    name = _argument(step, "--model") or setup.model
    documents = int(_argument(step, "--documents") or setup.documents)
    asking = Asking(documents, _BATCH, _LONG if step.experiment in _READING else _SHORT)
    try:
        if scale == "tiny":
            found.uses.append(_asks(name, name, asking))
            return found
        base_lm = _argument(step, "--lm") or setup.lm
        if name in PRESETS:
            for variant, (fresh, changes) in variants.items():
                found.uses.append(_trains(name, step, variant, fresh, changes))
            tuned = tuned_lm(name, Path(_argument(step, "--data") or "").name)
            found.needs |= {} if tuned is None else {tuned.path: tuned}
            found.uses.append(_asks(f"{name}, trained", name, asking))
            lm = preset(name).base_lm
            if step.experiment == "perplexity":  # whose baselines start from the LM of a trained model
                found.needs |= _needed(f"runs/{name}/train/best")
        else:
            found.needs |= _needed(name)
            model = TrainedModel.of(name)
            lm = preset(model.preset).base_lm
            found.uses.append(_asks(name, name if Path(name).is_dir() else model.preset, asking))
        if step.experiment in _UPDATING:
            found.needs |= {} if base_lm is None else _needed(base_lm)
            found.uses.append(_updates(base_lm or name, lm))
            found.needs[_PROXY.path] = _PROXY
            found.uses.append(_updates(f"{_PROXY.path}, the proxy of CaMeLS", preset(_PROXY.preset).base_lm))
    except MACError as error:
        found.fault = str(error)
    return found


def _needed(path: str) -> dict[str, TrainedModel]:
    return {path: TrainedModel.of(path)}


def _argument(step: Step, option: str) -> str | None:
    """The value of an option among a step's arguments."""
    if option not in step.arguments:
        return None
    return step.arguments[step.arguments.index(option) + 1]


@cache
def _asks(what: str, name: str, asking: Asking) -> Use:
    """Answering with a preset or a MAC model."""
    plan = make_plan(subject(name), asking)
    assert plan.answering is not None
    what = f"asks {what}, {asking.documents:,} documents in the bank"
    return Use(what, sum(plan.parameters.values()), plan.answering.total)


def _trains(name: str, step: Step, variant: str, fresh: Part | None, changes: Mapping[str, Any]) -> Use:
    """Training a variant of a preset."""
    seed = int(_argument(step, "--seed") or 0)
    training = Training(name, _argument(step, "--data"), Path("variants"), seed, None, "paper")
    plan = make_plan(Subject(variant, _with_published_lm(training.recipe(fresh, changes), name)), Asking())
    return Use(f"trains {name}: {variant}", sum(plan.parameters.values()), plan.training.total)


@cache
def _updates(what: str, base_lm: BaseLMConfig) -> Use:
    """Updating all weights of an LM by the tokens of one document at a time."""
    recipe = TuneConfig.model_validate(
        {
            "base_lm": base_lm.model_copy(update={"quantization": "none"}).model_dump(),
            "context": {"retriever": "bm25"},
            "sequence_length": _PASSAGE,
            "trainer": {"steps": 1, "batch_size": 1, "learning_rate": 1e-5},
        }
    )
    plan = make_plan(Subject(what, recipe), Asking())
    return Use(f"updates the LM of {what}", sum(plan.parameters.values()), plan.training.total)


def _with_published_lm(recipe: TrainConfig | TuneConfig, name: str) -> TrainConfig | TuneConfig:
    """A recipe around the published LM in place of the tuned one, which has its sizes and is not there yet."""
    published = preset(name).base_lm.name
    changes: dict[str, Any] = {"base_lm": {"name": published}}
    if isinstance(recipe, TrainConfig):
        changes = {"model": changes}
    return type(recipe).parse(merged(recipe.model_dump(mode="json"), changes), name)
