"""The result file of an evaluation: the run, its data and its figures, down to the answer to each question.

Every experiment writes `<name>.json`, one `Result`. If it asks questions, it also writes `<name>.samples.jsonl` beside
it, with one `Sample` a line. Both files have the same schema for all experiments.
"""

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
from typing import TYPE_CHECKING, Any, Self

from pydantic import ConfigDict, Field, ValidationError

from eval.harness.bootstrap import Interval, paired_interval
from eval.harness.scales import Protocol, Scale, command_of
from mac_rag.atomic_files import write_text
from mac_rag.config import Config
from mac_rag.errors import ConfigError, DataError
from mac_rag.untrusted_files import MalformedError, read_file, read_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mac_rag.data.types import Question

SCHEMA_VERSION = 4
_LARGEST = 1 << 30  # bytes of a result, and of its samples
ARCHITECTURES = Path(__file__).parents[2] / "pipelines" / "architectures.json"
PACKAGES = ("mac-rag", "torch", "transformers", "tokenizers", "safetensors", "numpy", "rank-bm25", "PyStemmer")
# Measures of a dated row: its gain in F1 over the undated row, and the interval of the gain.
BY_DATES = ("dates_f1", "dates_f1_low", "dates_f1_high")


class Verdict(Config):
    """The answer of one row to one question, and its scores, 0 to 1, against the accepted answer that fits best.

    Attributes:
        retrieved: ids of the retrieved documents, best first.
        truncated: True if documents were shortened to fit into the LM's window.
    """

    prediction: str
    em: float
    f1: float
    em_prefix: float
    retrieved: tuple[str, ...]
    truncated: bool


