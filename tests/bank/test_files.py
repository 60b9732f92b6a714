"""The bank's file: who may open it, what is refused, what is left behind, and what becomes of deleted bytes."""

from __future__ import annotations

import gc
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from mac_rag.bank import MemoryBank, database
from mac_rag.bank.copies import backup, restore
from mac_rag.bank.keys_file import keys_path
from mac_rag.bank.rows import RowLayout
from mac_rag.bank.verify import verify
from mac_rag.data.types import Document
from mac_rag.errors import BankError, DamageError, FingerprintError, FullDiskError
from tests.bank.helpers import alter, contents, files_of, memory, put


@pytest.fixture
def path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The name of a bank that is not there; nobody waits long for other processes."""
    monkeypatch.setattr(database, "_WAIT", 0.05)
    return folder / "bank"


def made(path: Path, *names: str, **settings: Any) -> MemoryBank:
    bank = MemoryBank.create(path, "f00d", **settings)
    for number, name in enumerate(names):
        bank.put([Document(name, f"text of {name}")], memory(1, number))
    bank.commit()
    return bank


def test_one_writer_at_a_time(path: Path) -> None:
    bank = made(path, "a")
    lock = path.with_name("bank-lock")
    with pytest.raises(BankError, match=rf"open for writing in process {os.getpid()} since 20.*; wait"):
        MemoryBank.open(path, write=True)
    lock.write_text("{")
    with pytest.raises(BankError, match="open for writing in another process"):
        MemoryBank.open(path, write=True)
    assert MemoryBank.open(path).document_ids == ["a"]
    bank.close()
    bank.close()
    with pytest.raises(FingerprintError):  # a writer that is refused is none
        MemoryBank.open(path, write=True, fingerprint="beef")
    MemoryBank.open(path, write=True).close()
    assert not lock.exists()


@pytest.mark.parametrize("step", ["_identity", "Connection.end", "Connection.close", "Path.unlink"])
@pytest.mark.parametrize("number", [0, 1])
def test_an_interrupted_opening_or_closing_frees_the_lock(
    path: Path, step: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(path, "a").close()
    owner, _, name = ("database." + step).rpartition(".")
    place = {"database": database, "database.Connection": database.Connection, "database.Path": Path}[owner]
    act, calls = getattr(place, name), 0

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        found = act(*arguments, **options)
        if calls == first + number:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(place, name, interrupted)
    first = -9
    with MemoryBank.open(path, write=True) as bank:
        assert len(bank.snapshot()) == 1  # a second connection
        first = calls + 1
        with suppress(KeyboardInterrupt):
            bank.close()
    first = calls + 1
    with suppress(KeyboardInterrupt):
        MemoryBank.open(path, write=True).close()
    first = -9
    MemoryBank.open(path, write=True).close()


def test_a_bank_for_reading_cannot_be_changed(path: Path) -> None:
    made(path, "a", "b").close()
    reader = MemoryBank.open(path)
    changes: list[Callable[[], object]] = [
        lambda: reader.put([Document("c", "")], memory(1)),
        lambda: reader.delete("a"),
        lambda: reader.merge(["a", "b"], memory(1)),
        lambda: reader.describe([Document("a", "text of a")]),
        lambda: reader.keep_rows_as(RowLayout()),
        reader.commit,
        reader.compact,
    ]
    for change in changes:
        with pytest.raises(BankError, match="not open for writing"):
            change()
    reader.rollback()
    assert contents(reader) == {"a": 0.0, "b": 1.0}


def test_new_banks(path: Path) -> None:
    place = path / "new" / "bank"
    assert not MemoryBank.exists(place)
    made(place, "a").close()
    assert MemoryBank.exists(place)
    late = MemoryBank.create_on_commit(place, "f00d")
    for again in (lambda: made(place), lambda: MemoryBank("f00d").save(place), late.commit):
        with pytest.raises(BankError, match="holds a memory bank or another file"):
            again()
    assert contents(MemoryBank.open(place)) == {"a": 0.0}
    for look in (MemoryBank.open, verify):
        with pytest.raises(BankError, match=r"there is no memory bank .*/nowhere"):
            look(path / "nowhere")
    with pytest.raises(BankError, match=r"Not a directory"):
        MemoryBank.create(place / "bank", "f00d")
    gc.collect()
    assert [file.name for file in place.parent.iterdir()] == ["bank"]


def test_what_was_never_committed_is_forgotten(path: Path) -> None:
    with made(path, "a", "b") as bank:
        bank.delete("a")
        bank.put([Document("c", "")], memory(1))
        snapshot = bank.snapshot()
    with pytest.raises(BankError, match="open it again"):
        _ = bank.document_ids
    with pytest.raises(BankError, match=r"[Oo]pen it again"):
        _ = snapshot.document_ids
    assert contents(MemoryBank.open(path)) == {"a": 0.0, "b": 1.0}


@pytest.mark.parametrize("name", ["a b?#%.mac", "ü", os.fsdecode(b"\xff.mac"), ":memory:", "file:x", "-x"])
def test_names_of_files(path: Path, name: str) -> None:
    for place in (path / name, Path(f"/{path}") / name):
        made(place, "a").close()
        assert contents(MemoryBank.open(place)) == {"a": 0.0}
        place.unlink()


def foreign(path: Path, **pragmas: int) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE a (b)")
        for name, value in pragmas.items():
            other.execute(f"PRAGMA {name} = {value}")
        other.commit()


def shortened(path: Path, size: int) -> None:
    made(path, *"abc").close()
    os.truncate(path, size)


FOREIGN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a folder": (Path.mkdir, "is a folder"),
    "a pipe": (os.mkfifo, "is not a file"),
    "a link": (lambda path: path.symlink_to("nothing"), "is a link to nothing"),
    "a text": (lambda path: path.write_text("Dear Ada, " * 200), "no memory bank"),
    "a short text": (lambda path: path.write_text("Dear Ada"), "no memory bank"),
    "another database": (foreign, "not a memory bank"),
    "another version": (
        lambda path: foreign(path, application_id=database.APPLICATION, user_version=9),
        "has format 9, and this version of mac_rag reads format 1",
    ),
    "another schema": (
        lambda path: foreign(path, application_id=database.APPLICATION, user_version=1),
        "tables that no memory bank has",
    ),
    "cut short": (lambda path: shortened(path, 5000), "damaged"),
    "its first page": (lambda path: shortened(path, 4096), "damaged"),
    "empty": (Path.touch, "no memory bank"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_other_files_are_refused_and_stay_as_they_are(path: Path, kind: str) -> None:
    make, message = FOREIGN[kind]
    make(path)
    before = path.read_bytes() if path.is_file() else None
    for write in (False, True):
        with pytest.raises(BankError, match=message):
            MemoryBank.open(path, write=write)
    if kind == "empty":
        made(path, "a").close()
        return
    with pytest.raises(BankError):
        MemoryBank.create(path, "f00d")
    assert (path.read_bytes() if path.is_file() else None) == before
    assert [file.name for file in path.parent.iterdir()] == ["bank"]


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER one AFTER INSERT ON document BEGIN DELETE FROM row; END",
        "CREATE VIEW one AS SELECT 1",
        "CREATE TABLE one (two)",
        "DROP TABLE change",
        "ALTER TABLE text RENAME COLUMN text TO words",
    ],
)
def test_a_schema_that_is_not_that_of_a_bank_is_refused(path: Path, statement: str) -> None:
    made(path, "a").close()
    with closing(sqlite3.connect(path)) as other:
        other.execute(statement)
    for write in (False, True):
        with pytest.raises(DamageError, match="tables that no memory bank has"):
            MemoryBank.open(path, write=write)


STEPS = ["_new_file", "sync_folder", "check_format", "make_folder", "copy_to"]


@pytest.mark.parametrize("step", STEPS)
def test_a_creation_that_fails_leaves_nothing(path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = MemoryBank.create_on_commit(path, "f00d")
    bank.put([Document("a", "")], memory(1))
    saved = made(path.with_name("saved"), "a")
    creations: list[Callable[[], object]] = [bank.commit, lambda: saved.save(path), lambda: made(path, "a").close()]
    for create in creations:
        with monkeypatch.context() as patch:

            def fail(*_: Any) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(database.Connection if step == "copy_to" else database, step, fail)
            try:
                create()
            except (FullDiskError, OSError):
                assert not list(path.parent.glob("bank*"))
                patch.undo()
                create()
        assert contents(MemoryBank.open(path)) == {"a": 1.0 if create == bank.commit else 0.0}
        bank.close()
        gc.collect()  # readers go, and their logs
        path.unlink()


def test_a_creation_that_has_failed_can_be_taken_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = MemoryBank.create_on_commit(path, "f00d")
    bank.put([Document("a", "")], memory(1))
    keys = bank.row_keys.tolist()
    with monkeypatch.context() as patch:
        patch.setattr(database, "sync_folder", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(FullDiskError):
            bank.commit()
    bank.rollback()
    assert len(bank) == 0
    bank.put([Document("b", "")], memory(1, 5))
    assert bank.row_keys.tolist() > keys  # a key is never used again
    bank.commit()
    bank.close()
    assert contents(MemoryBank.open(path)) == {"b": 5.0}


def test_the_log_of_a_bank_that_was_removed_is_no_part_of_the_next(path: Path) -> None:
    bank = made(path, "a")
    log = path.with_name("bank-wal").read_bytes()
    bank.close()
    path.unlink()
    path.with_name("bank-wal").write_bytes(log)
    made(path, "b").close()
    assert contents(MemoryBank.open(path)) == {"b": 0.0}


def in_child(action: Callable[[], bool]) -> bool:
    """True if the action, in a forked process, returns True."""
    if (child := os.fork()) == 0:
        try:
            os._exit(0 if action() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("mode", [0o500, 0o700])
def test_a_bank_where_nothing_can_be_written_can_be_read(path: Path, mode: int) -> None:
    made(path, "a", "b").close()
    path.chmod(0o400)
    for place in (path.parent, path):
        if os.getuid() == 0:
            os.chown(place, 65534, 65534)
    path.parent.chmod(mode)

    def read() -> bool:
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        with pytest.raises(BankError, match=r"cannot be written to"):
            put(MemoryBank.open(path, write=True), "c", 3)
        return contents(MemoryBank.open(path)) == {"a": 0.0, "b": 1.0}

    try:
        assert in_child(read)
    finally:
        path.parent.chmod(0o700)


@pytest.mark.parametrize("begun", [False, True])
def test_a_fork_cannot_write_and_does_not_free_the_lock(path: Path, begun: bool) -> None:
    bank = made(path, "a")
    if begun:
        bank.put([Document("b", "")], memory(1, 2))

    def write() -> bool:
        for change in (lambda: bank.put([Document("c", "")], memory(1)), bank.commit):
            if begun or change != bank.commit:
                with pytest.raises(BankError, match="forked"):
                    change()
        bank.close()
        return True

    assert in_child(write)
    with pytest.raises(BankError, match="open for writing in process"):
        MemoryBank.open(path, write=True)
    put(bank, "d", 3)
    expected = {"a": 0, "b": 2, "d": 3} if begun else {"a": 0, "d": 3}
    assert contents(bank) == contents(MemoryBank.open(path)) == expected
    bank.close()
    assert verify(path).clean


@pytest.mark.parametrize("how", ["lock removed", "lock replaced", "bank removed", "bank replaced"])
def test_a_writer_whose_lock_or_file_was_taken_away(path: Path, how: str) -> None:
    bank = made(path, "a")
    bank.save(path.with_name("copy"))
    file = path.with_name("bank-lock") if how.startswith("lock") else path
    file.unlink()
    other = MemoryBank.open(path, write=True) if how == "lock replaced" else None
    if other is not None:
        put(other, "b", 2)
    if how == "bank replaced":
        path.with_name("copy").rename(path)
    with pytest.raises(BankError, match="removed or replaced while this process"):
        put(bank, "c", 3)
    bank.close()
    if other is not None:
        put(other, "d", 4)
        other.close()
    if how != "bank removed":
        assert contents(MemoryBank.open(path)) == ({"a": 0} if other is None else {"a": 0, "b": 2, "d": 4})


def test_a_commit_onto_one_that_the_writer_does_not_know_is_refused(path: Path) -> None:
    bank = made(path, "a")
    alter(path, "UPDATE setting SET version = 7")
    with pytest.raises(BankError, match="changed by another process meanwhile"):
        put(bank, "b", 1)


def test_a_bank_that_is_damaged_while_it_is_open_frees_its_lock(path: Path) -> None:
    bank = made(path, "a")
    alter(path, "UPDATE setting SET data = '{'")
    with pytest.raises(DamageError):
        bank.close()
    assert not path.with_name("bank-lock").exists()


def test_reading_does_not_load_the_bank(path: Path) -> None:
    """Rows stay on the disk until they are used, so a bank may be larger than memory."""
    with MemoryBank.create(path, "f00d") as bank:
        bank.put([Document(str(index), "") for index in range(200)], torch.rand(200, 64, 256))
        bank.commit()
    del bank
    gc.collect()
    before = private_bytes()
    reader = MemoryBank.open(path)
    assert sum(float(reader.take(torch.tensor([row])).sum()) for row in range(200)) > 0
    assert len([entry.document_id for entry in reader]) == 200
    gc.collect()
    assert private_bytes() - before < (20 << 20) + 200 * 64 * 256 * 4 // 10  # of which SQLite's cache takes 16


def private_bytes() -> int:
    """Memory of this process that is in no file."""
    status = Path("/proc/self/status").read_text().split("RssAnon:")[1]
    return int(status.split()[0]) * 1024


@pytest.fixture
def _umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_umask")
def test_files_are_private(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mac_rag.bank.bank._MANY_ROWS", 1)
    place = path / "banks" / "bank"
    with MemoryBank.create(place, "f00d", keep_texts=True) as bank:
        bank.keep_rows_as(RowLayout(summary=2))
        bank.put([Document("a", "first"), Document("b", "second")], memory(2))
        bank.compact()
        names = {file.name: stat.S_IMODE(file.stat().st_mode) for file in place.parent.iterdir()}
        assert names == dict.fromkeys(["bank", "bank-wal", "bank-shm", "bank-lock", "bank-keys"], 0o600)
    backup(place, path / "saved")
    assert stat.S_IMODE((path / "saved").stat().st_mode) == 0o600
    assert stat.S_IMODE(place.parent.stat().st_mode) == stat.S_IMODE(path.stat().st_mode) == 0o700


def secret_bank(path: Path) -> tuple[MemoryBank, list[bytes]]:
    """A bank with one document that will be deleted, and what must not be found of it afterwards."""
    tokens = torch.rand(2, 4, 16)
    bank = MemoryBank.create(path, "f00d", keep_texts=True)
    bank.keep_rows_as(RowLayout(dtype="fp32", summary=5, lexical_vectors=1))
    for name in ("secret id", "other"):
        note = {"note": f"metadata of {name}", "supersedes": ["an older one"] if name != "other" else []}
        phi = tokens if name != "other" else torch.rand(2, 4, 16)
        bank.put([Document(name, f"text of {name} " * 3000, note)], phi, [2], summarise=lambda kept: kept[:, 0, :5] + 3)
        bank.commit()
    traces = [tokens[0, :3].numpy().tobytes(), (tokens[1, 0, :5] + 3).numpy().tobytes(), tokens[0, 3].numpy().tobytes()]
    return bank, [*traces, b"secret id", b"metadata of secret", b"text of secret"]


@pytest.mark.parametrize("way", ["delete", "replace", "merge", "describe"])
def test_no_byte_of_what_was_deleted_is_left_after_a_commit(
    path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mac_rag.bank.bank._MANY_ROWS", 1)
    bank, traces = secret_bank(path)
    bank.compact()
    assert all(trace in files_of(path) for trace in traces)
    assert traces[1] in keys_path(path).read_bytes()
    if way == "delete":
        bank.delete("secret id")
    elif way == "replace":
        bank.put([Document("secret id", "new")], torch.rand(1, 4, 16))
        traces.remove(b"secret id")
    elif way == "merge":
        bank.merge(["secret id", "other"], torch.rand(1, 4, 16))
        traces = traces[:3]
    else:
        bank.describe([Document("secret id", "text of secret id " * 3000)])
        traces = [b"metadata of secret"]
    bank.commit()
    assert not [trace for trace in traces if trace in files_of(path)]
    bank.close()
    assert keys_path(path).exists()  # made of what was read of the former one
    assert not [trace for trace in traces if trace in files_of(path)]


def test_a_reader_keeps_deleted_bytes_until_it_goes_on(path: Path) -> None:
    bank, traces = secret_bank(path)
    reader = MemoryBank.open(path)
    bank.delete("secret id")
    bank.commit()
    with pytest.raises(BankError, match="somebody reads an older commit"):
        bank.compact()
    assert reader["secret id"].texts == ("text of secret id " * 3000,)
    assert reader.refresh()
    bank.compact()
    assert not [trace for trace in traces if trace in files_of(path)]
    assert reader.document_ids == ["other"]


def test_a_reader_that_follows_each_commit_does_not_keep_the_log(path: Path) -> None:
    with made(path, keep_texts=True) as bank:
        reader = MemoryBank.open(path)
        for number in range(30):
            bank.put([Document(f"{number}", "x" * 300_000)], memory(1))
            bank.commit()
            assert reader.refresh()
        assert path.with_name("bank-wal").stat().st_size < 3_000_000  # of nine


def test_compaction_makes_the_file_smaller_and_a_second_one_changes_nothing(path: Path) -> None:
    with made(path, *map(str, range(50)), keep_texts=True) as bank:
        bank.put([Document("large", "x" * 500_000)], memory(1))
        bank.compact()
        size, keys = path.stat().st_size, bank.row_keys.tolist()
        bank.delete("large")
        bank.compact()
        assert path.stat().st_size < size - 400_000
        assert bank.row_keys.tolist() == keys[:-1]
        before, version = path.read_bytes(), bank.commits
        bank.compact()
        assert (path.read_bytes(), bank.commits) == (before, version)


def test_texts_are_kept_from_the_beginning_or_never(path: Path) -> None:
    texts = {"a": "The bridge opened.", "b": "Für alle\n\u2028 Fälle \U0001f600", "c": ""}
    for keep_texts in (True, False):
        place = path / str(keep_texts)
        with MemoryBank.create(place, "f00d", keep_texts=keep_texts) as bank:
            bank.put([Document(name, text) for name, text in texts.items()], memory(3))
            bank.commit()
        kept = {entry.document_id: entry.texts[0] for entry in MemoryBank.open(place)}
        assert kept == (texts if keep_texts else dict.fromkeys(texts))
        assert (b"bridge" in files_of(place)) == keep_texts
    with pytest.raises(BankError, match=r"True keeps texts and .*False does not; choose a new file"):
        restore(path / "True", path / "False", replace=True)


@pytest.mark.parametrize("size", ["a large text", "many rows"])
def test_a_full_disk_changes_nothing_and_the_same_call_succeeds_later(path: Path, size: str) -> None:
    """A large change fills the disk before the commit, a small one at the commit."""
    with made(path, "a", "b", keep_texts=True) as bank:
        assert bank._database is not None
        assert bank._database.writer is not None

        def limited(pages: int) -> None:
            bank.connection.rows(f"PRAGMA max_page_count = {pages}")

        def change() -> None:
            bank.delete("a")
            bank.put([Document("c", "x" * (9_000_000 if size == "a large text" else 1))], memory(3000, 2), [3000])
            bank.commit()

        [(pages,)] = bank.connection.rows("PRAGMA page_count")
        limited(pages + 2)
        with pytest.raises(FullDiskError, match="free some space"):
            change()
        bank.rollback()
        assert contents(bank) == contents(MemoryBank.open(path)) == {"a": 0, "b": 1}
        assert verify(path).clean
        limited(1 << 30)
        change()
        assert contents(bank) == contents(MemoryBank.open(path)) == {"b": 1, "c": 2}
