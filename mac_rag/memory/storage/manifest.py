"""The manifest: the one small file that says what a bank on disk consists of.

    manifest.json         format version, model fingerprint, the segments in order with their checksums and tombstones
    manifest.copy.json    the same bytes; only `mac_rag.memory.storage.repair` reads them

The copy is written first. Renaming the manifest is the commit. Until the name lasts, the former manifest is kept beside
it (`manifest.json.old`), because going back to it must not need any space.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from mac_rag.atomic_files import sealed, sync_folder, unsealed, write_file
from mac_rag.errors import BankError, DamageError

FORMAT = 2
MANIFEST = "manifest.json"
MANIFEST_COPY = "manifest.copy.json"
FORMER = ".old"

_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Count = Annotated[int, Field(ge=0)]


class _StrictModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SegmentInfo(_StrictModel):
    """What the manifest says about one segment.

    Attributes:
        name: name of its two files, without the suffix.
        entries: how many entries were written, deleted ones included.
        shape: shape of its tensor: memory tokens `[n, T, D]`, or codes `[n, T]`.
        offset: byte offset of the tensor in its file.
        tokens: sha256 of `<name>.safetensors`.
        records: sha256 of `<name>.jsonl`.
        tombstones: sequence numbers of entries that were deleted after the segment was written.
    """

    # Validated, because it becomes part of a path.
    name: Annotated[str, Field(pattern="^segment-[0-9a-f]{16}$")]
    entries: _Count
    shape: Annotated[tuple[_Count, ...], Field(min_length=2, max_length=3)]
    offset: _Count
    tokens: _Digest
    records: _Digest
    tombstones: tuple[_Count, ...] = ()

    @property
    def tokens_file(self) -> str:
        """Name of the file with the memory tokens or codes."""
        return f"{self.name}.safetensors"

    @property
    def records_file(self) -> str:
        """Name of the file with the records."""
        return f"{self.name}.jsonl"


class Intent(_StrictModel):
    """A change that is about to be made to a retriever first and then to the bank.

    After a crash between the two it tells which documents may differ.

    Attributes:
        puts: ids of the documents to be added or replaced.
        deletes: ids of the documents to be deleted.
    """

    puts: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.puts or self.deletes)


class Manifest(_StrictModel):
    """The state of a bank on disk.

    Attributes:
        fingerprint: fingerprint of the model that wrote the bank.
        generation: a number that grows with every commit.
        next_sequence: sequence number of the next entry; numbers are never used again.
        codebook: sha256 of the codebook's file; None for a bank without a codebook.
        segments: the segments in the order of their entries.
        intent: the change that starts after this commit and is complete with the next.
    """

    fingerprint: str
    generation: _Count = 0
    next_sequence: _Count = 0
    codebook: _Digest | None = None
    segments: tuple[SegmentInfo, ...] = ()
    intent: Intent = Intent()

    def encoded(self) -> bytes:
        """The bytes of the file."""
        return sealed({"format": FORMAT, **self.model_dump(mode="json")})


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replaces the manifest and its copy. The files that the manifest names must be on disk already."""
    data = manifest.encoded()
    write_file(folder / MANIFEST_COPY, [data])
    sync_folder(folder)
    _keep_former(folder)
    write_file(folder / MANIFEST, [data])
    sync_folder(folder)
    with suppress(OSError):
        (folder / (MANIFEST + FORMER)).unlink(missing_ok=True)


def restore_manifest(folder: Path, manifest: Manifest) -> None:
    """Goes back to a manifest that `write_manifest` was replacing when it failed."""
    former = folder / (MANIFEST + FORMER)
    if read_manifest(folder / MANIFEST) == manifest:
        former.unlink(missing_ok=True)
        return
    if former.is_file() and read_manifest(former) == manifest:
        former.replace(folder / MANIFEST)
        sync_folder(folder)
    else:
        write_manifest(folder, manifest)


def _keep_former(folder: Path) -> None:
    path, former = folder / MANIFEST, folder / (MANIFEST + FORMER)
    if path.is_file():
        former.unlink(missing_ok=True)
        try:
            former.hardlink_to(path)
        except OSError:  # not every file system has links
            shutil.copyfile(path, former)


def renew_copy(folder: Path, manifest: Manifest) -> None:
    """Rewrites the copy if it differs: after a crash it can be one commit ahead."""
    copy, data = folder / MANIFEST_COPY, manifest.encoded()
    if not copy.is_file() or copy.read_bytes() != data:
        write_file(copy, [data])
        sync_folder(folder)


def read_manifest(path: Path) -> Manifest:
    """Reads a manifest or its copy.

    Raises:
        FileNotFoundError: when the file does not exist.
        DamageError: when the file is not what was written.
        BankError: when its format is not the one that this version reads.
    """
    data = path.read_bytes()
    try:
        if _is_format_1(data):
            raise BankError(
                f"{path} has format 1, which this version does not read any more; adapt to the documents again into "
                "a new folder"
            )
        content = unsealed(data)  # every format from 2 on is a sealed line
        version = content.pop("format", None)
        if version != FORMAT:
            raise BankError(f"{path} has format {version!r}, this version reads format {FORMAT}; update mac_rag")
        return Manifest.model_validate(content)
    except ValueError as error:
        raise DamageError(f"{path} is damaged: {error}") from error


def _is_format_1(data: bytes) -> bool:
    content = json.loads(data)
    return isinstance(content, dict) and content.get("format") == 1 and "documents" in content