class Sample(Config):
    """One question with the answers of all rows.

    Attributes:
        id, question, answers, document_id, as_of: those of the question.
        rows: the verdict on the answer of each row, by the row's name.
        hash: sha256 of all other fields, without a moment that is None.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    document_id: str | None
    as_of: str | None = None
    rows: dict[str, Verdict]
    hash: str

    @classmethod
    def of(cls, question: Question, rows: dict[str, Verdict]) -> Sample:
        """The sample of a question, with its hash."""
        content = {
            "id": question.id,
            "question": question.question,
            "answers": list(question.answers),
            "document_id": question.document_id,
            **({} if question.as_of is None else {"as_of": question.as_of}),
            "rows": {name: verdict.model_dump(mode="json") for name, verdict in rows.items()},
        }
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return cls.model_validate({**content, "hash": hashlib.sha256(text.encode()).hexdigest()})


class Gain(Config):
    """The gain over another row on the same questions, with paired bootstrap intervals.

    Of a row with memory over the same prompts without it; of controls over the memory.
    """

    em: Interval
    f1: Interval

    @classmethod
    def over(cls, ours: Sequence[Verdict], theirs: Sequence[Verdict], *, seed: int) -> Gain:
        """Paired gain of `ours` over `theirs`, question by question. Needs at least one question."""
        em, f1 = (
            paired_interval([getattr(one, name) for one in ours], [getattr(one, name) for one in theirs], seed=seed)
            for name in ("em", "f1")
        )
        return cls(em=em, f1=f1)


class Row(Config):
    """One row of a table, or one point of a figure. Fields that do not apply to the row are None or empty.

    Attributes:
        name: unique name of the row in its result.
        settings: the settings that distinguish the row, by short names: method, M, p, K, retriever ...
        measures: further figures, by names that end in their unit if they have one: `peak_mb`, `seconds_per_document`,
            `perplexity_unseen`, ...
        k: number of documents retrieved for each question.
        documents, questions: their numbers in the stream.
        em, f1, em_prefix: means over the questions, 0 to 1.
        substring: share of the answers that contain an accepted one, 0 to 1.
        recall_at_k: share of the questions whose document was retrieved, 0 to 1.
        mrr_at_k, ndcg_at_k: reciprocal rank and nDCG of the questions' documents among those retrieved, means, 0 to 1.
        gain: gain over the row of the same prompts without memory; of controls, over the memory's row.
        truncated: number of prompts whose documents were shortened to fit into the LM's window.
        seconds: generation time of its answers, also of those that it shares with other rows.
    """

    # A perplexity may be infinite; JSON has no such number.
    model_config = ConfigDict(ser_json_inf_nan="strings")

    name: str
    settings: dict[str, str | int | float] = Field(default_factory=dict)
    measures: dict[str, float] = Field(default_factory=dict)
    k: int | None = None
    documents: int | None = None
    questions: int | None = None
    em: float | None = None
    f1: float | None = None
    em_prefix: float | None = None
    substring: float | None = None
    recall_at_k: float | None = None
    mrr_at_k: float | None = None
    ndcg_at_k: float | None = None
    gain: Gain | None = None
    truncated: int | None = None
    seconds: float | None = None


class Adaptation(Config):
    """Size and time of the adaptation to the stream.

    Attributes:
        rows: number of rows of memory tokens written: one for each chunk of a document.
        chunked: number of documents longer than the model's limit.
        seconds: time of encoding the documents and writing them.
    """

    documents: int
    rows: int
    chunked: int
    seconds: float


class Data(Config):
    """The data set and its size; `source` is a path, or `generated`."""

    name: str
    split: str
    source: str
    documents: int
    questions: int


class Model(Config):
    """The model that was evaluated; `MACModel.fingerprint` and `MACModel.answer_digest` identify it.

    Attributes:
        lm: the published LM of the same architecture; a tuned LM has no other home than its folder. None for any other.
    """

    name: str
    lm: str | None = None
    fingerprint: str
    answer_digest: str
    device: str
    config: dict[str, Any]


def published_lm(architecture: Any) -> str | None:
    """The LM in `pipelines/architectures.json` with the sizes of a transformers configuration; None if none has."""
    known = read_json(ARCHITECTURES, 1 << 20)
    sizes = ({key: getattr(architecture, key, None) for key in known[name]} for name in known)
    return next((name for name, ours in zip(known, sizes) if ours == known[name]), None)


class Commit(Config):
    """The commit of the checkout; `dirty` is True if files differed from it."""

    commit: str
    dirty: bool


class SamplesFile(Config):
    """The file of samples beside the result: its name, the sha256 of its content, its number of lines."""

    name: str
    sha256: str
    count: int


class Quote(Config):
    """An answer, and the sentence of a document that it rests on."""

    question: str
    answer: str
    document_id: str
    sentence: str


class Result(Config):
    """The whole result file.

    Attributes:
        schema_version: version of this schema.
        experiment: name of the module: archivalqa, retention, peft, ...
        scale: scale of sizes and models; None if the experiment has only one.
        protocol: what chose the documents, decoded and scored (`eval.harness.published`).
        created: time of the run, UTC, ISO 8601.
        command: the command line.
        config: every option of the command.
        seed: random seed of the run.
        versions: versions of Python, of the platform and of the libraries.
        git: commit of the code; None outside a checkout.
        model, data, adaptation: None if the experiment has no single one.
        rows: the table.
        not_run: parts of the experiment that were not run, each with its reason.
        notes: facts that a reader of the figures must know.
        quotes: examples of answers with the sentences that they rest on.
        samples: the file of samples; None if no questions were asked.
    """

    model_config = ConfigDict(ser_json_inf_nan="strings")

    schema_version: int = SCHEMA_VERSION
    experiment: str
    scale: Scale | None = None
    protocol: Protocol = "strict"
    created: str
    command: str
    config: dict[str, Any]
    seed: int
    versions: dict[str, str]
    git: Commit | None
    model: Model | None = None
    data: Data | None = None
    adaptation: Adaptation | None = None
    rows: tuple[Row, ...]
    not_run: dict[str, str] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    quotes: tuple[Quote, ...] = ()
    samples: SamplesFile | None = None

    def write(self, path: Path, samples: Sequence[Sample] = ()) -> Result:
        """Writes the result as JSON, and its samples beside it; each file is whole at any time.

        Returns the result with the name of the file of samples.
        """
        written = self
        if samples:
            lines = "".join(sample.model_dump_json() + "\n" for sample in samples)
            file = path.with_name(path.name.removesuffix(".json") + ".samples.jsonl")
            digest = write_text(file, lines)
            written = self.model_copy(
                update={"samples": SamplesFile(name=file.name, sha256=digest, count=len(samples))}
            )
        write_text(path, written.model_dump_json(indent=1) + "\n")
        return written

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a result file."""
        try:
            values = read_json(path, _LARGEST, follow=True)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        except MalformedError as error:
            raise DataError(f"{path} is no result of an evaluation: {error}") from None
        schema_version = values.get("schema_version") if isinstance(values, dict) else None
        if schema_version is None:
            raise DataError(f"{path} is no result of an evaluation: it has no schema_version")
        if schema_version != SCHEMA_VERSION:
            raise DataError(
                f"{path} has schema version {schema_version}, but this version reads {SCHEMA_VERSION}; "
                "run the experiment again"
            )
        try:
            return cls.parse(values, path)
        except ConfigError as error:
            raise DataError(str(error)) from None

    def read_samples(self, path: Path) -> tuple[Sample, ...]:
        """Reads the samples of this result, which was read from `path`; none if no questions were asked."""
        if self.samples is None:
            return ()
        file = path.with_name(Path(self.samples.name).name)
        try:
            content = read_file(file, _LARGEST, follow=True)
        except (OSError, MalformedError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise DataError(f"the samples of {path} cannot be read: {file}: {reason}") from None
        if hashlib.sha256(content).hexdigest() != self.samples.sha256:
            raise DataError(f"{file} is not the file of samples that was written with {path}: its sha256 differs")
        try:
            return tuple(Sample.model_validate_json(line) for line in content.splitlines())
        except ValidationError as error:
            raise DataError(f"{file} holds no samples: {error}") from None


def provenance(experiment: str) -> dict[str, Any]:
    """The fields of a `Result` about the run itself: experiment, time, command, versions and commit."""
    return {
        "experiment": experiment,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", command_of(experiment)[0], *sys.argv[1:]]),
        "versions": _versions(),
        "git": checkout(),
    }


def result_path(output: Path | None, experiment: str) -> Path:
    """The result file: --output, or `results/<experiment>-<time>.json`.

    Call it before long work, so that an unwritable path fails at once.

    Raises:
        ConfigError: if no file can be written there.
    """
    path = output or Path("results") / f"{experiment}-{datetime.now():%Y%m%d-%H%M%S}.json"
    if path.is_dir():
        raise ConfigError(f"--output {path} is a folder; give the name of a file")
    writable_folder(path.parent, "--output")
    return path


def writable_folder(folder: Path, option: str) -> None:
    """Creates a folder if missing. Call it before long work, so that an unwritable folder fails at once.

    Raises:
        ConfigError: if no file can be written there; names the option.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option}: {folder} cannot be written: {error.strerror}; give another folder") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{option}: {folder} cannot be written: no permission; give another folder")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def checkout() -> Commit | None:
    """The commit of the checkout that tracks this file; None for a copy that no checkout tracks."""
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        return Commit(commit=_git("rev-parse", "HEAD").strip(), dirty=bool(_git("status", "--porcelain").strip()))
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=Path(__file__).parent, check=True, capture_output=True, text=True
    ).stdout
