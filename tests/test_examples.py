"""The examples run as they are, offline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def output(name: str) -> str:
    run = [sys.executable, str(ROOT / "examples" / name)]
    environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run(run, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_existing_app_needs_five_lines() -> None:
    assert (ROOT / "examples" / "existing_app.py").read_text().count("  # MAC\n") == 5
    assert output("existing_app.py").count("attention ") == 5


def test_a_changing_folder_is_followed() -> None:
    printed = output("changing_folder.py")
    assert "2 documents in memory: ['first.txt', 'second.txt']" in printed
    assert "2 documents in memory: ['second.txt', 'third.txt']" in printed


def test_a_chat_knows_the_news() -> None:
    assert output("news_chat.py").count("(expected: ") == 4


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_every_example_is_tested(name: str) -> None:
    assert f'output("{name}")' in Path(__file__).read_text()
