"""The type of the `command` fixture, and small results made by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from eval.harness.results import Commit, Data, Model, Result, Row, Sample, Verdict
from mac_rag.data.types import Question

# Runs `python -m <module> <arguments>`; returns exit code, standard output and standard error.
Command = Callable[..., tuple[int, str, str]]


class Evaluated(NamedTuple):
    """What an experiment wrote, its rows by their names, and what it printed."""

    result: Result
    rows: dict[str, Row]
    samples: tuple[Sample, ...]
    shown: str


Evaluate = Callable[..., Evaluated]
COMMIT = Commit(commit="0123456789abcdef0123456789abcdef01234567", dirty=False)


def verdict(score: float) -> Verdict:
    return Verdict(
        prediction=f"said {score}", em=float(score == 1), f1=score, em_prefix=score, retrieved=(), truncated=False
    )


def samples(scores: Mapping[str, Sequence[float]], *, first: int = 0) -> list[Sample]:
    """One sample for each score; the i-th is about question `first + i`."""
    [count] = {len(column) for column in scores.values()}
    return [
        Sample.of(
            Question(f"q{first + i}", f"What is {first + i}?", (f"answer {first + i}",), f"d{first + i}"),
            {name: verdict(column[i]) for name, column in scores.items()},
        )
        for i in range(count)
    ]


def result(experiment: str, rows: Sequence[Row] = (), **changes: Any) -> Result:
    values: dict[str, Any] = {
        "experiment": experiment,
        "scale": "tiny",
        "created": "2026-01-02T03:04:05+00:00",
        "command": f"python -m eval.{experiment}",
        "config": {"model": "mac-tiny", "seed": 0},
        "seed": 0,
        "versions": {"python": "3.11.2", "torch": "2.10.0"},
        "git": COMMIT,
        "model": Model(
            name="mac-tiny",
            fingerprint="ab" * 32,
            answer_digest="cd" * 32,
            device="cpu",
            config={"base_lm": {"name": "./base_lm"}, "tokens": 8},
        ),
        "data": Data(name="newswire", split="test", source="generated", documents=7, questions=3),
        "rows": tuple(rows),
    }
    return Result(**(values | changes))


def scored(name: str, f1: float, **settings: str | int | float) -> Row:
    return Row(name=name, settings=settings, em=f1 / 2, f1=f1, em_prefix=f1, questions=100, seconds=2.0)
