"""A bank on an S3 server: uploaded, read, and followed from commit to commit."""

from __future__ import annotations

import sys
from pathlib import Path

import fsspec
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from mac_rag.cache import CACHE_VARIABLE
from mac_rag.cli.main import app
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, DamageError, FingerprintError
from mac_rag.memory import MemoryBank
from mac_rag.memory.storage.remote.examination import verify_url
from mac_rag.memory.storage.remote.object_store import ObjectStore
from mac_rag.memory.storage.remote.upload import upload
from mac_rag.model import MACModel
from tests.memory.helpers import contents, put

DOCUMENTS = [Document(f"document {number}", f"text number {number}") for number in range(8)]


def filled(folder: Path, names: int = 3, **settings: bool) -> MemoryBank:
    bank = MemoryBank.create(folder, "model", **settings)
    for number in range(names):
        put(bank, f"document {number}", float(number))
    return bank


def names(url: str) -> set[str]:
    fs, path = fsspec.url_to_fs(url)
    return {place.rpartition("/")[2] for place in fs.find(path)}


def test_an_engine_answers_from_an_uploaded_bank_as_from_the_folder(
    s3: str, cache: Path, tmp_path: Path, tiny_model: MACModel
) -> None:
    with MemoryBank.create(tmp_path / "bank", tiny_model.fingerprint, keep_texts=True) as bank:
        MACEngine(tiny_model, bank).adapt(DOCUMENTS)
    upload(tmp_path / "bank", s3)
    local, remote = MemoryBank.open(tmp_path / "bank"), MemoryBank.open(s3)
    assert remote.folder == s3
    assert remote.document_ids == local.document_ids
    questions = ["Which number?", "What text?"]
    ours, theirs = (MACEngine(tiny_model, bank).aggregate(questions) for bank in (remote, local))
    assert torch.equal(ours, theirs)
    assert torch.equal(remote.phi, local.phi)
    assert remote["document 3"].texts == ("text number 3",)
    assert not remote.writable


def test_a_codebook_bank_is_read_from_the_store(s3: str, cache: Path, tmp_path: Path) -> None:
    codebook = torch.tensor([[0.0, 0, 0], [1, 1, 1], [2, 2, 2]])
    with MemoryBank.create(tmp_path / "bank", "model", codebook=codebook) as bank:
        for number in range(3):
            put(bank, f"document {number}", float(number))
    upload(tmp_path / "bank", s3)
    assert contents(MemoryBank.open(s3)) == {f"document {number}": number for number in range(3)}


def test_upload_writes_only_what_is_not_there(s3: str, cache: Path, tmp_path: Path) -> None:
    with filled(tmp_path / "bank") as bank:
        first = upload(tmp_path / "bank", s3)
        assert first.documents == 3
        assert first.files == len([name for name in names(s3) if name.startswith("segment")])
        again = upload(tmp_path / "bank", s3)
        assert (again.documents, again.files, again.bytes, again.removed) == (3, 0, 0, 0)
        put(bank, "document 3", 3.0)
        put(bank, "document 4", 4.0)
        later = upload(tmp_path / "bank", s3)
    assert later.documents == 5
    assert 0 < later.files < len([name for name in names(s3) if name.startswith("segment")])
    assert contents(MemoryBank.open(s3)) == contents(bank)


def test_a_reader_follows_an_upload_and_a_late_one_reads_the_former_commit(
    s3: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled(tmp_path / "bank") as bank:
        upload(tmp_path / "bank", s3)
        before = contents(bank)
        reader, late = MemoryBank.open(s3), MemoryBank.open(s3)
        assert not reader.refresh()
        bank.delete("document 1")
        bank.compact()
        upload(tmp_path / "bank", s3)
        # Nothing of its rows was in the cache; the files of the former commit are still there.
        assert contents(late) == before
        assert reader.refresh()
        assert contents(reader) == contents(bank)
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "another cache"))
        gone = MemoryBank.open(s3)
        for number in range(2):
            bank.delete(f"document {2 * number}")
            put(bank, f"document {5 + number}", 5.0 + number)
            bank.compact()
            assert upload(tmp_path / "bank", s3).removed
        with pytest.raises(BankError, match=r"missing; if the bank was uploaded since.*refresh"):
            contents(gone)
        assert gone.refresh()
        assert contents(gone) == contents(bank)


