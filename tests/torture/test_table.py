"""The table of the torture's results."""

from __future__ import annotations

from pathlib import Path

from tests.torture.progress import Progress
from tests.torture.table import BEGIN, END, PAGE, write


def test_the_table_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    state = Progress("kills", ["abc", "def"], 1000, next=30, seconds=61.4, slowest=(2.55, 7), tried={"a": 20, "b": 10})
    state.failed(3, "a", "stale", "")
    state.failed(4, "a", "stale", "")
    page = tmp_path / "page.md"
    page.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    for _ in range(2):
        write(page, [state])
        lines = page.read_text().splitlines()
        assert (lines[0], lines[-1], len(lines)) == ("above", "below", 9)
        row = [cell.strip() for cell in lines[5].split("|")[1:-1]]
        expected = ["`kills` (a 20; b 10)", "30", "1,000", "0", "2", "0", "0", "0", "2.5 s", "61", "`abc`, `def`"]
        assert row == expected


def test_the_page_has_a_place_for_it() -> None:
    assert PAGE.read_text().count(BEGIN) == PAGE.read_text().count(END) == 1
