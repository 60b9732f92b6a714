"""The trained models that the steps of `eval.paper` need at the paper's scale, and the commands that make them.

`runs/<preset>/<stage>/best` is trained on StreamingQA, `runs/<preset>/<stage>-<data set>/best` on another data set. MAC
is trained around an LM that was tuned on questions before: `runs/<preset>/tune_qa/best`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mac_rag.errors import ConfigError
from mac_rag.model.presets import PAPER

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
    """A model that a recipe leaves.

    Attributes:
        preset: name of the preset.
        task: `train`, or `tune_qa` for the LM alone.
        joint: True for a training with retrieved documents.
        dataset: the data set that it is trained on.
    """

    preset: str
    task: str
    joint: bool
    dataset: str

    @classmethod
    def of(cls, path: str) -> TrainedModel:
        """The model of a path.

        Raises:
            ConfigError: for a path of another form.
        """
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
        return f"{self.preset}/{self.task}{_JOINT if self.joint and self.task == 'train' else ''}"

    def overrides(self, data: Path) -> tuple[str, ...]:
        """Values of the recipe, as `--set` takes them.

        Args:
            data: folder of the data set.
        """
        values = [f"data.name={self.dataset}", f"data.path={data}"]
        if self.task == "tune_qa":
            train, val = TUNING_SPLITS[self.dataset]
            values += [f"data.train={train}", f"data.val={val}"]
            # The LM that is tuned without documents is the start of the baselines and of MAC without retrieval.
            values += ["context.retriever=bm25", "context.k=[1,3,5]"] if self.joint else ["context.retriever=none"]
        if self.starts_from is not None:
            values.append(f"base_lm.name={self.starts_from.path}")
        return tuple(values)

    def command(self, data: Path) -> str:
        """The command line that trains it; the argument is that of `overrides`."""
        words = ["python", "-m", f"pipelines.{self.task}", "--config", self.recipe, "--output", self.folder]
        for value in self.overrides(data):
            words += ["--set", value]
        return shlex.join(words)


def tuned_lm(name: str, dataset: str) -> TrainedModel | None:
    """The LM that variants of a preset are trained around; None where no recipe tunes it on the data set.

    Args:
        name: name of the preset.
        dataset: name of the data set.
    """
    return TrainedModel(name, "tune_qa", False, dataset) if name in PAPER and dataset in TUNING_SPLITS else None


def trained_on(path: str, dataset: str) -> str:
    """The path of the same model, trained on another data set."""
    model = TrainedModel.of(path)
    return TrainedModel(model.preset, model.task, model.joint, dataset).path


def with_starts(models: Mapping[str, TrainedModel]) -> list[TrainedModel]:
    """Models by path, each behind the LM that it starts from, each once."""
    found: dict[str, TrainedModel] = {}
    for model in models.values():
        if model.starts_from is not None:
            found.setdefault(model.starts_from.path, model.starts_from)
        found.setdefault(model.path, model)
    return list(found.values())
