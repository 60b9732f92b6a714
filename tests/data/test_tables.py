"""CSV files: every fault names its file, row and column, and nothing is half written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mac_rag.data.table import read_table, write_table
from mac_rag.errors import DataError

COLUMNS = ("question", "answer")


def rows(file: Path, content: str | bytes) -> list[dict[str, str]]:
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [dict(row.values) for row in read_table(file, COLUMNS)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "questions.csv"


def test_cells_are_read_as_they_stand_and_blank_lines_passed_over(file: Path) -> None:
    content = 'note,answer,question\r\n,"a ""b""","two\nlines, one cell"\r\n\r\n é , c ,d\r\n'
    assert rows(file, content) == [
        {"note": "", "answer": 'a "b"', "question": "two\nlines, one cell"},
        {"note": " é ", "answer": " c ", "question": "d"},
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(
            "question,id\nq,1\n", "questions.csv: missing column 'answer'; .* question, id", id="missing column"
        ),
        pytest.param("", "missing column 'question', 'answer'; the header has nothing", id="empty file"),
        pytest.param(
            "question,answer\nq,a\nq\n", r"row 2 \(line 3\), column 'answer': .* 1 of 2 cells", id="short row"
        ),
        pytest.param("question,answer\nq,a,b\n", r"row 1 \(line 2\), column 'answer': .* 3 cells for 2", id="long row"),
        pytest.param(
            b"question,answer\nq,a\n'caf\xe9',b\n", r"row 2 \(line 3\), column 'question': .* not UTF-8", id="not UTF-8"
        ),
        pytest.param('question,answer\nq,a\n"q,b\nq,c\n', r"row 2 \(line 3\): not well-formed CSV", id="open quote"),
        pytest.param('question,answer\n"q"x,a\n', r"row 1 \(line 2\): not well-formed CSV", id="text behind a quote"),
    ],
)
def test_a_malformed_file_is_refused_by_name_row_and_column(file: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as raised:
        rows(file, content)
    assert str(file) in str(raised.value)


def test_a_file_is_replaced_only_when_all_rows_are_written(file: Path) -> None:
    def broken() -> Iterator[dict[str, str]]:
        yield {"question": "new", "answer": "new"}
        raise DataError("the second row cannot be made")

    write_table(file, COLUMNS, [{"question": "old", "answer": "old"}])
    with pytest.raises(DataError, match="second row"):
        write_table(file, COLUMNS, broken())
    assert [dict(row.values) for row in read_table(file, COLUMNS)] == [{"question": "old", "answer": "old"}]
