"""Writes the table of LM architectures from the results of the conformance matrix.

python -m pytest -m 'not lm' tests/lm --junitxml FILE
python -m tests.lm.matrix_table FILE PAGE
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.lm.helpers import ARCHITECTURES

COLUMNS = ("prefix", "sink", "lora", "film", "own-kv")
HEADINGS = {
    "prefix": "prefix", "sink": "prefix after a sink", "lora": "LoRA", "film": "FiLM", "own-kv": "own keys and values",
}  # fmt: skip
DTYPES = ("fp32", "bf16", "fp16", "nf4", "int8")
BEGIN, END = "<!-- results of make test-matrix -->", "<!-- end of results -->"


@dataclass(frozen=True)
class Result:
    """What one test of the matrix found.

    Attributes:
        name: the architecture's `model_type`.
        kind: one of `COLUMNS`.
        dtype: one of `DTYPES`.
        outcome: `works`, `fails`, or why the modulation or memory is refused.
    """

    name: str
    kind: str
    dtype: str
    outcome: str


def read_results(report: Path) -> list[Result]:
    """The results of a run, from its report in JUnit's format; tests without the properties of a cell are left out."""
    results = []
    for case in ElementTree.parse(report).iter("testcase"):
        properties = {each.get("name"): each.get("value") for each in case.iter("property")}
        if "kind" not in properties:
            continue
        failed = case.find("failure") is not None or case.find("error") is not None
        outcome = "fails" if failed else str(properties.get("refusal", "works"))
        results.append(Result(str(properties["lm"]), str(properties["kind"]), str(properties["dtype"]), outcome))
    return results


def table(results: Iterable[Result]) -> str:
    """One line for architectures with equal cells; a cell names the dtypes that work, those that fail, and refusals."""
    cells: dict[str, dict[str, dict[str, list[str]]]] = {}
    for each in results:
        cells.setdefault(each.name, {}).setdefault(each.kind, {}).setdefault(each.outcome, []).append(each.dtype)
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in [*ARCHITECTURES, *sorted(cells.keys() - ARCHITECTURES.keys())]:
        rows.setdefault(tuple(_cell(cells.get(name, {}).get(kind, {})) for kind in COLUMNS), []).append(f"`{name}`")
    lines = ["| LM | " + " | ".join(HEADINGS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines += [f"| {', '.join(names)} | " + " | ".join(row) + " |" for row, names in rows.items()]
    return "\n".join(lines)


def _cell(outcomes: dict[str, list[str]]) -> str:
    parts = []
    for outcome, dtypes in sorted(outcomes.items(), key=lambda item: item[0] != "works"):
        named = ", ".join(dtype for dtype in DTYPES if dtype in dtypes)
        parts.append(named if outcome == "works" else f"{named} {outcome}".strip())
    return "; ".join(parts) or "not tested"


def main(report: str, page: str) -> None:
    place = Path(page)
    before, _, rest = place.read_text().partition(BEGIN)
    place.write_text(f"{before}{BEGIN}\n\n{table(read_results(Path(report)))}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
