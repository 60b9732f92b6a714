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


def test_a_byte_order_mark_is_no_part_of_the_first_column(file: Path) -> None:
    assert rows(file, b"\xef\xbb\xbfquestion,answer\nq,a\n") == [{"question": "q", "answer": "a"}]


def test_a_cell_may_be_longer_than_the_csv_module_allows_by_default(file: Path) -> None:
    assert len(rows(file, f"question,answer\n{'x' * 300_000},a\n")[0]["question"]) == 300_000


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


def test_a_row_number_counts_rows_and_a_line_number_lines(file: Path) -> None:
    with pytest.raises(DataError, match=r"row 2 \(line 5\), column 'answer'"):
        rows(file, 'question,answer\n"three\nlines\nlong",a\nq\n')


def test_a_blank_cell_is_refused_where_it_must_be_filled(file: Path) -> None:
    file.write_text("question,answer\nq,a\nq, \n")
    first, second = read_table(file, COLUMNS)
    assert first.filled("answer") == "a"
    with pytest.raises(DataError, match=r"questions.csv, row 2 \(line 3\), column 'answer': the cell is empty"):
        second.filled("answer")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.csv cannot be read: No such file"):
        list(read_table(tmp_path / "none.csv", COLUMNS))


def test_a_file_is_replaced_only_when_all_rows_are_written(file: Path) -> None:
    def broken() -> Iterator[dict[str, str]]:
        yield {"question": "new", "answer": "new"}
        raise DataError("the second row cannot be made")

    write_table(file, COLUMNS, [{"question": "old", "answer": "old"}])
    with pytest.raises(DataError, match="second row"):
        write_table(file, COLUMNS, broken())
    assert [dict(row.values) for row in read_table(file, COLUMNS)] == [{"question": "old", "answer": "old"}]