def test_an_upload_replaces_no_later_commit_and_no_other_bank(s3: str, cache: Path, tmp_path: Path) -> None:
    filled(tmp_path / "long").close()
    filled(tmp_path / "short", 1).close()
    upload(tmp_path / "long", s3)
    with pytest.raises(BankError, match=r"generation 3, and .*short is at generation 1"):
        upload(tmp_path / "short", s3)
    MemoryBank.create(tmp_path / "other", "another model").close()
    with pytest.raises(FingerprintError, match="choose another URL"):
        upload(tmp_path / "other", s3)
    assert len(MemoryBank.open(s3)) == 3


def test_a_bank_that_overwrites_what_it_deletes_stays_in_folders(s3: str, cache: Path, tmp_path: Path) -> None:
    filled(tmp_path / "bank", secure_delete=True).close()
    with pytest.raises(BankError, match="overwrites what it deletes"):
        upload(tmp_path / "bank", s3)
    fs, path = fsspec.url_to_fs(s3)
    fs.put(str(tmp_path / "bank"), path, recursive=True)  # as with other tools
    with pytest.raises(BankError, match="overwrites what it deletes"):
        MemoryBank.open(s3)
    assert not list(cache.rglob("segment*"))


def test_no_writing_behind_a_url(s3: str, cache: Path, tmp_path: Path) -> None:
    with filled(tmp_path / "bank") as bank:
        for write in (
            lambda: MemoryBank.open(s3, write=True),
            lambda: MemoryBank.create(s3, "model"),
            lambda: MemoryBank.create_on_commit(s3, "model"),
            lambda: bank.save(s3),
        ):
            with pytest.raises(BankError, match=r"can only be read; write to a bank in a folder.*mac-rag bank upload"):
                write()
    upload(tmp_path / "bank", s3)
    with pytest.raises(BankError, match="can only be read"):
        MemoryBank.open(s3).commit()
    assert not Path("s3:").exists()


def test_missing_banks_buckets_and_packages_are_errors_with_a_remedy(s3: str, cache: Path) -> None:
    with pytest.raises(BankError, match=rf"there is no memory bank at {s3}; put one there"):
        MemoryBank.open(s3)
    assert not MemoryBank.exists(s3)
    with pytest.raises(BankError, match="no memory bank at s3://no-such-bucket"):
        MemoryBank.open("s3://no-such-bucket/bank")
    with pytest.raises(BankError, match=r"needs a package that is not installed.*pip install 'mac-rag\[remote\]'"):
        MemoryBank.open("gs://bucket/bank")
    with pytest.raises(BankError, match="fsspec knows no protocol 'nonsense'"):
        MemoryBank.open("nonsense://bucket/bank")


def test_without_fsspec_the_error_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(BankError, match=r"pip install 'mac-rag\[remote\]'"):
        MemoryBank.open("s3://bucket/bank")


@pytest.mark.parametrize("url", ["https://me:secret-word@host/bank", "https://host/bank?signature=secret-word"])
def test_secrets_in_urls_are_refused_and_not_repeated(url: str, cache: Path) -> None:
    with pytest.raises(BankError) as error:
        MemoryBank.open(url)
    assert "secret-word" not in str(error.value)


