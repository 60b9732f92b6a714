"""The report as Markdown: the findings, then a table for each result."""

from __future__ import annotations

from eval.report.collect import Collection
from eval.report.summary import TITLE, about, checked, provenance, sections
from eval.report.tables import Table, table


def markdown(collection: Collection) -> str:
    """The Markdown text of a report."""
    lines = [f"# {TITLE}: results", "", "## The paper's findings", "", "| finding | ours | numbers | paper |"]
    lines.append("| --- | --- | --- | --- |")
    for entry in checked(collection):
        numbers = "; ".join(f"{check.where}: {check.numbers}" for check in entry.checks)
        cells = (entry.finding.claim, entry.verdict, numbers or "–", entry.finding.paper)
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    missing = []
    for part in sections(collection):
        experiment = part.experiment
        missing += [f"- {experiment.title}: {reason}" for reason in part.absent]
        if not part.results:
            missing += [] if part.absent else [f"- {experiment.title}: no result; `python -m eval.{experiment.name}`"]
            continue
        lines += ["", f"## {experiment.title}", ""]
        if experiment.source:
            lines += [f"{experiment.source} of the paper.", ""]
        for file in part.results:
            origin = dict(provenance(file))
            lines += [f"{about(file)}; commit {origin['commit']}; `{origin['command']}`", ""]
            lines += [*_table(table(file.result, experiment)), ""]
            lines += [f"- {note}" for note in file.result.notes]
            lines += [f"- not run: {what}: {why}" for what, why in file.result.not_run.items()]
    if missing:
        lines += ["", "## Not run", "", *missing]
    return "\n".join(lines).rstrip() + "\n"


def _table(content: Table) -> list[str]:
    rows = [[f"**{_cell(cell.text)}**" if cell.best else _cell(cell.text) for cell in row] for row in content.rows]
    return [
        f"| {' | '.join(map(_cell, content.headers))} |",
        f"| --- |{' ---: |' * (len(content.headers) - 1)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
