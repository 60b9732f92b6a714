"""Commands without --model: the bank says which model wrote it, and who does not trust it is not led anywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mac_rag.bank import MemoryBank
from mac_rag.model import MACModel
from tests.bank.helpers import alter_setting
from tests.cli.helpers import refusal, run


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A model in a folder of its own, which a test may move."""
    shutil.copytree(tiny_checkpoint, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def bank(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("Ada Voss opened the harbour of Lund in May.")
    # The path as one types it: the bank keeps it in full.
    assert run("adapt", "a.txt", "--bank", "bank", "--model", "model").exit_code == 0
    return tmp_path / "bank"


def test_the_model_of_the_bank_is_found_again(bank: Path, checkpoint: Path, tmp_path: Path) -> None:
    asked = run("ask", "Who opened it?", "--bank", bank, "--model", checkpoint)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.chdir("/")
    found = run("ask", "Who opened it?", "--bank", bank)
    monkeypatch.undo()
    assert (found.exit_code, found.stdout) == (0, asked.stdout), found.output
    assert (
        f"model          {checkpoint}, {MemoryBank.open(bank).fingerprint}"
        in run("bank", "info", "--bank", bank).stdout
    )
    (tmp_path / "b.txt").write_text("Rain fell on Kell.")
    for command in (
        ["adapt", "b.txt", "--bank", bank],
        ["bank", "backup", "--bank", bank, "--output", "saved"],
        ["bank", "restore", "saved", "--bank", "restored"],
        ["ask", "Who opened it?", "--bank", "restored"],
        ["bank", "verify", "--bank", bank],
    ):
        done = run(*command)
        assert done.exit_code == 0, (command, done.output)


def test_a_shipped_model_is_not_noted(bank: Path, tmp_path: Path) -> None:
    assert run("adapt", "a.txt", "--bank", "other", "--model", "mac-tiny").exit_code == 0
    assert MemoryBank.open(tmp_path / "other").model is None
    assert run("ask", "Who opened it?", "--bank", "other").exit_code == 0
    assert run("adapt", "a.txt", "--bank", "other").stdout.startswith("0 added, 0 updated, 1 unchanged")


def test_both_models_are_named_when_they_differ(bank: Path, checkpoint: Path) -> None:
    message = refusal("ask", "Who?", "--bank", bank, "--model", "mac-tiny")
    short = MACModel.from_pretrained(checkpoint).fingerprint[:12]
    assert message.startswith(f"{bank} was written by {checkpoint} (model {short}) and cannot be read by mac-tiny; use")
    assert f"--model {checkpoint}, or make a new bank" in message
    assert message.endswith(f"mac-rag bank rebuild --bank {bank} --into NEW --model mac-tiny")
    assert refusal("adapt", "a.txt", "--bank", bank, "--model", "mac-tiny") == message


def test_a_model_that_has_gone_is_named(bank: Path, checkpoint: Path, tmp_path: Path) -> None:
    checkpoint.rename(tmp_path / "moved")
    message = refusal("ask", "Who?", "--bank", bank)
    assert message.startswith(f"{bank} was written by {checkpoint}, which is not in a folder of that name here")
    assert run("ask", "Who?", "--bank", bank, "--model", tmp_path / "moved").exit_code == 0


@pytest.mark.parametrize("name", ["someone/model", "model", "./model", "//host/share", "\\\\host\\share", "/dev/null"])
def test_nothing_is_fetched_because_a_bank_says_so(bank: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mac_rag.model.checkpoint.find", lambda *arguments: pytest.fail("a model was looked for"))
    note(bank, name)
    assert f"was written by {name}, which is not in a folder" in refusal("ask", "Who?", "--bank", bank)


def note(bank: Path, name: str | None) -> None:
    """Has a bank say that a model of this name has written it."""
    alter_setting(bank, "model", json.dumps(name))


def test_a_bank_that_names_no_model(bank: Path, checkpoint: Path) -> None:
    note(bank, None)
    message = refusal("ask", "Who?", "--bank", bank)
    short = MACModel.from_pretrained(checkpoint).fingerprint[:12]
    assert f"which model wrote it (model {short}), and no shipped one did; name the model: --model" in message
    assert run("ask", "Who?", "--bank", bank, "--model", checkpoint).exit_code == 0
    assert run("adapt", "a.txt", "--bank", bank, "--model", checkpoint).exit_code == 0
    assert MemoryBank.open(bank).model == str(checkpoint)
