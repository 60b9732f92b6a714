"""The manifest: the one small file that says what a bank on disk consists of.

    manifest.json         format version, model fingerprint, the segments in order with their checksums and tombstones
    manifest.copy.json    the same; only `mac_rag.memory.storage.repair` reads it

The copy is written first, and the manifest's rename is what commits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from mac_rag.atomic_files import sealed, sync_folder, unsealed, write_file
from mac_rag.errors import BankError, DamageError

FORMAT = 2
MANIFEST = "manifest.json"
MANIFEST_COPY = "manifest.copy.json"

_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Count = Annotated[int, Field(ge=0)]


class _Stated(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SegmentInfo(_Stated):
    """What the manifest says of one segment.

    Attributes:
        name: of its two files, without their endings.
        entries: how many were written, those of the tombstones included.
        shape: of its tensor: memory tokens `[n, T, D]`, or codes `[n, T]`.
        offset: of the tensor's first byte in its file.
        tokens: sha256 of `<name>.safetensors`.
        records: sha256 of `<name>.jsonl`.
        tombstones: sequence numbers of entries that were deleted since.
    """

    # Checked, because it becomes part of a path.
    name: Annotated[str, Field(pattern="^segment-[0-9a-f]{16}$")]
    entries: _Count
    shape: Annotated[tuple[_Count, ...], Field(min_length=2, max_length=3)]
    offset: _Count
    tokens: _Digest
    records: _Digest
    tombstones: tuple[_Count, ...] = ()

    @property
    def tokens_file(self) -> str:
        return f"{self.name}.safetensors"

    @property
    def records_file(self) -> str:
        return f"{self.name}.jsonl"


class Intent(_Stated):
    """What is about to be changed in a retriever first and then in the bank, by document ids.

    After a crash between the two it tells where to look.
    """

    puts: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.puts or self.deletes)


class Manifest(_Stated):
    """The state of a bank.

    Attributes:
        generation: grows with every commit.
        next_sequence: of the next entry; numbers are never used again.
        codebook: sha256 of the codebook's file, if there is one.
        intent: what was begun with this commit and is done with the next.
    """

    fingerprint: str
    generation: _Count = 0
    next_sequence: _Count = 0
    codebook: _Digest | None = None
    segments: tuple[SegmentInfo, ...] = ()
    intent: Intent = Intent()

    def encoded(self) -> bytes:
        """The file's bytes."""
        return sealed({"format": FORMAT, **self.model_dump(mode="json")})


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replaces the manifest and its copy. What it names lasts before it does."""
    data = manifest.encoded()
    write_file(folder / MANIFEST_COPY, [data])
    sync_folder(folder)
    write_file(folder / MANIFEST, [data])
    sync_folder(folder)


def renew_copy(folder: Path, manifest: Manifest) -> None:
    """Writes the copy again where it is not the same: after a crash it may be one commit ahead."""
    copy, data = folder / MANIFEST_COPY, manifest.encoded()
    if not copy.is_file() or copy.read_bytes() != data:
        write_file(copy, [data])
        sync_folder(folder)


def read_manifest(path: Path) -> Manifest:
    """Reads a manifest or its copy.

    Raises:
        FileNotFoundError: when there is none.
        DamageError: when it is not what was written.
        BankError: when its format is not this version's.
    """
    data = path.read_bytes()
    try:
        if _is_format_1(data):
            raise BankError(
                f"{path} has format 1, which this version does not read any more; adapt to the documents again into "
                "a new folder"
            )
        stated = unsealed(data)  # as those of later formats will be
        found = stated.pop("format", None)
        if found != FORMAT:
            raise BankError(f"{path} has format {found!r}, this version reads format {FORMAT}; update mac_rag")
        return Manifest.model_validate(stated)
    except ValueError as error:
        raise DamageError(f"{path} is damaged: {error}") from error


def _is_format_1(data: bytes) -> bool:
    stated = json.loads(data)
    return isinstance(stated, dict) and stated.get("format") == 1 and "documents" in stated
