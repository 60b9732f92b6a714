"""The report as Markdown: the findings, then a table for each result. Every value is text, never markup."""

from __future__ import annotations

import re
from html import escape

from eval.harness.scales import command_of
from eval.report.collect import Collection
from eval.report.summary import TITLE, about, checked, provenance, sections
from eval.report.tables import Table, table


def markdown(collection: Collection) -> str:
    """Writes a report as Markdown."""
    lines = [f"# {TITLE}: results", "", "## The paper's findings", "", "| finding | ours | numbers | paper |"]
    lines.append("| --- | --- | --- | --- |")
    for entry in checked(collection):
        numbers = "; ".join(f"{check.where}: {check.numbers}" for check in entry.checks)
        cells = (entry.finding.claim, entry.verdict, numbers or "–", entry.finding.paper)
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    missing = []
    for part in sections(collection):
        experiment = part.experiment
        missing += [f"- {_text(experiment.title)}: {_text(reason)}" for reason in part.absent]
        if not part.results:
            command = _code(f"python -m {' '.join(command_of(experiment.name))}")
            missing += [] if part.absent else [f"- {_text(experiment.title)}: no result; {command}"]
            continue
        lines += ["", f"## {_text(experiment.title)}", ""]
        if experiment.source:
            lines += [f"{experiment.source} of the paper.", ""]
        for file in part.results:
            origin = dict(provenance(file))
            lines += [f"{_text(about(file))}; commit {_text(origin['commit'])}; {_code(origin['command'])}", ""]
            lines += [*_table(table(file.result, experiment)), ""]
            lines += [f"- {_text(note)}" for note in file.result.notes]
            for quote in file.result.quotes:
                said = f"**{_text(quote.answer)}** {_text(quote.document_id)}: {_text(quote.sentence)}"
                lines.append(f"- {_text(quote.question)} {said}")
            lines += [f"- not run: {_text(what)}: {_text(why)}" for what, why in file.result.not_run.items()]
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
    return _text(text).replace("|", "\\|")


def _text(text: str) -> str:
    """Escapes a value as a line of plain text: no HTML, links, code, emphasis or line breaks."""
    return re.sub(r"([\\`*_\[\]])", r"\\\1", escape(" ".join(text.split()), quote=False))


def _code(text: str) -> str:
    """Makes a value a code span, with more backticks than stand together in it."""
    text = " ".join(text.split())
    ticks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{ticks} {text} {ticks}" if "`" in text else f"`{text}`"
