"""Backups: a bank copied while others write to it, and put back."""

from __future__ import annotations

from pathlib import Path

from mac_rag.errors import BankError, FingerprintError
from mac_rag.memory.storage.folder import is_vacant, local_folder
from mac_rag.memory.storage.model_name import copy_model_name
from mac_rag.memory.storage.store import Store
from mac_rag.shipped_models import describe


def backup(folder: str | Path, into: str | Path) -> int:
    """Copies the last commit of a bank into a new bank. Others may read it and write to it at the same time.

    Deleted entries are left out, and rows are compared with their checksums as they are copied. No file is shared with
    the bank.

    Args:
        folder: folder of the bank.
        into: a new or empty folder.

    Returns:
        The number of documents.

    Raises:
        BankError: when there is no bank, it is damaged, or `into` holds other files.
    """
    return _copy(local_folder(folder), local_folder(into))


def restore(source: str | Path, folder: str | Path, *, replace: bool = False) -> int:
    """Puts a backup back.

    Args:
        source: folder of the backup, or of any other bank.
        folder: folder of the bank: new or empty; with `replace` also a bank of the same model.
        replace: replace all documents of the bank in one commit, to which its readers go on as to any other.

    Returns:
        The number of documents.

    Raises:
        BankError: when there is no backup, it is damaged, the folder holds a bank and `replace` is False, or the bank
            cannot be written.
        FingerprintError: when the bank was written by another model than the backup.
    """
    source, folder = local_folder(source), local_folder(folder)
    if not replace or is_vacant(folder):
        return _copy(source, folder)
    saved = Store.open(source, write=False)
    bank = Store.open(folder, write=True)
    try:
        mine, theirs = bank.manifest, saved.manifest
        if theirs.fingerprint != mine.fingerprint:
            raise FingerprintError(
                f"{source} was written by {describe(theirs.fingerprint)} and {folder} by {describe(mine.fingerprint)}; "
                "restore it into a new folder"
            )
        if theirs.codebook != mine.codebook:
            raise BankError(f"{source} and {folder} have different codebooks; restore it into a new folder")
        if theirs.keep_texts != mine.keep_texts:
            with_texts, without = (source, folder) if theirs.keep_texts else (folder, source)
            raise BankError(f"{with_texts} keeps texts and {without} does not; restore it into a new folder")
        if theirs.secure_delete and not mine.secure_delete:
            raise BankError(
                f"{source} overwrites what it deletes and {folder} does not; restore it into a new folder, which will"
            )
        next_sequence = max(mine.next_sequence, theirs.next_sequence)
        bank.commit(saved.segments, next_sequence, intent=theirs.intent)
    finally:
        bank.close()
    return _documents(saved)


def _copy(source: Path, folder: Path) -> int:
    store = Store.open(source, write=False)
    if not is_vacant(folder):
        raise BankError(f"{folder} is not empty; choose a new folder")
    Store.create(folder, store.manifest, store.quantizer, store.segments).close()
    copy_model_name(source, folder, store.manifest.fingerprint)
    return _documents(store)


def _documents(store: Store) -> int:
    return sum(segment.documents for segment in store.segments)
