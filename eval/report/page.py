"""The report as one self-contained HTML page: no script, no network, no other file.

Every value is escaped, and a content security policy lets the browser run and load nothing, should one not be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from eval.harness.results import Quote
from eval.harness.scales import command_of
from eval.report.collect import Collection, ResultFile
from eval.report.summary import TITLE, Checked, Section, about, checked, provenance, sections, tally
from eval.report.tables import Table, paper_table, published_of, table
from mac_rag.sources import highlights

# A longer table is folded up below its plot.
LONG = 14
NBSP = "\u00a0"
# Styles are inline, in the page and in its drawings; heat maps are images inside the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
NONE = '<span class="mark none">not run</span>'


def page(collection: Collection) -> str:
    """Writes a report as HTML."""
    style = files("eval.report").joinpath("style.css").read_text(encoding="utf-8")
    parts, findings = sections(collection), checked(collection)
    body = [
        _header(collection, parts, findings),
        "<main>",
        _findings(findings),
        *(_section(part) for part in parts if part.results),
        _missing([part for part in parts if not part.results]),
        "</main>",
        _footer(collection),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{TITLE}: results</title>\n<style>\n{style}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n"
        "</body>\n</html>\n"
    )


def _header(collection: Collection, parts: Sequence[Section], findings: list[Checked]) -> str:
    run = sum(bool(part.results) for part in parts)
    dates = sorted(file.result.created[:10] for file in collection.files)
    models = dict.fromkeys(file.result.model.name for file in collection.files if file.result.model)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    links = "".join(f'<a href="#{_id(part)}">{escape(part.experiment.title)}</a>' for part in parts if part.results)
    if any(not part.results for part in parts):
        links += '<a class="none" href="#missing">What was not run</a>'
    counts = "".join(f"<li><b>{count}</b>{escape(name)}</li>" for name, count in tally(findings))
    return (
        f'<header>\n<p class="kicker">Online adaptation of language models</p>\n<h1>{TITLE}: results</h1>\n'
        f'<p class="lede">The tables and figures of the paper, measured here: {run} of {len(parts)} experiments, '
        f"{escape(', '.join(models)) or 'no model'}, {escape(when)}. "
        "Numbers are comparable with the paper’s only in the same row.</p>\n"
        f'<ul class="tally">{counts}</ul>\n<nav>{links}</nav>\n</header>'
    )


def _findings(findings: Iterable[Checked]) -> str:
    lines = []
    for entry in findings:
        kind = "none" if entry.verdict == "not run" else entry.verdict
        numbers = "".join(
            f'<p class="numbers"><b>{escape(check.where)}</b> — {escape(check.numbers)}</p>' for check in entry.checks
        )
        lines.append(
            f'<div class="finding"><p><span class="mark {kind}">{entry.verdict}</span></p><div>'
            f'<p class="claim">{escape(entry.finding.claim)}</p>{numbers}'
            f'<p class="paper">Paper: {escape(entry.finding.paper)}</p></div></div>'
        )
    return (
        '<section id="findings"><h2>The paper’s findings, one by one</h2>'
        "<p>Each is checked on our own numbers. “Yes” means that the order or the share is as in the paper; "
        "where the answers to single questions are known, the difference has its 95 % interval.</p>"
        + "".join(lines)
        + "</section>"
    )


def _section(part: Section) -> str:
    experiment = part.experiment
    source = f'<p class="source">{escape(experiment.source or "not in the paper")}</p>'
    question = f"<p>{escape(experiment.question)}</p>" if experiment.question else ""
    body = "".join(_result(part, file) for file in part.results)
    absent = "".join(f"<p>{NONE} {escape(reason)}</p>" for reason in part.absent)
    paper = "".join(
        f"<h3>{escape(entry.source)}</h3>{_table(paper_table(entry))}" for entry in published_of(experiment.name)
    )
    theirs = f"<details><summary>What the paper reports, on its own models and data</summary>{paper}</details>"
    return (
        f'<section id="{_id(part)}"><h2>{escape(experiment.title)}</h2>{source}{question}{body}{absent}'
        f"{theirs if paper else ''}</section>"
    )


def _result(part: Section, file: ResultFile) -> str:
    drawings = []
    for number, plot in enumerate(part.experiment.plots):
        drawing = plot.draw(file.result.rows, f"{file.path.name}-{number}")
        if drawing:
            drawings.append(f"<figure>{drawing}<figcaption>{escape(plot.caption)}</figcaption></figure>")
    notes = [escape(note) for note in file.result.notes]
    notes += [f"{NONE} {escape(what)}: {escape(why)}" for what, why in file.result.not_run.items()]
    listed = f'<ul class="notes">{"".join(f"<li>{note}</li>" for note in notes)}</ul>' if notes else ""
    origin = "".join(
        f"<dt>{escape(name)}</dt><dd>{f'<code>{escape(text)}</code>' if name == 'command' else escape(text)}</dd>"
        for name, text in provenance(file)
    )
    title = file.where or part.experiment.name
    content = table(file.result, part.experiment)
    figures = _table(content)
    if drawings and len(content.rows) > LONG:
        figures = f"<details><summary>All {len(content.rows)} rows</summary>{figures}</details>"
    return (
        f'<h3>{escape(title)}</h3><p class="data">{escape(about(file))}</p>{"".join(drawings)}'
        f"{figures}{listed}{_quotes(file.result.quotes)}"
        f"<details><summary>Configuration and commit of these numbers</summary><dl>{origin}</dl></details>"
    )


def _quotes(quotes: Sequence[Quote]) -> str:
    """Lists answers with the sentences that they rest on; marks the answer in them."""
    lines = "".join(
        f"<dt>{escape(quote.question)}</dt><dd><b>{escape(quote.answer)}</b> {escape(quote.document_id)}: "
        f"<q>{_marked(quote.sentence, quote.answer)}</q></dd>"
        for quote in quotes
    )
    return f"<details><summary>Answers and what they rest on</summary><dl>{lines}</dl></details>" if quotes else ""


def _marked(sentence: str, answer: str) -> str:
    parts, end = [], 0
    for start, stop in highlights(sentence, answer):
        parts.append(f"{escape(sentence[end:start])}<mark>{escape(sentence[start:stop])}</mark>")
        end = stop
    return "".join(parts) + escape(sentence[end:])


def _table(content: Table) -> str:
    head = "".join(f'<th scope="col">{escape(header.replace(" %", NBSP + "%"))}</th>' for header in content.headers)
    lines = []
    for row in content.rows:
        cells = []
        for cell in row:
            kind = "of-paper" if cell.paper and cell.text != "–" else "best" if cell.best else ""
            cells.append(f'<td class="{kind}">{escape(cell.text)}</td>' if kind else f"<td>{escape(cell.text)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _missing(parts: Sequence[Section]) -> str:
    if not parts:
        return ""
    lines = "".join(
        f'<div class="finding" id="{_id(part)}"><p>{NONE}</p><div><p class="claim">{escape(part.experiment.title)}</p>'
        f'<p class="paper">{escape(part.experiment.source or "not in the paper")} · '
        f"<code>python -m {escape(' '.join(command_of(part.experiment.name)))}</code></p>"
        + "".join(f'<p class="numbers">{escape(reason)}</p>' for reason in part.absent)
        + "</div></div>"
        for part in parts
    )
    return f'<section id="missing"><h2>What was not run</h2>{lines}</section>'


def _footer(collection: Collection) -> str:
    commits = dict.fromkeys(file.result.git.commit[:12] for file in collection.files if file.result.git)
    refused = "".join(f"<p>Left out: {escape(reason)}</p>" for reason in collection.refused.values())
    return (
        f"<footer><p>Made by <code>python -m eval.report</code> from {len(collection.files)} result files"
        f"{' of commit ' + escape(', '.join(commits)) if commits else ''}. "
        "<code>python -m eval.paper</code> runs them all, <code>python -m eval.compare</code> compares two.</p>"
        f"{refused}</footer>"
    )


def _id(part: Section) -> str:
    return escape(part.experiment.name)
