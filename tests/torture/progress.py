"""How far a part of the torture has come, kept in a file, so that the next run goes on from there."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path("build/torture")


@dataclass
class Progress:
    """What the trials of a part have shown.

    Attributes:
        part: name of the part.
        commits: of the library, while the trials ran, first to last; with a `+` if files were changed since.
        goal: the number of trials of a whole run.
        next: seed of the next trial.
        seconds: time that the trials have taken.
        slowest: seconds and seed of the slowest trial that ended.
        tried: number of trials by what they tried.
        failures: seed, kind of trial, kind of failure and message of each trial that failed.
    """

    part: str
    commits: list[str]
    goal: int
    next: int = 0
    seconds: float = 0.0
    slowest: tuple[float, int] = (0.0, 0)
    tried: dict[str, int] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def load(cls, part: str, folder: Path = FOLDER) -> Progress | None:
        """What a part has left; None if it has never run."""
        path = folder / f"{part}.json"
        if not path.exists():
            return None
        content = json.loads(path.read_text())
        return cls(**{**content, "slowest": tuple(content["slowest"])})

    def save(self, folder: Path = FOLDER) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f"{self.part}.json.new"
        unfinished.write_text(json.dumps(asdict(self), indent=1))
        os.replace(unfinished, folder / f"{self.part}.json")

    def failed(self, seed: int, kind: str, failure: str, message: str) -> None:
        self.failures.append({"seed": seed, "kind": kind, "failure": failure, "message": message})


def commit() -> str:
    """The last commit that changed the library; with a `+` if it was changed since."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], capture_output=True, text=True, check=True).stdout.strip()

    return git("log", "-1", "--format=%h", "--", "mac_rag") + ("+" if git("status", "--porcelain", "mac_rag") else "")
