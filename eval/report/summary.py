"""The content of the report: each experiment with its results, or the reason why it has none."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from eval.report.catalogue import CATALOGUE, Experiment
from eval.report.collect import Collection, ResultFile
from eval.report.findings import FINDINGS, Check, Finding, verdict

TITLE = "Memory of amortized contexts"
MARKS = {"yes": "findings hold", "no": "do not hold", "partly": "hold in part", "not run": "not run"}


@dataclass(frozen=True)
class Section:
    """The section of one experiment: its results, and the reasons of its steps that have none."""

    experiment: Experiment
    results: tuple[ResultFile, ...]
    absent: tuple[str, ...]


@dataclass(frozen=True)
class Checked:
    """A finding of the paper with its checks and the verdict: yes, no, partly or not run."""

    finding: Finding
    checks: tuple[Check, ...]
    verdict: str


def sections(collection: Collection) -> list[Section]:
    """The sections of all experiments in the order of the catalogue, then of those that it does not know."""
    known = {experiment.name for experiment in CATALOGUE}
    others = dict.fromkeys(file.result.experiment for file in collection.files if file.result.experiment not in known)
    unknown = [Experiment(name, name.replace("_", " ").capitalize(), "", "", ()) for name in others]
    return [
        Section(experiment, tuple(collection.of(experiment.name)), _absent(collection, experiment.name))
        for experiment in (*CATALOGUE, *unknown)
    ]


def checked(collection: Collection) -> list[Checked]:
    """All findings with their verdicts."""
    entries = []
    for finding in FINDINGS:
        checks = tuple(finding.checks(collection))
        entries.append(Checked(finding, checks, verdict(checks)))
    return entries


def tally(findings: list[Checked]) -> list[tuple[str, int]]:
    """The number of findings with each verdict that occurs, under its label."""
    counts = Counter(entry.verdict for entry in findings)
    return [(MARKS[name], counts[name]) for name in MARKS if counts[name]]


def provenance(file: ResultFile) -> list[tuple[str, str]]:
    """The origin of a result's numbers, as pairs of a label and a text."""
    result = file.result
    lines = [("command", result.command), ("created", result.created)]
    if result.git is None:
        lines.append(("commit", "unknown: it ran outside a checkout"))
    else:
        changed = " with uncommitted changes" if result.git.dirty else ""
        lines.append(("commit", f"{result.git.commit[:12]}{changed}"))
    if result.model is not None:
        lines.append(
            ("model", f"{result.model.name}, weights {result.model.fingerprint[:12]}, on {result.model.device}")
        )
        base = result.model.config.get("base_lm", {}).get("name", "unknown")
        lines.append(("base LM", str(base)))
    if result.data is not None:
        lines.append(("data", f"{result.data.name}, split {result.data.split}, {result.data.source}"))
    if result.adaptation is not None:
        size = result.adaptation
        lines.append(("adaptation", f"{size.documents:,} documents, {size.rows:,} rows, {size.seconds:.1f} s"))
    options = ", ".join(f"{name} = {value}" for name, value in result.config.items() if value is not None)
    lines.append(("options", options))
    lines.append(("versions", ", ".join(f"{name} {version}" for name, version in result.versions.items())))
    lines.append(("file", file.path.name + (f", {result.samples.name}" if result.samples else "")))
    return lines


def about(file: ResultFile) -> str:
    """Data set, scale and model of a result, in one line."""
    data, scale = file.result.data, file.result.scale
    parts = []
    if data is not None:
        generated = " (generated)" if data.source == "generated" else ""
        parts.append(f"{data.name}{generated}, {data.documents:,} documents, {data.questions:,} questions")
    if scale:
        parts.append(f"{scale} scale")
    parts.append(f"{file.result.protocol} protocol")
    if file.result.model is not None:
        parts.append(file.result.model.name)
    return " · ".join(parts)


def _absent(collection: Collection, experiment: str) -> tuple[str, ...]:
    return tuple(
        f"{record.name}: {record.status}, {record.reason}"
        for record in collection.records
        if record.experiment == experiment and record.status != "done"
    )
