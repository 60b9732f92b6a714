"""Copies of a bank: backups, and what they are put back from. Others may read and write the bank at the same time."""

from __future__ import annotations

import secrets
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from mac_rag.bank.bank import MemoryBank, Settings, has_commit, writer_at
from mac_rag.bank.database import PUT_SETTINGS, Connection, Database, exists, local_path
from mac_rag.bank.keys_file import remove_keys_file
from mac_rag.errors import BankError, FingerprintError
from mac_rag.shipped_models import describe


def backup(path: str | Path, into: str | Path) -> int:
    """Copies the last commit of a bank to a new file, a bank like any other.

    Args:
        path: file of the bank.
        into: the new file.

    Returns:
        The number of documents.

    Raises:
        BankError: when there is no bank, it is damaged, or there is a file of the new name.
    """
    with MemoryBank.open(path) as bank:
        bank.save(into)
        return len(bank)


def restore(source: str | Path, path: str | Path, *, replace: bool = False) -> int:
    """Puts a backup back.

    Args:
        source: file of the backup, or of any other bank.
        path: file of the bank: a new one; with `replace` also a bank of the same model.
        replace: replace all documents of the bank in one commit, to which its readers go on as to any other.

    Returns:
        The number of documents.

    Raises:
        BankError: when there is no backup, it is damaged, there is a bank and `replace` is False, or the bank cannot
            be written.
        FingerprintError: when the bank was written by another model than the backup.
    """
    if not replace or not exists(local_path(path)):
        return backup(source, path)
    with MemoryBank.open(source) as saved, TemporaryDirectory() as folder:
        copy = Path(folder) / "bank"
        saved.save(copy)
        with closing(Database.open(local_path(path), write=True)) as database:
            assert database.writer is not None
            mine, theirs = Settings.read(database.writer), Settings.read(saved.connection)
            check_same_kind(theirs, source, mine, path)
            version = max(mine.version, theirs.version) + 1
            numbers = {"version": version, "changes_since": version}
            numbers["next_sequence"] = max(mine.next_sequence, theirs.next_sequence)
            _put_after(copy, theirs.model_copy(update=numbers))
            _replace(database, copy)
        return len(saved)


def take_over(path: Path, copy: Path) -> None:
    """Makes a bank one that continues it, in one commit.

    Args:
        path: file of the bank; it need not be there.
        copy: file of the other bank, which nobody else uses.

    Raises:
        BankError: when the other bank does not continue this one, or the bank cannot be written.
        FingerprintError: when it is a bank of another model.
    """
    source = Database.open(copy, write=False)
    with closing(source):
        connection = source.pin().connection
        theirs = Settings.read(connection)
        if not exists(path):
            Database.create(path, connection).close()
            return
        with closing(Database.open(path, write=True)) as database:
            assert database.writer is not None
            mine = Settings.read(database.writer)
            check_same_kind(theirs, copy, mine, path)
            if not has_commit(connection, mine.version, writer_at(database.writer, mine.version)):
                raise BankError(
                    f"{path} is at commit {mine.version:,}, and what was fetched, at {theirs.version:,}, is an older "
                    "state of it or another bank; choose another file"
                )
            _replace(database, copy)


def _put_after(path: Path, settings: Settings) -> None:
    """Makes a copy a commit that comes after all others of the bank whose place it takes."""
    with closing(Connection(path, write=True)) as link:
        link.write("BEGIN IMMEDIATE")
        link.write(PUT_SETTINGS, [settings.row])
        link.write("DELETE FROM change")
        link.write("UPDATE bm25 SET lineage = ?", [(secrets.token_hex(8),)])
        link.write("INSERT INTO writer VALUES (?, ?)", [(settings.version, secrets.token_hex(8))])
        link.write("COMMIT")


def _replace(database: Database, copy: Path) -> None:
    assert database.writer is not None
    with closing(Connection(copy)) as source:
        database.writer.copy_from(source)
    remove_keys_file(database.path)


def check_same_kind(new: Settings, source: Path | str, former: Settings, target: Path | str) -> None:
    """Refuses to replace a bank by one of another model, or one that keeps texts by one that does not.

    Raises:
        BankError, FingerprintError: for such a bank.
    """
    if new.fingerprint != former.fingerprint:
        raise FingerprintError(
            f"{source} was written by {describe(new.fingerprint)} and {target} by {describe(former.fingerprint)}; "
            "choose a new file"
        )
    if new.keep_texts != former.keep_texts:
        with_texts, without = (source, target) if new.keep_texts else (target, source)
        raise BankError(f"{with_texts} keeps texts and {without} does not; choose a new file")
