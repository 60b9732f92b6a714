"""The command mac-rag bank on a bank of four documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mac_rag.bank import MemoryBank
from mac_rag.data.readers import read_documents
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.model import MACModel
from tests.bank.helpers import alter
from tests.cli.helpers import refusal, run


@pytest.fixture
def bank(model: str, notes: list[str], tmp_path: Path) -> Path:
    assert run("adapt", *notes, "--bank", tmp_path / "bank", "--model", model).exit_code == 0
    return tmp_path / "bank"


def test_list(bank: Path, notes: list[str]) -> None:
    rows = [json.loads(line) for line in run("bank", "list", "--bank", bank).stdout.splitlines()]
    assert [row["documents"][0]["id"] for row in rows] == [notes[0], notes[1], "r[1]", "r2"]
    assert rows[2]["documents"][0]["metadata"] == {"date": "2024-05-01"}
    assert rows[2]["documents"][0]["date"] == "2024-05-01"
    assert rows[0]["documents"][0]["date"] == rows[0]["documents"][0]["added"]


def test_a_question_as_of_a_date(bank: Path, model: str) -> None:
    asking = ("ask", "Where did rain fall?", "--bank", bank, "--model", model, "--explain")
    explained = run(*asking, "--as-of", "2024-06")
    assert "100.0%" in explained.stdout
    assert "r[1]" in explained.stdout
    refused = run(*asking, "--as-of", "03/04/2024")
    assert "can be read in several ways" in str(refused.exception)


def test_list_filters_and_pages(bank: Path, notes: list[str]) -> None:
    def listed(*options: object) -> list[str]:
        lines = run("bank", "list", "--bank", bank, *options).stdout.splitlines()
        return [document["id"] for line in lines for document in json.loads(line)["documents"]]

    assert listed("--id", "r[1]") == ["r[1]"]
    assert listed("--id", "r*") == ["r[1]", "r2"]
    assert listed("--id", "r") == []
    assert listed("--id", "*.md", "--id", "r2") == [notes[1], "r2"]
    assert listed("--where", "date=2024-05-01") == ["r[1]"]
    assert listed("--where", "date=2024-05-01", "--id", "r2") == []
    assert listed("--after", notes[1]) == ["r[1]", "r2"]
    first = run("bank", "list", "--bank", bank, "--limit", 3)
    assert first.stderr == "there are more; go on with --after 'r[1]'\n"
    assert listed("--limit", 3) + listed("--limit", 3, "--after", "r[1]") == [*notes[:2], "r[1]", "r2"]
    assert run("bank", "list", "--bank", bank, "--limit", 4).stderr == ""
    assert "'nowhere'" in refusal("bank", "list", "--bank", bank, "--after", "nowhere")
    assert run("bank", "list", "--bank", bank, "--where", "date").exit_code == 2


def test_metadata_of_all_kinds_are_compared(tmp_path: Path) -> None:
    metadata = {"n": 2005, "text": "2005", "truth": True, "none": None, "names": ["Ada", "Ines", 3], "empty": ""}
    bank = MemoryBank("0" * 64)
    bank.put([Document("all", "", metadata), Document("nothing", "")], torch.zeros(2, 1, 4))
    bank.commit()
    bank.save(tmp_path / "bank")

    def found(condition: str) -> bool:
        lines = run("bank", "list", "--bank", tmp_path / "bank", "--where", condition).stdout.splitlines()
        assert [json.loads(line)["documents"][0]["id"] for line in lines] in ([], ["all"])
        return bool(lines)

    fitting = ("n=2005", "text=2005", "truth=true", "none=null", "names=Ines", "names=3", "empty=")
    assert all(map(found, fitting))
    assert not any(map(found, ("n=2005.0", "n=20", "truth=True", "none=", "names=Ad", "empty=a", "lost=", "lost=null")))


def test_delete_and_compact(bank: Path) -> None:
    assert run("bank", "delete", "r2", "r[1]", "--bank", bank).stdout == f"2 deleted; {bank} holds 2 documents\n"
    assert "'r2'" in refusal("bank", "delete", "r2", "--bank", bank)
    assert run("bank", "compact", "--bank", bank).exit_code == 0
    assert b"r[1]" not in bank.read_bytes()


def test_deleting_one_of_several_that_are_one_entry_names_the_others(model: str, bank: Path) -> None:
    again = run("adapt", "-", "--bank", bank, "--model", model, "--max-entries", 1)
    assert again.exit_code != 0  # nothing on standard input
    (bank.parent / "new.txt").write_text("Fog lay on Ulm.")
    run("adapt", bank.parent / "new.txt", "--bank", bank, "--model", model, "--max-entries", 1)
    assert len(list(MemoryBank.open(bank))) == 1
    shown = run("bank", "delete", "r2", "--bank", bank).stdout
    assert shown.startswith(f"5 deleted; {bank} holds 0 documents\nalso deleted, because they were merged with these: ")
    assert "r[1]" in shown


def test_verify(bank: Path, tmp_path: Path) -> None:
    assert run("bank", "verify", "--bank", bank).exit_code == 0
    alter(bank, "UPDATE row SET codes = zeroblob(length(codes)) WHERE key = (SELECT max(key) FROM row)")
    found = run("bank", "verify", "--bank", bank)
    assert found.exit_code == 1
    assert "the memory tokens of 'r2'" in found.stdout.replace("\n", " ")
    assert "'r2'" in refusal("bank", "export", "--bank", bank, "--output", tmp_path / "out")
    assert run("bank", "delete", "r2", "--bank", bank).exit_code == 0
    assert run("bank", "verify", "--bank", bank).exit_code == 0


def test_export(bank: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert run("bank", "export", "--bank", bank, "--output", output).exit_code == 0
    assert torch.equal(load_file(output / "memory.safetensors")["phi"], MemoryBank.open(bank).phi)
    rows = [json.loads(line) for line in (output / "entries.jsonl").read_text().splitlines()]
    assert [row["rows"] for row in rows] == [1, 1, 1, 1]
    assert "is not empty" in refusal("bank", "export", "--bank", bank, "--output", output)
    assert not (output / "documents.jsonl").exists()  # the bank keeps no texts


def test_what_is_exported_is_adapted_to_again(model: str, tmp_path: Path) -> None:
    documents = [
        Document("a", "A storm\u2028 has\thit Wunville.\r\n\u0085", {"id": "other", "text": ["x"], "date": "2004-05"}),
        Document("b/\u00e9 \U0001f600", "Rain fell.", {"metadata": {"metadata": {}}, "supersedes": ["a"], "n": 1.5}),
        Document("[c]", '{"id": "in a text"}', {"deep": json.loads("[" * 62 + "]" * 62), "rows": None}),
    ]
    loaded = MACModel.from_pretrained(model)
    with MemoryBank.create(tmp_path / "first.mac", loaded.fingerprint, keep_texts=True) as bank:
        MACEngine(loaded, bank).adapt(documents)
    exported = run("bank", "export", "--bank", tmp_path / "first.mac", "--output", tmp_path / "out")
    assert exported.stdout.endswith("with their texts\n")
    file = tmp_path / "out" / "documents.jsonl"
    assert read_documents([file]) == documents
    adapt = ("adapt", file, "--bank", tmp_path / "second.mac", "--model", model, "--keep-texts")
    assert "3 added" in run(*adapt).stdout
    first, second = MemoryBank.open(tmp_path / "first.mac"), MemoryBank.open(tmp_path / "second.mac")
    assert [entry.members[0].content_hash for entry in first] == [entry.members[0].content_hash for entry in second]
    assert torch.equal(first.phi, second.phi)
