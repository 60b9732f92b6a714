"""The command mac-rag on a real, tiny, untrained model: what it prints, keeps, refuses, and with which exit code."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mac_rag.bank import MemoryBank
from mac_rag.cli.main import app, main
from mac_rag.model import MACModel
from tests.cli.helpers import refusal, run
from tests.helpers import HEAVY


def test_documents_are_remembered_updated_and_asked_about(model: str, notes: list[str], tmp_path: Path) -> None:
    bank = tmp_path / "bank"
    first = run("adapt", *notes, "--bank", bank, "--model", model)
    assert first.exit_code == 0, first.output
    assert first.stdout == f"4 added, 0 updated, 0 unchanged; {bank} holds 4 documents\n"
    remembered = MemoryBank.open(bank)
    assert remembered.document_ids == [notes[0], notes[1], "r[1]", "r2"]
    assert remembered["r[1]"].metadata == {"date": "2024-05-01"}

    Path(notes[0]).write_text("Ada Voss closed the harbour of Lund in June.")
    second = run("adapt", *notes[:2], "--bank", bank, "--model", model)
    assert second.stdout == f"0 added, 1 updated, 1 unchanged; {bank} holds 4 documents\n"

    plain = run("ask", "Who closed the harbour?", "--bank", bank, "--model", model)
    assert plain.exit_code == 0, plain.output
    explained = run("ask", "Who closed the harbour?", "--bank", bank, "--model", model, "--explain")
    assert explained.stdout.startswith(plain.stdout)
    table = explained.stdout.removeprefix(plain.stdout)
    assert "r[1]" in table
    shares = [float(word.rstrip("%")) for word in table.split() if word.endswith("%")]
    assert len(shares) == 4
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100, abs=0.3)

    described = run("bank", "info", "--bank", bank)
    assert described.exit_code == 0
    assert described.stdout.split()[:2] == ["documents", "4"]
    assert "16 of width 64 (4 for each of 4 rows)" in described.stdout
    assert remembered.fingerprint in described.stdout


def test_a_long_document_is_remembered_in_parts_or_refused(model: str, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("The harbour of Lund was opened by Ada Voss. " * 60)
    arguments = ("adapt", tmp_path / "long.txt", "--bank", tmp_path / "bank", "--model", model)
    assert "long.txt" in refusal(*arguments, "--on-long", "error")
    assert not (tmp_path / "bank").exists()
    adapted = run(*arguments)
    assert adapted.exit_code == 0
    bank = MemoryBank.open(tmp_path / "bank")
    assert len(bank) == 1
    assert len(bank.phi) > 1
    assert f"{len(bank.phi)} rows: documents beyond the limit were cut into parts" in adapted.stdout


def test_a_folder_of_pages_is_remembered_with_their_titles(model: str, tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "a.html").write_text("<title>May</title><p>Ada Voss opened the harbour.")
    (tmp_path / "in" / "b.txt").write_text("The bridge of Orm was closed.")
    done = run("adapt", tmp_path / "in", "--bank", tmp_path / "bank", "--model", model)
    assert done.stdout.startswith("2 added"), done.output
    bank = MemoryBank.open(tmp_path / "bank")
    assert bank[str(tmp_path / "in" / "deep" / "a.html")].metadata == {"title": "May"}
    (tmp_path / "in" / "c.docx").write_bytes(b"PK")
    message = refusal("adapt", tmp_path / "in", "--bank", tmp_path / "bank", "--model", model)
    assert "c.docx is not a file of Word" in message


def test_what_is_bad_is_left_out_and_listed_and_nothing_else(model: str, tmp_path: Path) -> None:
    good, bad = '{{"id": "{0}", "text": "Rain fell on {0}."}}', tmp_path / "rows.jsonl"
    rows = [good.format("a"), "{", good.format("b"), '{"id": "c"}', good.format("a"), '{"id": "d", "text": " "}']
    bad.write_text("\n".join(rows))
    (tmp_path / "table.csv").write_text('id,text\ne,Snow.\nf\n,No id.\ng,Hail.\nh,"Open\n')
    (tmp_path / "binary.txt").write_bytes(b"GIF\0")
    (tmp_path / "note.md").write_text("Fog lay on Tarn.")
    (tmp_path / "empty").mkdir()
    names = ("rows.jsonl", "table.csv", "binary.txt", "missing.txt", "note.md", "empty")
    arguments = ["adapt", *(tmp_path / name for name in names), "--bank", tmp_path / "bank", "--model", model]
    assert "empty is a folder without files" in refusal(*arguments)
    message = refusal("adapt", tmp_path / "missing.txt", "--bank", tmp_path / "bank", "--model", model)
    assert message.startswith(f"{tmp_path / 'missing.txt'} cannot be read: No such file or directory")
    assert not (tmp_path / "bank").exists()
    done = run(*arguments, "--skip-bad", "--retriever", "bm25")
    assert done.exit_code == 0, done.output
    remembered = MemoryBank.open(tmp_path / "bank").document_ids
    assert remembered == ["a", "b", "e", "g", str(tmp_path / "note.md")]
    assert "5 documents written to bm25, which holds 5" in done.stdout
    lines = [line for line in done.stderr.splitlines() if "left out" in line]
    listed = [line.removeprefix(f"left out: {tmp_path}/") for line in lines]
    starts = (
        "empty is a folder without files",
        "rows.jsonl, row 2: not JSON",
        "rows.jsonl, row 4: no 'text'",
        "rows.jsonl, row 6: 'text' is empty",
        "table.csv, row 2 (line 3), column 'text'",
        "table.csv, row 3 (line 4): 'id' is empty",
        "table.csv, row 5 (line 6): not well-formed CSV",
        "binary.txt is not a text in UTF-8",
        "missing.txt cannot be read",
        "rows.jsonl, row 5: document id 'a' occurs twice",
        "10 left out",
    )
    assert len(listed) == len(starts), listed
    for line, start in zip(listed, starts):
        assert line.startswith(start), line
    assert listed[6].endswith("nothing after it in this file is read")

    again = run(*arguments, "--skip-bad")
    assert again.stdout.startswith("0 added, 0 updated, 5 unchanged")
    nothing = run("adapt", tmp_path / "binary.txt", "--skip-bad", "--bank", tmp_path / "other", "--model", model)
    assert (nothing.exit_code, (tmp_path / "other").exists()) == (1, False)


def test_rows_of_a_table_and_standard_input(model: str, tmp_path: Path) -> None:
    bank = tmp_path / "bank"
    (tmp_path / "t.csv").write_text("id,text,source\n1,Rain fell on Kell.,radio\n2,Snow fell on Tarn.,post\n")
    assert run("adapt", tmp_path / "t.csv", "--bank", bank, "--model", model).stdout.startswith("2 added")
    arguments = ["adapt", "-", "--bank", str(bank), "--model", model]
    assert CliRunner().invoke(app, arguments, input="Hail fell on Orm.").stdout.startswith("1 added")
    assert CliRunner().invoke(app, arguments, input='{"id": "3", "text": "Fog."}\n').stdout.startswith("1 added")
    remembered = MemoryBank.open(bank)
    assert remembered.document_ids == ["1", "2", "-", "3"]
    assert remembered["2"].metadata == {"source": "post"}
    (tmp_path / "bad.csv").write_text("id,body\n1,x\n")
    assert "missing column 'text'" in refusal("adapt", tmp_path / "bad.csv", "--bank", bank, "--model", model)


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--actors", 2], "--actors 2 needs --ray; add --ray, or leave --actors out"),
            (["--ray", "--device-map", "auto"], "--device-map auto does not work with --ray; leave one of them out"),
            (["--model", "mac-nowhere"], "'mac-nowhere'"),
        ],
    )
    def test_bad_options_are_refused(self, tmp_path: Path, options: list[object], message: str) -> None:
        (tmp_path / "a.txt").write_text("Rain fell.")
        assert message in refusal("adapt", tmp_path, "--bank", tmp_path / "bank", *options)

    def test_ray_is_missing(self, notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "ray", None)
        message = refusal("adapt", *notes, "--bank", tmp_path / "bank", "--model", "mac-tiny", "--ray")
        assert "pip install 'mac-rag[ray]'" in message
        assert not (tmp_path / "bank").exists()

    def test_empty_bank(self, model: str, tmp_path: Path) -> None:
        bank = tmp_path / "bank"
        MemoryBank(MACModel.from_pretrained(model).fingerprint).save(bank)
        assert "empty" in refusal("ask", "Who?", "--bank", bank, "--model", model)
        assert run("bank", "info", "--bank", bank).stdout.split()[:2] == ["documents", "0"]

    def test_no_bank(self, tmp_path: Path) -> None:
        for command in (("ask", "Who?"), ("bank", "info"), ("bank", "list"), ("bank", "verify")):
            assert "there is no memory bank" in refusal(*command, "--bank", tmp_path / "bank")

    def test_a_file_that_is_no_bank(self, model: str, notes: list[str], tmp_path: Path) -> None:
        (tmp_path / "letter").write_text("Dear Ada,")
        assert "no memory bank" in refusal("adapt", *notes, "--bank", tmp_path / "letter", "--model", model)
        assert (tmp_path / "letter").read_text() == "Dear Ada,"

    def test_wrong_usage(self, tmp_path: Path) -> None:
        for arguments in (("ask", "Who?"), ("adapt", "--bank", tmp_path), ("forget",), ()):
            assert run(*arguments).exit_code == 2


def test_an_error_ends_with_code_1_and_one_message_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mac-rag", "bank", "info", "--bank", str(tmp_path / "bank")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"error: there is no memory bank {tmp_path / 'bank'}\n"


def test_every_command_that_loads_a_model_takes_a_device_map(model: str, notes: list[str], tmp_path: Path) -> None:
    bank, places = tmp_path / "bank", ("--retriever", "bm25")
    auto = ("--model", model, "--device-map", "auto")
    assert run("adapt", notes[0], "--bank", bank, *places, *auto).exit_code == 0
    question = ("ask", "Who opened the harbour?", "--bank", bank)
    assert run(*question, *auto).stdout == run(*question, "--model", model).stdout
    assert run("reconcile", "--bank", bank, *places, *auto).exit_code == 0
    nowhere = ("--model", model, "--device-map", "everywhere")
    for command in (
        ("adapt", notes[0], "--bank", bank), question, ("reconcile", "--bank", bank, *places), ("try",),
    ):  # fmt: skip
        assert "everywhere" in refusal(*command, *nowhere)


def test_version() -> None:
    assert run("--version").stdout == f"mac-rag {version('mac-rag')}\n"


def test_help_imports_nothing_heavy() -> None:
    heavy = {*HEAVY, "numpy", "fastapi", "starlette", "uvicorn", "mcp", "prometheus_client"}
    commands = ["", "adapt", "ask", "chat", "bank", "bank info", "bank list", "bank rebuild", "fetch"]
    commands += ["serve", "mcp", "key add"]
    code = (
        "import sys\n"
        "from mac_rag.cli.main import main\n"
        f"for arguments in {commands!r}:\n"
        "    sys.argv = ['mac-rag', *arguments.split(), '--help']\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as end:\n"
        "        assert not end.code\n"
        f"    assert not {heavy!r} & set(sys.modules)\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("Usage") == len(commands)


def test_lines_typed_in_are_remembered_and_asked(model: str) -> None:
    lines = "Who is mayor?\nAda Voss is mayor of Lund.\n\n  Rain fell on Kell.  \nWho is mayor of Lund?\n"
    result = CliRunner().invoke(app, ["try", "-", "--model", model], input=lines)
    assert result.exit_code == 0, result.output
    ways = re.findall(r"^  (LM alone|MAC|BM25 \+ MAC|BM25) ", result.stdout, re.MULTILINE)
    # Before the first paragraph there is only the LM to ask.
    assert ways == ["LM alone", "LM alone", "MAC", "BM25", "BM25 + MAC"]
    assert len(re.findall(r"^remembered in [\d.]+ s: (?:Ada|Rain fell on Kell\.$)", result.stdout, re.MULTILINE)) == 2


def test_without_lines_the_sample_is_tried(model: str) -> None:
    result = run("try", "--model", model)
    assert result.stdout.count("remembered") == 3
    assert result.stdout.count("BM25 + MAC") == 3
    assert run("try", "file.txt", "--model", model).exit_code == 2
