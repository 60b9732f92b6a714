"""A bank behind a URL at one commit: opened for reading, and moved to later commits that were uploaded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

from mac_rag.errors import BankError, DamageError
from mac_rag.memory.rows import Codebook, RowLayout
from mac_rag.memory.storage.codebook_file import read_codebook
from mac_rag.memory.storage.commit_reader import Commit
from mac_rag.memory.storage.consistency import check_consistency
from mac_rag.memory.storage.manifest import LARGEST, MANIFEST, Manifest, SegmentInfo, decode_manifest
from mac_rag.memory.storage.place import is_url
from mac_rag.memory.storage.remote.cache import BankCache, attempts
from mac_rag.memory.storage.remote.object_store import ObjectStore
from mac_rag.memory.storage.remote.segment import REMEDY, open_segment
from mac_rag.memory.storage.segment import Segment
from mac_rag.memory.storage.store import Store
from mac_rag.untrusted_files import MalformedError

# Segments that are opened at a time.
_THREADS = 8


def open_store(place: str | Path) -> Store:
    """Opens a bank for reading, in a folder or behind a URL.

    Raises:
        BankError: when there is no bank, it is damaged, its format is unknown, or it cannot be read.
    """
    return RemoteStore.open_url(str(place)) if is_url(place) else Store.open(Path(place), write=False)


def remote_exists(url: str) -> bool:
    """True if there is a bank behind a URL.

    Raises:
        BankError: when the store does not say.
    """
    try:
        ObjectStore(url).size(MANIFEST)
    except FileNotFoundError:
        return False
    return True


def stored_bytes(url: str) -> int:
    """Bytes of all files that the manifest of a bank behind a URL names.

    Raises:
        BankError: as `open_store`; also when a file is missing.
    """
    store = ObjectStore(url)
    manifest = read_remote_manifest(store)
    names = () if manifest is None else manifest.digests
    try:
        with ThreadPoolExecutor(_THREADS) as threads:
            return sum(threads.map(store.size, names))
    except FileNotFoundError as error:
        raise BankError(f"{error.filename} is missing; put the bank there again (mac-rag bank upload)") from error


class RemoteStore(Store):
    """A bank behind a URL, for reading.

    Args:
        cache: the cache of the bank.
        commit: its last commit.
    """

    def __init__(self, cache: BankCache, commit: Commit) -> None:
        super().__init__(cache.folder, None, commit.manifest, commit.segments, commit.codebook)
        self._cache = cache

    @classmethod
    def open_url(cls, url: str) -> RemoteStore:
        """Opens the bank behind a URL at the last commit that was uploaded.

        Raises:
            BankError: as `open_store`; also for a bank that overwrites what it deletes.
        """
        store = ObjectStore(url)
        cache = BankCache(store)
        commit = read_remote_commit(cache)
        check_consistency(store.url, commit.manifest, commit.segments, commit.codebook)
        return cls(cache, commit)

    @property
    def place(self) -> str:
        """The URL."""
        return self._cache.store.url

    def _read(self, known: Commit) -> Commit:
        return read_remote_commit(self._cache, known)


def read_remote_manifest(store: ObjectStore) -> Manifest | None:
    """The manifest of the last commit that was uploaded; None where there is none.

    Raises:
        DamageError: when it is not what was written.
        BankError: when it cannot be read, its format is unknown, or the bank overwrites what it deletes.
    """
    try:
        data = store.read(MANIFEST, LARGEST)
    except FileNotFoundError:
        return None
    manifest = decode_manifest(data, store.place(MANIFEST))
    if manifest.secure_delete:
        raise BankError(
            f"{store.url} is a bank that overwrites what it deletes, which nothing can promise of an object store and "
            "of caches; read it from a folder (mac-rag adapt --secure-delete makes such banks)"
        )
    return manifest


def read_remote_commit(cache: BankCache, known: Commit | None = None) -> Commit:
    """Reads the last commit that was uploaded, also while another one is uploaded.

    Args:
        cache: the cache of the bank.
        known: an earlier commit; what it has already is not opened again.

    Raises:
        DamageError: when a file is missing, or not what was written.
        BankError: as `read_remote_manifest`, and when a file cannot be fetched.
    """
    store = cache.store
    segments = {} if known is None else {segment.name: segment for segment in known.segments}
    manifest = read_remote_manifest(store)
    if manifest is None and known is None:
        raise BankError(f"there is no memory bank at {store.url}; put one there (mac-rag bank upload)")

    def opened(info: SegmentInfo, layout: RowLayout) -> Segment:
        segment = segments[info.name].at(info) if info.name in segments else None
        return segment or open_segment(cache, info, layout)

    while True:
        if manifest is None:
            raise DamageError(f"{store.place(MANIFEST)} is missing; put the bank there again (mac-rag bank upload)")
        try:
            with ThreadPoolExecutor(_THREADS) as threads:
                read = tuple(threads.map(opened, manifest.segments, repeat(manifest.layout)))
            if known is not None and known.manifest.codebook == manifest.codebook:
                return Commit(manifest, read, known.codebook)
            return Commit(manifest, read, _codebook(cache, manifest))
        except (FileNotFoundError, DamageError) as error:
            # An upload may have removed what the manifest names that was just read.
            before, manifest = manifest, read_remote_manifest(store)
            if manifest != before:
                continue
            if isinstance(error, DamageError):
                raise
            raise DamageError(f"{error.filename} is missing; put the bank there again (mac-rag bank upload)") from None


def _codebook(cache: BankCache, manifest: Manifest) -> Codebook | None:
    if manifest.codebook is None:
        return None
    name, digest = manifest.codebook_files[0], manifest.codebook
    try:
        return attempts(lambda: read_codebook(cache.whole(cache.folder, name, digest), manifest)[0])
    except MalformedError as error:
        raise DamageError(f"{cache.store.place(name)} is damaged: {error}{REMEDY}") from None
