"""Checks every byte of a bank behind a URL. Nothing is believed of the cache, and nothing is put into it."""

from __future__ import annotations

import hashlib
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mac_rag.atomic_files import make_folder, private
from mac_rag.errors import BankError, DamageError
from mac_rag.memory.storage.examination import Report, lost_of_segment
from mac_rag.memory.storage.manifest import Manifest, SegmentInfo
from mac_rag.memory.storage.remote.cache import BankCache
from mac_rag.memory.storage.remote.object_store import ObjectStore, Range
from mac_rag.memory.storage.remote.store import RemoteStore, read_remote_manifest

_PIECE = 32 << 20
# Files that are read at a time.
_THREADS = 4


def verify_url(url: str) -> Report:
    """Reads every file that the manifest names, and compares it with its checksum there.

    A damaged segment is downloaded to a folder of its own, to tell which of its documents are lost.

    Raises:
        BankError: when there is no bank, its manifest is damaged, the store cannot be read, or a codebook is lost.
        DamageError: when files agree with their checksums, and say what cannot be true.
    """
    store = ObjectStore(url)
    while True:
        manifest = read_remote_manifest(store)
        if manifest is None:
            raise BankError(f"there is no memory bank at {store.url}; put one there (mac-rag bank upload)")
        report = _examined(store, manifest)
        # Otherwise an upload may have removed what seems to be missing.
        if report.clean or read_remote_manifest(store) == manifest:
            return report


def _examined(store: ObjectStore, manifest: Manifest) -> Report:
    digests = manifest.digests
    with ThreadPoolExecutor(_THREADS) as threads:
        faults = threads.map(lambda item: _fault(store, *item), digests.items())
        damaged = {name: fault for name, fault in zip(digests, faults, strict=True) if fault is not None}
    if not damaged:
        bank = RemoteStore.open_url(store.url)  # held against itself
        for segment in bank.segments:
            segment.check_records()
        documents = sum(segment.documents for segment in bank.segments)
        return Report(store.url, documents, (), (), 0)
    if manifest.codebook is not None and damaged.keys() >= set(manifest.codebook_files):
        raise BankError(f"{'; '.join(damaged.values())}: without it no document can be read; upload the bank again")
    documents, unnamed = 0, 0
    lost: list[str] = []
    textless: list[str] = []
    cache = BankCache(store)
    for info in manifest.segments:
        found = _remains(cache, info, manifest)
        documents += found.documents
        unnamed += found.unnamed
        lost += found.lost
        textless += found.textless
    return Report(store.url, documents, tuple(damaged.values()), tuple(lost), unnamed, tuple(textless))


def _remains(cache: BankCache, info: SegmentInfo, manifest: Manifest) -> Report:
    """What is left of a segment, which is downloaded for it."""
    with cache.errors():
        make_folder(cache.folder)
        with tempfile.TemporaryDirectory(dir=cache.folder, prefix="examined-") as place:
            for name in info.files:
                with open(Path(place, name), "xb", opener=private) as file:
                    try:
                        cache.store.download(name, file, cache.limit)
                    except FileNotFoundError:
                        Path(place, name).unlink()
            return lost_of_segment(Path(place), info, manifest)


def _fault(store: ObjectStore, name: str, digest: str) -> str | None:
    """What is wrong with a file; None if nothing is."""
    read = hashlib.sha256()
    try:
        size = store.size(name)
        for start in range(0, size, _PIECE):
            read.update(store.ranges([Range(name, start, min(start + _PIECE, size))])[0])
    except FileNotFoundError:
        return f"{store.place(name)} is missing"
    except DamageError as error:
        return str(error)
    return None if read.hexdigest() == digest else f"{store.place(name)} is damaged"
