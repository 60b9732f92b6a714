"""Nothing that others wrote controls the terminal, and JSON stays JSON."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from typer.testing import CliRunner

from mac_rag.bank import MemoryBank
from mac_rag.cli.main import app
from mac_rag.cli.run import run_app
from mac_rag.cli.terminal import cell, say, show_table
from mac_rag.untrusted_files import printable

ROOT = Path(__file__).parents[2]
NASTY = "a\x1b[2J\x07\r\n\t\x7f\x85\x9b\u2028\u202e\u2066\udc80[red]é👩‍👩‍👧"
ESCAPED = r"a\u001b[2J\u0007\u000d\u000a\u0009\u007f\u0085\u009b\u2028\u202e\u2066\udc80[red]é👩‍👩‍👧"


def test_every_character_that_controls_a_terminal_is_escaped() -> None:
    assert printable(NASTY) == ESCAPED
    assert printable(NASTY, keep="\n\t") == ESCAPED.replace(r"\u000a", "\n").replace(r"\u0009", "\t")
    assert printable(Path("a\nb")) == r"a\u000ab"


@given(st.recursive(st.text(), lambda inner: st.dictionaries(st.text(), inner, max_size=3), max_leaves=5))
def test_json_stays_the_same_json_on_one_line(value: object) -> None:
    line = printable(json.dumps(value, ensure_ascii=False))
    assert len(line.splitlines()) == 1
    assert json.loads(line) == json.loads(json.dumps(value))


def test_what_is_said_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    say(NASTY)
    say(NASTY, lines=True, err=True)
    table = Table("document")
    table.add_row(cell(NASTY))
    show_table(table, width=120)
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{ESCAPED}\n")
    assert ESCAPED in shown.out.partition("\n")[2]
    assert shown.err == printable(NASTY, keep="\n\t") + "\n"


def test_a_file_name_in_an_error_looks_like_no_other_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["mac-rag", "bank", "info", "--bank", str(tmp_path / "x\x1b[2J\nerror: all is lost")]
    )
    with pytest.raises(SystemExit):
        run_app(app)
    assert capsys.readouterr().err.endswith("x\\u001b[2J\n  error: all is lost\n")


def test_a_file_whose_name_is_no_text_is_refused_by_name(tmp_path: Path, tiny_checkpoint: Path) -> None:
    place = tmp_path / "caf\udce9.txt"  # as of a file system in Latin-1
    place.write_text("Rain fell on Kell.")
    options = ["--bank", str(tmp_path / "bank"), "--model", str(tiny_checkpoint)]
    result = CliRunner().invoke(app, ["adapt", str(place), *options])
    assert r"caf\udce9.txt" in str(result.exception)
    assert not MemoryBank.exists(tmp_path / "bank")


@pytest.mark.parametrize("folder", ["mac_rag", "eval", "pipelines"])
def test_commands_print_in_one_way(folder: str) -> None:
    """Everything but `say`, `show_table` and the progress bar prints to nowhere."""
    direct = []
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "print",
                "typer.echo",
                "typer.secho",
                "Console",
            ):
                direct.append(f"{file.relative_to(ROOT)}: {ast.unparse(node.func)}")
    allowed = ["mac_rag/cli/terminal.py: typer.secho", "mac_rag/cli/terminal.py: Console"]
    assert sorted(direct) == (sorted(allowed) if folder == "mac_rag" else [])
