"""Writes what the torture has shown into its page: `python -m tests.torture.table`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.torture.part import FAILURES, PARTS
from tests.torture.progress import FOLDER, Progress

PAGE = Path("docs/torture.md")
BEGIN, END = "<!-- results of make torture -->", "<!-- end of results -->"


def table(states: Iterable[Progress]) -> str:
    """One line a part: how many trials of its goal were made, and how many failed in which way."""
    headings = ["part", "tried", "goal", *FAILURES, "slowest", "seconds", "commit"]
    lines = ["| " + " | ".join(headings) + " |", "|---" + "|--:" * (len(headings) - 2) + "|---|"]
    for state in states:
        failed = Counter(failure["failure"] for failure in state.failures)
        kinds = "; ".join(f"{kind} {count:,}" for kind, count in sorted(state.tried.items()))
        several = f" ({kinds})" if len(state.tried) > 1 else ""
        cells = [f"`{state.part}`{several}", f"{state.next:,}", f"{state.goal:,}"]
        cells += [f"{failed[failure]:,}" for failure in FAILURES]
        cells += [f"{state.slowest[0]:,.1f} s", f"{state.seconds:,.0f}", _commits(state)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _commits(state: Progress) -> str:
    return ", ".join(f"`{name}`" for name in state.commits)


def write(page: Path, states: Iterable[Progress]) -> None:
    """Puts the table between the marks of a page."""
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{table(states)}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    write(PAGE, [state for part in PARTS if (state := Progress.load(part, FOLDER)) is not None])
