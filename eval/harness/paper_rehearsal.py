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
from eval.harness.variants import Part as Fresh
from eval.harness.variants import Training
from mac_rag.errors import MACError
from mac_rag.model.presets import PRESETS, merged, preset
from pipelines.plan import recipe_of
from pipelines.recipe import load_recipe
from pipelines.sizes import BASE_LM, Part, sizes_of
from pipelines.tasks.train_config import TrainConfig
from pipelines.tasks.tune_qa import TuneConfig

# Experiment -> name of a variant -> the part that starts anew at the tiny scale, and the changes of the recipe.
Variants = Mapping[str, Mapping[str, tuple[Fresh | None, Mapping[str, Any]]]]
# Experiments that update the LM on each document, with Adam and all weights in fp32; CaMeLS weighs tokens by a proxy.
_UPDATING = ("main_table", "adaptation_cost", "retention", "ood", "perplexity")
_PROXY = TrainedModel("distilgpt2", "tune_qa", False, "streamingqa")  # of CaMeLS
_BATCH = 32  # questions of one generation
_UPDATED = 16  # bytes of a weight in fp32 with its gradient and two moments
# Experiments with documents in front of the questions, and tokens of a prompt with and without them.
_READING = ("main_table", "archivalqa", "squad", "streamingqa", "contamination", "conflict")
_LONG, _SHORT = 2048, 128


@dataclass(frozen=True)
class Use:
    """What a step does with one model.

    Attributes:
        what: what it does.
        weights: number of weights of the model.
        bytes: estimated memory on one GPU; of an LM that is tuned or updated, without activations.
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
        scale: their scale. The models of the tiny scale are shipped, and their sizes are not shown.
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
    if model.task == "tune_qa":
        load_recipe(TuneConfig, model.recipe, list(model.overrides(data)))
        return _updates(f"trains {model.path}", model.preset)
    recipe = load_recipe(TrainConfig, model.recipe, list(model.overrides(data)))
    return _training(f"trains {model.path}", recipe, model.preset)


def _rehearsed(step: Step, scale: Scale, variants: Mapping[str, tuple[Fresh | None, Mapping[str, Any]]]) -> Rehearsed:
    found = Rehearsed(step)
    setup = SCALES[scale].get(step.experiment, Setup("mac-tiny", NEWSWIRE_DOCUMENTS))
    name = _argument(step, "--model") or setup.model
    documents = int(_argument(step, "--documents") or setup.documents)
    context = _LONG if step.experiment in _READING else _SHORT
    if scale == "tiny":
        return found
    try:
        base_lm = _argument(step, "--lm") or setup.lm
        if name in PRESETS:
            for variant, (fresh, changes) in variants.items():
                found.uses.append(_trains(name, step, variant, fresh, changes))
            tuned = tuned_lm(name, Path(_argument(step, "--data") or "").name)
            found.needs |= {} if tuned is None else {tuned.path: tuned}
            found.uses.append(_asks(f"{name}, trained", name, documents, context))
            lm = name
            if step.experiment == "perplexity":  # whose baselines start from the LM of a trained model
                found.needs |= _needed(f"runs/{name}/train/best")
        else:
            found.needs |= _needed(name)
            lm = TrainedModel.of(name).preset
            found.uses.append(_asks(name, lm, documents, context))
        if step.experiment in _UPDATING:
            found.needs |= {} if base_lm is None else _needed(base_lm)
            found.uses.append(_updates(f"updates the LM of {base_lm or name}", lm))
            found.needs[_PROXY.path] = _PROXY
            found.uses.append(_updates(f"updates the LM of {_PROXY.path}, the proxy of CaMeLS", _PROXY.preset))
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


def _asks(what: str, name: str, documents: int, context: int) -> Use:
    """Answering with a model of a preset's sizes."""
    parts = _sizes(name, documents, context)
    size = sum(sum(part.answering.values()) for part in parts.values())
    return Use(f"asks {what}, {documents:,} documents in the bank", _weights(parts), size)


def _trains(name: str, step: Step, variant: str, fresh: Fresh | None, changes: Mapping[str, Any]) -> Use:
    """Training a variant of a preset."""
    seed = int(_argument(step, "--seed") or 0)
    training = Training(name, _argument(step, "--data"), Path("variants"), seed, None, "paper")
    return _training(f"trains {name}: {variant}", training.recipe(fresh, changes), name)


def _training(what: str, recipe: TrainConfig, name: str) -> Use:
    """A training around the tuned LM of a preset, which need not be there yet: the published one has its sizes."""
    published = {"model": {"base_lm": {"name": preset(name).base_lm.name}}}
    parts = sizes_of(TrainConfig.parse(merged(recipe.model_dump(mode="json"), published), name))
    return Use(what, _weights(parts), sum(sum(part.training.values()) for part in parts.values()))


def _updates(what: str, name: str) -> Use:
    """Changing all weights of a preset's LM."""
    weights = _sizes(name)[BASE_LM].weights
    return Use(what, weights, _UPDATED * weights)


@cache
def _sizes(name: str, documents: int = 1, context: int = _SHORT) -> dict[str, Part]:
    preset(name)  # raises an error for a name that is no preset's, where a recipe may have it
    return sizes_of(recipe_of(name), documents, _BATCH, context)


def _weights(parts: Mapping[str, Part]) -> int:
    return sum(part.weights for part in parts.values())
