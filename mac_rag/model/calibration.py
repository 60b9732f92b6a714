"""The calibration of a model: maps evidence about an answer to the probability that the answer is right.

A logistic model over a few numbers, fitted once for each way of answering (`python -m pipelines.calibrate`). It is
stored in `calibration.json` beside the weights that it was fitted for, and is valid for no others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from mac_rag.atomic_files import write_text
from mac_rag.config import Config
from mac_rag.errors import ConfigError, ModelLoadError
from mac_rag.untrusted_files import MalformedError, read_json

FILE = "calibration.json"
FORMAT = 1
_LARGEST = 1 << 16
_PENALTY = 1.0  # factor of half the squared weights of standardised evidence; keeps them finite for any labels
_STEPS = 100

# Kinds of evidence about an answer; see `mac_rag.asking.evidence_of`.
Evidence: TypeAlias = Literal[
    "prior",
    "prior_odds",
    "first_log_probability",
    "log_probability",
    "log_probability_without_memory",
    "repetition",
    "support",
    "abstention",
    "answering_odds",
]
EVIDENCE: tuple[Evidence, ...] = get_args(Evidence)
# Ways of answering: from memory alone, or from documents before the question, with or without memory.
Mode: TypeAlias = Literal["memory", "documents"]

_Number: TypeAlias = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]


class Logistic(Config):
    """A logistic model, `1 / (1 + exp(-(bias + sum(weight * evidence))))`.

    Examples:
        >>> model = Logistic(weights={"prior": 2.0, "log_probability": 1.0}, bias=-1.0, questions=400, data="squad")
        >>> model.probability(torch.tensor([[0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]))
        tensor([0.5000])

    Attributes:
        weights: the weight of each kind of evidence; a missing one counts as 0.
        bias: the bias.
        questions: number of questions that it was fitted on.
        data: name of the data that they come from.
    """

    weights: dict[Evidence, _Number]
    bias: _Number
    questions: int = Field(ge=1)
    data: str = Field(max_length=200)

    def probability(self, evidence: Tensor) -> Tensor:
        """The probability `[B]` that each answer is right, from its evidence `[B, len(EVIDENCE)]`."""
        weights = torch.tensor([self.weights.get(name, 0.0) for name in EVIDENCE], dtype=torch.float64)
        return torch.sigmoid(evidence.double() @ weights + self.bias).float()

    @classmethod
    def fit(cls, evidence: Tensor, right: Sequence[bool], data: str) -> Logistic:
        """The maximum-likelihood fit with a small ridge penalty, by Newton's method; deterministic.

        Args:
            evidence: `[N, len(EVIDENCE)]`, finite.
            right: for each of the N answers, True if it is right.
            data: name of the data that they come from.

        Raises:
            ConfigError: if all answers are right, or none is.
        """
        labels = torch.tensor(right, dtype=torch.float64)
        if not 0 < labels.sum() < len(labels):
            raise ConfigError(
                f"{int(labels.sum())} of the {len(labels)} answers are right, so no confidence can be fitted; give "
                "questions of which the model answers only some"
            )
        numbers = evidence.double()
        mean, scale = numbers.mean(0), numbers.std(0)
        scale = torch.where(scale > 1e-9, scale, torch.inf)  # constant evidence gets weight 0
        inputs = functional.pad((numbers - mean) / scale, (0, 1), value=1.0)
        penalty = torch.full((inputs.shape[1],), _PENALTY, dtype=torch.float64)
        penalty[-1] = 0.0
        solution = torch.zeros(inputs.shape[1], dtype=torch.float64)

        def loss(values: Tensor) -> Tensor:
            logits = inputs @ values
            return (
                functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
                + (penalty * values**2).sum() / 2
            )

        for _ in range(_STEPS):
            said = torch.sigmoid(inputs @ solution)
            gradient = inputs.T @ (said - labels) + penalty * solution
            curvature = (inputs.T * (said * (1 - said))) @ inputs + penalty.diag()
            curvature[-1, -1] += 1e-9
            step, size = torch.linalg.solve(curvature, gradient), 1.0
            while loss(solution - size * step) > loss(solution) and size > 1e-6:
                size /= 2
            solution = solution - size * step
            if float(step.abs().max()) < 1e-10:
                break
        weights = solution[:-1] / scale
        return cls(
            weights={name: float(weight) for name, weight in zip(EVIDENCE, weights, strict=True)},
            bias=float(solution[-1] - (weights * mean).sum()),
            questions=len(labels),
            data=data,
        )


class Calibration(Config):
    """The logistic models of a checkpoint.

    Attributes:
        fingerprint: fingerprint of the model that they were fitted for.
        modes: way of answering -> its logistic model, for those that were fitted.
    """

    fingerprint: str = Field(pattern="^[0-9a-f]{64}$")
    modes: dict[Mode, Logistic]

    def write(self, folder: Path) -> None:
        """Writes `calibration.json` into the folder of a checkpoint."""
        text = json.dumps({"format": FORMAT, **self.model_dump(mode="json")}, indent=2)
        write_text(folder / FILE, text + "\n")


def read_calibration(folder: Path) -> Calibration | None:
    """The calibration in the folder of a checkpoint; None without one.

    Raises:
        ModelLoadError: for a file that cannot be read, or is of another format.
    """
    path = folder / FILE
    try:
        values = read_json(path, _LARGEST, follow=True)
    except FileNotFoundError:
        return None
    except (OSError, MalformedError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}; fit it again, or remove it") from error
    if not isinstance(values, Mapping) or values.get("format") != FORMAT:
        raise ModelLoadError(f"{path} has no format {FORMAT}, which this version reads; fit it again, or remove it")
    try:
        return Calibration.parse({name: value for name, value in values.items() if name != "format"}, path)
    except ConfigError as error:
        raise ModelLoadError(f"{error}\nfit it again, or remove it") from error
