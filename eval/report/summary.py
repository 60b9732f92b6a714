"""What both forms of the report say: each experiment with its results, or why it has none."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from eval.report.catalogue import CATALOGUE, Experiment
from eval.report.collect import Collection, Found
from eval.report.findings import FINDINGS, Check, Finding, verdict

TITLE = "Memory of amortized contexts"
MARKS = {"yes": "findings hold", "no": "do not hold", "partly": "hold in part", "not run": "not run"}


@dataclass(frozen=True)
class Section:
    """One experiment.

    Attributes:
        results: newest first by data set; empty where there is none.
        absent: why there is no result, or why a further one is missing.
    """

    experiment: Experiment
    results: tuple[Found, ...]
    absent: tuple[str, ...]


@dataclass(frozen=True)
class Checked:
    """A finding of the paper with its verdict: yes, no, partly (in some results) or not run."""

    finding: Finding
    checks: tuple[Check, ...]
    verdict: str


def sections(collection: Collection) -> list[Section]:
    """All experiments of the catalogue in its order, then those that it does not know."""
    known = {experiment.name for experiment in CATALOGUE}
    others = dict.fromkeys(
        found.result.experiment for found in collection.found if found.result.experiment not in known
    )
    unknown = [Experiment(name, name.replace("_", " ").capitalize(), "", "", ()) for name in others]
    return [
        Section(experiment, tuple(collection.of(experiment.name)), _absent(collection, experiment.name))
        for experiment in (*CATALOGUE, *unknown)
    ]


def checked(collection: Collection) -> list[Checked]:
    """All findings with their verdicts."""
    every = []
    for finding in FINDINGS:
        checks = tuple(finding.checks(collection))
        every.append(Checked(finding, checks, verdict(checks)))
    return every


def tally(findings: list[Checked]) -> list[tuple[str, int]]:
    """How many findings hold, do not, and so on."""
    counts = Counter(entry.verdict for entry in findings)
    return [(MARKS[name], counts[name]) for name in MARKS if counts[name]]


def provenance(found: Found) -> list[tuple[str, str]]:
    """Where a result's numbers come from."""
    result = found.result
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
        done = result.adaptation
        lines.append(("adaptation", f"{done.documents:,} documents, {done.rows:,} rows, {done.seconds:.1f} s"))
    options = ", ".join(f"{name} = {value}" for name, value in result.config.items() if value is not None)
    lines.append(("options", options))
    lines.append(("versions", ", ".join(f"{name} {version}" for name, version in result.versions.items())))
    lines.append(("file", found.path.name + (f", {result.samples.name}" if result.samples else "")))
    return lines


def about(found: Found) -> str:
    """The data of a result in a line."""
    data, scale = found.result.data, found.result.scale
    parts = []
    if data is not None:
        generated = " (generated)" if data.source == "generated" else ""
        parts.append(f"{data.name}{generated}, {data.documents:,} documents, {data.questions:,} questions")
    if scale:
        parts.append(f"{scale} scale")
    if found.result.model is not None:
        parts.append(found.result.model.name)
    return " · ".join(parts)


def _absent(collection: Collection, experiment: str) -> tuple[str, ...]:
    return tuple(
        f"{record.name}: {record.status}, {record.reason}"
        for record in collection.records
        if record.experiment == experiment and record.status != "done"
    )
