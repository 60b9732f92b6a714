"""Variants of MAC: trained by one recipe with one change each, cached, and evaluated on the same questions.

At the paper's scale a variant is trained by the recipe of a preset (`pipelines/recipes/<preset>/train.yaml`), around
the LM that was tuned on questions of the data set before (`runs/<preset>/tune_qa/best`). At the tiny scale one part of
a trained model is initialized anew, and the model trains for a minute or two on stories of one sentence. A whole new
model would not leave its plateau in that time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from eval.harness.command import report
from eval.harness.paper_plan import tuned_lm
from eval.harness.protocol import samples
from eval.harness.results import Row, Verdict, published_lm
from eval.harness.scales import Protocol, Scale, Setup
from eval.harness.streams import locked, named_data, open_stream, write_once
from eval.harness.systems import MACSystem, ask
from mac_rag.atomic_files import write_folder
from mac_rag.cli.terminal import say
from mac_rag.config import MACConfig
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document, QADataset
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError
from mac_rag.lm.loading import resolve
from mac_rag.model import AmortizedModel
from mac_rag.model.checkpoint import find, read_config
from mac_rag.model.presets import PAPER, merged, preset
from mac_rag.progress import progress_bar
from pipelines.recipe import load_recipe
from pipelines.tasks.registry import run_task
from pipelines.tasks.train_config import TrainConfig

Part = Literal["amortization", "aggregation", "modulation"]
STEPS = 250  # about a minute on one core
STORIES = 4_000  # STEPS batches of 16
# For stories of one sentence; the losses are those of mac-tiny's recipe without the reconstruction.
TINY: dict[str, Any] = {
    "losses": {"answer": 1.0, "direct": 1.0, "contrastive": 0.5},
    "negatives": 512,
    "trainer": {
        "batch_size": 16,
        "learning_rate": 1.0e-3,
        "warmup_steps": 20,
        "schedule": "cosine",
        "weight_decay": 0.01,
        "betas": [0.9, 0.98],
        "clip": 1.0,
        "save_every": 100,
    },
}


@dataclass(frozen=True)
class Variant:
    """One variant of MAC.

    Attributes:
        name: name of its row in the table.
        settings: further settings of its row; `method` is the name unless it is among them.
        measures: figures of its row that were measured before.
    """

    name: str
    recipe: TrainConfig
    settings: Mapping[str, str | int | float] = field(default_factory=dict)
    measures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Training:
    """The training of the variants of one experiment.

    Attributes:
        model: the MAC model whose parts are kept at the tiny scale; a preset at the paper's.
        data: the value of `--data`; None for newswire, each story cut to its first sentence.
        runs: folder of the trained models; equal variants are trained once, and an interrupted training continues.
        seed: random seed of data and training.
        steps, learning_rate: those of each training; None for the scale's.
        scale: `tiny` or `paper`.

    Raises:
        ConfigError: if the model is no preset at the paper's scale, or there is no data at that scale.
    """

    model: str
    data: str | None
    runs: Path
    seed: int
    steps: int | None
    scale: Scale
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        if self.scale == "paper":
            preset(self.model)
            if self.data is None:
                raise ConfigError("--scale paper trains on the paper's data sets; give one with --data")

    def recipe(self, fresh: Part | None, changes: Mapping[str, Any] | None = None) -> TrainConfig:
        """The recipe of one variant.

        Args:
            fresh: the part that is initialized anew at the tiny scale; None for none.
            changes: changed values of the recipe, also of `model`; see `pipelines.tasks.train.TrainConfig`.

        Raises:
            ConfigError: for a value that the recipe cannot have.
        """
        changes = dict(changes or {})
        if self.scale == "paper":
            return self._paper(changes)
        folder = find(self.model, None)
        config = read_config(folder)
        base_lm = {"name": resolve(config.base_lm.name, folder)}
        values = merged(config.model_dump(mode="json"), merged({"base_lm": base_lm}, changes.pop("model", {})))
        start = grafted(MACConfig.parse(values, "the variant"), folder, fresh, self.runs / "starts", self.seed)
        steps = self.steps or STEPS
        trainer: dict[str, Any] = {"steps": steps, "validate_every": steps, "seed": self.seed}
        trainer |= {} if self.learning_rate is None else {"learning_rate": self.learning_rate}
        recipe = {**TINY, "start_from": str(start), "data": changes.pop("data", None) or self._data()}
        return TrainConfig.parse(merged(merged(recipe, {"trainer": trainer}), changes), "the variant")

    def _paper(self, changes: Mapping[str, Any]) -> TrainConfig:
        name, folder = named_data(self.data or "")
        overrides = [f"data.name={name}", f"data.path={folder}", f"trainer.seed={self.seed}"]
        recipe_name = f"{self.model}/train"
        lm = tuned_lm(self.model, name)
        overrides += [] if lm is None else [f"base_lm.name={lm.path}"]
        if self.model not in PAPER:
            recipe_name = "small-lm/train"
            overrides += [f"preset={self.model}"]
        overrides += [] if self.steps is None else [f"trainer.steps={self.steps}"]
        overrides += [] if self.learning_rate is None else [f"trainer.learning_rate={self.learning_rate}"]
        recipe = load_recipe(TrainConfig, recipe_name, overrides)
        return TrainConfig.parse(merged(recipe.model_dump(mode="json"), changes), recipe_name)

    def _data(self) -> dict[str, Any]:
        if self.data is not None:
            name, folder = named_data(self.data)
            return {"name": name, "path": str(folder), "validation_documents": 32}
        folder = self.runs / f"stories-{self.seed}"
        for split, count in (("train", STORIES), ("val", 32)):
            write_once(folder / f"{split}.csv", partial(stories, split, count, self.seed))
        return {"name": "archivalqa", "path": str(folder), "validation_documents": 32}


def stories(split: str, count: int, seed: int) -> QADataset:
    """Newswire stories of one sentence, the lead that names the subject and one fact, with one question each."""
    whole = generate(split, count, seed=seed, questions_per_document=4, update_rate=0.0)
    leads = [re.split(r"(?<=[.!?])\s+(?=[A-Z])", document.text)[1] for document in whole.documents]
    documents = [Document(document.id, lead, document.metadata) for document, lead in zip(whole.documents, leads)]
    questions = [question for question in whole.questions if question.id.endswith("-0")]
    return QADataset("newswire", split, tuple(documents), tuple(questions))


def grafted(config: MACConfig, trained: Path, fresh: Part | None, folder: Path, seed: int) -> Path:
    """Makes a checkpoint with the weights of a trained model, except one part, whose weights are new; makes it once.

    Args:
        config: configuration of the new model; only the fresh part may have other sizes.
        trained: folder of the trained checkpoint.
        fresh: the part with new weights, initialized as for training from scratch; its frozen weights are kept. None
            for no part.
        folder: folder of such checkpoints.
    """
    place = folder / _digest(config.model_dump_json(), str(trained.resolve()), str(fresh), str(seed))
    with locked(place):
        if not place.exists():
            torch.manual_seed(seed)
            model = AmortizedModel.from_config(config, device="cpu")
            trained_weights = AmortizedModel.from_pretrained(trained, device="cpu").mac_state()
            with torch.no_grad():
                for name, parameter in model.mac_state().items():
                    if not (name.startswith(f"{fresh}.") and parameter.requires_grad):
                        parameter.copy_(trained_weights[name])
            with write_folder(place) as new:
                model.save_pretrained(new)
    return place


def trained(recipe: TrainConfig, runs: Path) -> AmortizedModel:
    """Trains a model, or loads it if the training of an equal recipe is finished; an interrupted one continues.

    Raises:
        QuantizationError: if this machine cannot train the model.
    """
    place = runs / _digest(recipe.model_dump_json())
    with locked(place):
        if not (place / "last").exists():
            run_task("train", recipe, place)
    return AmortizedModel.from_pretrained(place / "best")


def run_variants(
    experiment: str,
    variants: Sequence[Variant],
    training: Training,
    setup: Setup,
    path: Path,
    *,
    batch_size: int,
    options: dict[str, Any],
    notes: Sequence[str] = (),
    not_run: Mapping[str, str] | None = None,
    further: Sequence[Row] = (),
    protocol: Protocol = "strict",
) -> None:
    """Trains variants, asks all of them the same questions from memory alone, and writes the result.

    Args:
        training: the training that made their recipes.
        setup: number of documents and questions of the test stream.
        options, notes, not_run: see `eval.harness.command.report`.
        further: rows that need no training.
        protocol: how answers are decoded and scored.
    """
    if training.data is None:
        dataset, source = stories("test", setup.documents, training.seed), "generated"
    else:
        size = setup.documents, setup.questions
        dataset, source = open_stream(
            training.data, "test", *size, seed=training.seed, scale=training.scale, protocol=protocol
        )
    rows: list[Row] = []
    verdicts: dict[str, list[Verdict]] = {}
    for variant in variants:
        say(variant.name, err=True)
        model = trained(variant.recipe, training.runs)
        row, verdicts[variant.name] = evaluate(variant.name, model, dataset, batch_size, protocol)
        lm = (published_lm(model.base_lm.model.config) or training.model).rsplit("/", 1)[-1]
        settings = {"method": variant.name, "dataset": dataset.name, "model": lm, **variant.settings}
        measures = {**row.measures, **variant.measures}
        rows.append(row.model_copy(update={"settings": settings, "measures": measures}))
    report(
        path,
        experiment=experiment,
        options=options,
        rows=[*rows, *further],
        samples=samples(dataset.questions, verdicts) if verdicts else (),
        dataset=dataset,
        source=source,
        notes=notes,
        not_run=not_run,
        table=rows,
    )


def evaluate(
    name: str, model: AmortizedModel, dataset: QADataset, batch_size: int, protocol: Protocol = "strict"
) -> tuple[Row, list[Verdict]]:
    """Adapts a model to a stream and asks its questions from memory alone; the row has the measure `answer_loss`, see
    there.
    """
    system = MACSystem(model, batch_size=batch_size, protocol=protocol)
    system.adapt(dataset.documents)
    row, verdicts = ask(name, system, dataset.questions, len(dataset.documents), protocol)
    with torch.no_grad():
        loss = answer_loss(model, system.engine, dataset, batch_size)
    return row.model_copy(update={"seconds": None, "settings": {}, "measures": {"answer_loss": loss}}), verdicts


def answer_loss(model: AmortizedModel, engine: MACEngine, dataset: QADataset, batch_size: int) -> float:
    """Mean negative log-likelihood, in nats a token, of the answers under phi* (equation 2)."""
    prompts = model.base_lm.prompts
    bank = model.project(engine.bank.phi)
    total, tokens = 0.0, 0
    with progress_bar("answer loss", len(dataset.questions)) as bar:
        for first in range(0, len(dataset.questions), batch_size):
            batch = dataset.questions[first : first + batch_size]
            phi = model.aggregate([question.question for question in batch], bank)
            targets = [prompts.answer(question.answers[0]) for question in batch]
            losses = model.base_lm.answer_loss(
                [prompts.prompt(question.question) for question in batch], targets, model.modulation(phi)
            )
            total += float(losses.sum())
            tokens += sum(map(len, targets))
            bar.advance(len(batch))
    return total / tokens


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]
