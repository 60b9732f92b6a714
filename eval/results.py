"""The result of an evaluation: what was run, on what, and what came out of it, down to each sample."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from eval.bootstrap import Interval
from mac_rag.config import Config
from mac_rag.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mac_rag.data.types import Question

SCHEMA_VERSION = 2
PACKAGES = (
    "mac-rag",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "bm25s",
    "rank-bm25",
    "PyStemmer",
)


class Verdict(Config):
    """What one row answered to one question, and how good that was.

    Attributes:
        em, f1, em_prefix: against whichever accepted answer fits best.
        retrieved: ids of the retrieved documents, the best first.
        truncated: whether documents were shortened to fit the LM's window.
    """

    prediction: str
    em: float
    f1: float
    em_prefix: float
    retrieved: tuple[str, ...]
    truncated: bool


class Sample(Config):
    """One question and what each row, by name, answered to it; `hash` is the sha256 of all the rest."""

    id: str
    question: str
    answers: tuple[str, ...]
    document_id: str
    rows: dict[str, Verdict]
    hash: str

    @classmethod
    def of(cls, question: Question, rows: dict[str, Verdict]) -> Sample:
        content = {
            "id": question.id,
            "question": question.question,
            "answers": list(question.answers),
            "document_id": question.document_id,
            "rows": {name: verdict.model_dump(mode="json") for name, verdict in rows.items()},
        }
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return cls.model_validate({**content, "hash": hashlib.sha256(text.encode()).hexdigest()})


class Gain(Config):
    """What the memory adds: the difference to the same prompts without it, with paired bootstrap intervals."""

    em: Interval
    f1: Interval


class Row(Config):
    """One line of the table: a way of answering, over all questions.

    Attributes:
        k: documents retrieved for each question; None without a retriever.
        documents: size of the stream that the answers were drawn from.
        em, f1, em_prefix: means over the questions, 0 to 1.
        recall_at_k: share of questions whose document was retrieved; None without a retriever.
        gain: over the row of the same prompts without the memory; None for a row without it.
        truncated: prompts whose documents were shortened to fit the LM's window.
        seconds: of answering.
    """

    name: str
    k: int | None
    documents: int
    questions: int
    em: float
    f1: float
    em_prefix: float
    recall_at_k: float | None
    gain: Gain | None = None
    truncated: int
    seconds: float


class Adaptation(Config):
    """Adapting to the stream.

    Attributes:
        rows: rows of memory tokens written; a document has one, or several if it was chunked.
        chunked: documents that were longer than the model's limit.
        seconds: of encoding the documents and giving them to the retriever.
    """

    documents: int
    rows: int
    chunked: int
    seconds: float


class Data(Config):
    """Where documents and questions came from; `source` is a path, or `generated`."""

    name: str
    split: str
    source: str
    documents: int
    questions: int


class Model(Config):
    """The model: its name or path, the fingerprint of its weights, its configuration, where it ran."""

    name: str
    fingerprint: str
    device: str
    config: dict[str, Any]


class Commit(Config):
    """The commit of the checkout, and whether files differed from it."""

    commit: str
    dirty: bool


class Result(Config):
    """The whole result file.

    Attributes:
        created: UTC, ISO 8601.
        config: every option of the command.
        versions: of Python, the platform and the libraries that take part.
        git: None outside a checkout.
    """

    schema_version: int = SCHEMA_VERSION
    benchmark: str
    created: str
    command: str
    config: dict[str, Any]
    seed: int
    versions: dict[str, str]
    git: Commit | None
    model: Model
    data: Data
    adaptation: Adaptation
    rows: tuple[Row, ...]
    samples: tuple[Sample, ...]

    def write(self, path: Path) -> None:
        """Writes the result as JSON; the file is either whole or not there."""
        partial = path.with_name(path.name + ".partial")
        with partial.open("w", encoding="utf-8") as file:
            file.write(self.model_dump_json(indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


def provenance(benchmark: str) -> dict[str, Any]:
    """What every result says about the run itself: time, command, versions and commit."""
    return {
        "benchmark": benchmark,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", f"eval.{benchmark}", *sys.argv[1:]]),
        "versions": _versions(),
        "git": _commit(),
    }


def result_path(output: Path | None, benchmark: str) -> Path:
    """Where a result will be written; called before the work, so that no hour of it is lost to a bad path.

    Raises:
        ConfigError: when the path cannot be a file.
    """
    path = output or Path("results") / f"{benchmark}-{datetime.now():%Y%m%d-%H%M%S}.json"
    if path.is_dir():
        raise ConfigError(f"--output {path} is a folder; give the name of a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}") from None
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--output {path} cannot be written: no permission in {path.parent}")
    return path


def show(rows: Sequence[Row], *, title: str) -> None:
    """Prints the rows as a table, with those columns that any row has a figure for."""
    retrieved, compared = any(row.k for row in rows), any(row.gain for row in rows)
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    headers = ["EM %", "F1 %", "prefix %"] + ["recall@k %"] * retrieved + ["+EM (95 %)", "+F1 (95 %)"] * compared
    for header in [*headers, "truncated", "q/s"]:
        table.add_column(header, justify="right")
    for row in rows:
        figures = [row.em, row.f1, row.em_prefix, *([row.recall_at_k] if retrieved else [])]
        gains = [] if not compared else [None, None] if row.gain is None else [row.gain.em, row.gain.f1]
        table.add_row(
            row.name,
            *("-" if figure is None else f"{100 * figure:.1f}" for figure in figures),
            *(
                "-" if gain is None else f"{100 * gain.mean:+.1f} ({100 * gain.low:+.1f}, {100 * gain.high:+.1f})"
                for gain in gains
            ),
            f"{row.truncated:,}",
            f"{row.questions / row.seconds:,.1f}",
        )
    Console().print(table)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _commit() -> Commit | None:
    """The commit of the checkout this very file belongs to; an installed copy inside another project's has none."""
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        return Commit(commit=_git("rev-parse", "HEAD").strip(), dirty=bool(_git("status", "--porcelain").strip()))
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=Path(__file__).parent, check=True, capture_output=True, text=True
    ).stdout
