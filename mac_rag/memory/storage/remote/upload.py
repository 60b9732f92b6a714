"""Puts a bank behind a URL, and later only what is new in it.

The manifest comes last, so a reader sees one commit or the next, and an upload that was interrupted goes on. Files that
neither this manifest nor the one before names go after it: readers fetch rows when they need them, so those that have
not gone on to the new commit still need the files of the former one.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mac_rag.errors import BankError, DamageError, FingerprintError
from mac_rag.memory.storage.folder import CODEBOOK_FILE, SEGMENT_FILE
from mac_rag.memory.storage.manifest import LARGEST, MANIFEST, MANIFEST_COPY, Manifest
from mac_rag.memory.storage.remote.object_store import ObjectStore
from mac_rag.memory.storage.remote.store import read_remote_manifest
from mac_rag.memory.storage.store import Store
from mac_rag.shipped_models import describe
from mac_rag.untrusted_files import MalformedError, file_digest

# Files that are uploaded at a time.
_THREADS = 4
_PIECE = 1 << 20


@dataclass(frozen=True)
class Uploaded:
    """What an upload has done.

    Attributes:
        documents: number of documents of the bank.
        files: number of files that were written, manifests not counted.
        bytes: their size.
        removed: number of files that no manifest needs any more, and that were removed.
    """

    documents: int
    files: int
    bytes: int
    removed: int


def upload(folder: str | Path, url: str) -> Uploaded:
    """Puts the last commit of a bank behind a URL. Others may read it and write to it at the same time.

    One process uploads to a URL at a time. After an interruption, the same call goes on.

    Args:
        folder: folder of the bank.
        url: URL of a folder: an empty one, or one where this bank was uploaded before.

    Raises:
        BankError: when there is no bank in the folder, it overwrites what it deletes, the URL holds a later commit or
            another bank, or it cannot be written.
        DamageError: when a file of the bank is not what was written.
        FingerprintError: when the URL holds a bank of another model.
    """
    folder, store = Path(folder), ObjectStore(url)
    bank = Store.open(folder, write=False)
    if bank.manifest.secure_delete:
        raise BankError(
            f"{folder} overwrites what it deletes, and on an object store nothing can: it keeps replaced files as it "
            "likes; keep the bank in folders, or make one without --secure-delete (mac-rag bank rebuild)"
        )
    former = read_remote_manifest(store)
    _check_succession(bank, former, store)
    there = store.sizes()
    while True:
        try:
            written = _put_files(bank, former, store, there)
            break
        except FileNotFoundError as error:
            if not bank.refresh():
                raise BankError(f"{folder} cannot be put at {store.url}: {error}") from error
    manifest = bank.manifest
    data = manifest.encoded()
    if manifest != former:
        store.make_folder()
        store.write(MANIFEST, data)
    if not _holds(store, data):
        store.write(MANIFEST_COPY, data)
    removed = 0 if manifest == former else _remove_old(store, there, manifest, former)
    documents = sum(segment.documents for segment in bank.segments)
    return Uploaded(documents, len(written), sum(written), removed)


def _check_succession(bank: Store, former: Manifest | None, store: ObjectStore) -> None:
    """Refuses to replace what is behind the URL by something that is not a later commit of it."""
    manifest = bank.manifest
    if former is None or former == manifest:
        return
    if former.fingerprint != manifest.fingerprint:
        raise FingerprintError(
            f"{store.url} holds a bank of {describe(former.fingerprint)}, and {bank.folder} is one of "
            f"{describe(manifest.fingerprint)}; choose another URL"
        )
    if former.generation >= manifest.generation:
        raise BankError(
            f"{store.url} holds a bank at generation {former.generation:,}, and {bank.folder} is at generation "
            f"{manifest.generation:,}, so it is an older state of it, or another bank; choose another URL"
        )


def _put_files(bank: Store, former: Manifest | None, store: ObjectStore, there: dict[str, int]) -> list[int]:
    """Uploads the files that are not there yet, and returns their sizes."""
    manifest = bank.manifest
    digests = manifest.digests
    # The name of a codebook is the same in each bank, so that only the manifest there tells which one it is.
    known = set() if former is None else {name for name, _ in former.digests.items() & digests.items()}
    unknown = set(manifest.codebook_files) - known
    wanted = [name for name in digests if name in unknown or there.get(name) != (bank.folder / name).stat().st_size]

    def put(name: str) -> int:
        path = bank.folder / name
        if not _is(path, digests[name]):
            raise DamageError(f"{path} is damaged: its checksum differs from the manifest's; repair the bank")
        size = path.stat().st_size
        store.put(name, path)
        there[name] = size
        return size

    if wanted:
        store.make_folder()
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(put, wanted))


def _is(path: Path, digest: str) -> bool:
    try:
        return file_digest(path) == digest
    except MalformedError:
        return False


def _holds(store: ObjectStore, data: bytes) -> bool:
    """True if the copy of the manifest behind the URL is this one."""
    try:
        return store.read(MANIFEST_COPY, LARGEST) == data
    except (FileNotFoundError, DamageError):
        return False


def _remove_old(store: ObjectStore, there: dict[str, int], manifest: Manifest, former: Manifest | None) -> int:
    kept = {name for each in (manifest, former) if each is not None for name in each.digests}
    old = [
        name
        for name in there
        if name not in kept and any(pattern.fullmatch(name) for pattern in (SEGMENT_FILE, CODEBOOK_FILE))
    ]
    for name in old:
        store.remove(name)
    return len(old)
