"""Folders that take their name when they are complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from mac_rag.atomic_files import write_folder


def test_a_folder_takes_the_place_of_the_older_one_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "best"
    for text in ("first", "second"):
        with write_folder(path) as new:
            (new / "inner").mkdir()
            (new / "inner" / "file").write_text(text)
            assert not path.exists() or (path / "inner" / "file").read_text() == "first"
        assert (path / "inner" / "file").read_text() == text
        assert [left.name for left in path.parent.iterdir()] == ["best"]


def test_an_error_leaves_the_older_folder_and_the_next_attempt_starts_afresh(tmp_path: Path) -> None:
    path = tmp_path / "best"
    with write_folder(path) as new:
        (new / "file").write_text("first")

    def interrupted() -> None:
        with write_folder(path) as half:
            (half / "half").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (path / "file").read_text() == "first"
    with write_folder(path) as new:
        assert list(new.iterdir()) == []
        (new / "file").write_text("second")
    assert [file.name for file in path.iterdir()] == ["file"]
