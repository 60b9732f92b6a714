"""The examples run as they are, offline."""

from __future__ import annotations

import contextlib
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.processes import run_in_process

ROOT = Path(__file__).parents[1]


def run_example(name: str, printed: Path) -> None:
    """Runs an example, and writes what it prints to a file."""
    sys.argv = [name]
    with printed.open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


def output(name: str, folder: Path) -> str:
    """What an example prints, in a process of its own."""
    assert run_in_process(run_example, name, folder / "printed") == 0
    return (folder / "printed").read_text()


def test_an_existing_app_needs_five_lines(tmp_path: Path) -> None:
    assert (ROOT / "examples" / "existing_app.py").read_text().count("  # MAC\n") == 5
    assert output("existing_app.py", tmp_path).count("attention ") == 5


def test_a_changing_folder_is_followed(tmp_path: Path) -> None:
    printed = output("changing_folder.py", tmp_path)
    assert "2 documents in memory: ['first.txt', 'second.txt']" in printed
    assert "2 documents in memory: ['second.txt', 'third.txt']" in printed


def test_a_chat_knows_the_news(tmp_path: Path) -> None:
    assert output("news_chat.py", tmp_path).count("(expected: ") == 4


def test_a_langchain_app_streams_answers(tmp_path: Path) -> None:
    printed = output("langchain_app.py", tmp_path)
    pairs = re.findall(r"^  (.*)   \(expected: (.*)\)$", printed, re.MULTILINE)
    assert len(pairs) == 5
    assert sum(answer == expected for answer, expected in pairs) >= 3


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_every_example_is_tested(name: str) -> None:
    assert f'output("{name}", ' in Path(__file__).read_text()


def test_an_agent_is_reminded(tmp_path: Path) -> None:
    printed = output("agent_memory.py", tmp_path)
    reminded = printed.split("I was reminded of:")[1]
    assert "user: A storm has hit Wunville" in reminded