def test_credentials_appear_in_no_error(s3: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.filesystem("s3").clear_instance_cache()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(BankError, match="check the connection and the endpoint") as error:
        ObjectStore(s3, waits=()).read("manifest.json", 100)
    assert "of-the-test" not in str(error.value)
    fsspec.filesystem("s3").clear_instance_cache()


def test_the_cache_is_private(s3: str, cache: Path, tmp_path: Path) -> None:
    filled(tmp_path / "bank", keep_texts=True).close()
    upload(tmp_path / "bank", s3)
    bank = MemoryBank.open(s3)
    contents(bank)
    assert bank["document 1"].texts == ("text 1.0",)
    places = [cache, *cache.rglob("*")]
    assert any(place.name.endswith(".texts.jsonl") for place in places)
    assert {place.stat().st_mode & 0o777 for place in places if place.is_dir()} == {0o700}
    assert {place.stat().st_mode & 0o777 for place in places if place.is_file()} == {0o600}


def test_the_commands_that_read_take_a_url_and_those_that_write_say_what_to_do(
    s3: str, cache: Path, tmp_path: Path, tiny_model: MACModel, tiny_checkpoint: Path
) -> None:
    with MemoryBank.create(tmp_path / "bank", tiny_model.fingerprint) as bank:
        MACEngine(tiny_model, bank).adapt(DOCUMENTS)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments))

    uploaded = run("bank", "upload", "--bank", str(tmp_path / "bank"), "--to", s3)
    assert uploaded.output.startswith(f"8 documents are at {s3}: ")
    assert "documents      8" in run("bank", "info", "--bank", s3).output
    assert "document 7" in run("bank", "list", "--bank", s3).output
    assert run("bank", "verify", "--bank", s3).output.startswith(f"{s3} holds 8 documents, none of them damaged")
    asked = [
        run("ask", "Which?", "--model", str(tiny_checkpoint), "--bank", place) for place in (s3, str(tmp_path / "bank"))
    ]
    assert asked[0].output == asked[1].output
    assert asked[0].exit_code == 0
    assert run("bank", "backup", "--bank", s3, "--output", str(tmp_path / "copy")).exit_code == 0
    assert torch.equal(MemoryBank.open(tmp_path / "copy").phi, bank.phi)
    for arguments in (
        ("adapt", __file__, "--bank", s3),
        ("bank", "delete", "x", "--bank", s3),
        ("bank", "compact", "--bank", s3),
        ("bank", "repair", "--bank", s3),
        ("bank", "backup", "--bank", str(tmp_path / "bank"), "--output", s3),
    ):
        refused = run(*arguments)
        assert isinstance(refused.exception, BankError)
        assert "mac-rag bank upload --bank FOLDER --to URL" in str(refused.exception)


def test_verify_names_what_is_damaged_in_the_store(s3: str, cache: Path, tmp_path: Path) -> None:
    filled(tmp_path / "bank", 3).close()
    upload(tmp_path / "bank", s3)
    assert verify_url(s3).clean
    fs, path = fsspec.url_to_fs(s3)
    [rows] = [name for name in sorted(names(s3)) if name.endswith(".safetensors")][:1]
    data = bytearray(fs.cat_file(f"{path}/{rows}"))
    data[-1] ^= 255
    fs.pipe_file(f"{path}/{rows}", bytes(data))
    report = verify_url(s3)
    assert report.damage == (f"{s3}/{rows} is damaged",)
    assert len(report.lost) == 1
    assert report.documents == 2
    assert "upload" in str(report)
    [lost] = report.lost
    bank = MemoryBank.open(s3)
    with pytest.raises(DamageError, match=rf"{s3}/{rows} is damaged: .*{lost}.*remove that object"):
        bank[lost].phi  # noqa: B018
    assert sum(bank[name].phi.numel() > 0 for name in bank.document_ids if name != lost) == 2
    fs.rm_file(f"{path}/{rows}")
    assert verify_url(s3).damage == (f"{s3}/{rows} is missing",)
    upload(tmp_path / "bank", s3)  # as the error said
    assert verify_url(s3).clean
    assert contents(MemoryBank.open(s3)) == {f"document {number}": number for number in range(3)}
