"""The manifest: the one small file that says what a bank on disk consists of.

    manifest.json         format version, model fingerprint, the segments in order with their checksums and tombstones
    manifest.copy.json    the same bytes; only `mac_rag.memory.storage.repair` reads them

The copy is written first. Renaming the manifest is the commit. Until the name lasts, the former manifest and the former
copy are kept beside them (`manifest.json.old`, `manifest.copy.json.old`), because going back to them must not need any
space.
"""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mac_rag.atomic_files import (
    copy_file,
    remove_file,
    replace_file,
    sealed,
    sync_folder,
    unsealed,
    write_file,
)
from mac_rag.errors import BankError, DamageError
from mac_rag.memory.rows import RowLayout
from mac_rag.untrusted_files import MalformedError, read_text_bytes

FORMAT = 5
CODEBOOK = "codebook"  # name of the quantizer's files in a new bank, without the suffix
MANIFEST = "manifest.json"
MANIFEST_COPY = "manifest.copy.json"
_FORMER = ".old"
FORMERS = (MANIFEST + _FORMER, MANIFEST_COPY + _FORMER)  # what a commit that fails goes back to

# Bytes of a manifest; tombstones take most of them, and compaction removes those.
LARGEST = 256 << 20
# Sequence numbers are below this. A row's key is one of them times 2 ** 16, in 64 bits (`mac_rag.memory.parts`).
SEQUENCES = 1 << 47
# Bytes that one segment may have, by far more than is ever written; products of it stay within 64 bits.
_LARGEST_SEGMENT = 1 << 50

_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]
_Sequence = Annotated[int, Field(ge=0, lt=SEQUENCES)]
_Positive = Annotated[int, Field(ge=1, lt=SEQUENCES)]


class _StrictModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SegmentInfo(_StrictModel):
    """What the manifest says about one segment.

    Attributes:
        name: name of its files, without the suffix.
        entries: how many entries were written, deleted ones included.
        shape: shape of its memory tokens `[n, T, D]`.
        places: W, places of lexical vectors that each row has room for.
        offset: byte offset of the first column in the file of its rows.
        tokens: sha256 of `<name>.safetensors`.
        records: sha256 of `<name>.jsonl`.
        texts: sha256 of `<name>.texts.jsonl`; None in a bank without texts.
        overview: sha256 of the columns that are read of all rows at once.
        index: sha256 of `<name>.index`.
        tombstones: sequence numbers of entries that were deleted after the segment was written.
    """

    # Validated, because it becomes part of a path.
    name: Annotated[str, Field(pattern="^segment-[0-9a-f]{16}$")]
    entries: _Positive
    shape: tuple[_Positive, _Positive, _Positive]
    places: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    offset: Annotated[int, Field(ge=16, lt=1 << 40, multiple_of=8)]
    tokens: _Digest
    records: _Digest
    texts: _Digest | None = None
    overview: _Digest
    index: _Digest
    tombstones: tuple[_Sequence, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if 4 * (math.prod(self.shape) + 2 * self.shape[0] * self.places) > _LARGEST_SEGMENT:
            raise ValueError(f"rows of shape {list(self.shape)} are larger than any segment")
        if not len(set(self.tombstones)) == len(self.tombstones) <= self.entries <= self.shape[0]:
            raise ValueError(
                f"{len(self.tombstones):,} deleted of {self.entries:,} entries with {self.shape[0]:,} rows, each entry "
                "deleted once and with a row at least: that cannot be"
            )
        return self

    def rows_bytes(self, layout: RowLayout) -> int:
        """Bytes of all its columns."""
        columns = layout.columns(self.shape, self.places).values()
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in columns)

    @property
    def tokens_file(self) -> str:
        """Name of the file with the memory tokens."""
        return f"{self.name}.safetensors"

    @property
    def records_file(self) -> str:
        """Name of the file with the records."""
        return f"{self.name}.jsonl"

    @property
    def texts_file(self) -> str:
        """Name of the file with the texts, if the bank keeps texts."""
        return f"{self.name}.texts.jsonl"

    @property
    def index_file(self) -> str:
        """Name of the file with the index."""
        return f"{self.name}.index"

    @property
    def files(self) -> tuple[str, ...]:
        """Names of all its files."""
        return tuple(self.digests)

    @property
    def digests(self) -> dict[str, str]:
        """Sha256 of each of its files, by its name."""
        digests = {self.tokens_file: self.tokens, self.records_file: self.records, self.index_file: self.index}
        return digests if self.texts is None else digests | {self.texts_file: self.texts}


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
        codebook: with rows pq, sha256 of the file of the quantizer; otherwise None.
        codebook_name: name of the quantizer's files, without the suffix.
        keep_texts: True if the bank keeps the texts of its documents.
        secure_delete: True if the bank's files are overwritten before they are removed.
        layout: how rows are kept.
        segments: the segments in the order of their entries.
        intent: the change that starts after this commit and is complete with the next.
    """

    fingerprint: str
    generation: _Count = 0
    next_sequence: Annotated[int, Field(ge=0, le=SEQUENCES)] = 0
    codebook: _Digest | None = None
    codebook_name: Annotated[str, Field(pattern="^codebook(-[0-9a-f]{16})?$")] = CODEBOOK
    keep_texts: bool = False
    secure_delete: bool = False
    layout: RowLayout = RowLayout()
    segments: tuple[SegmentInfo, ...] = ()
    intent: Intent = Intent()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len({segment.name for segment in self.segments}) < len(self.segments):
            raise ValueError("a segment comes twice")
        if len({segment.shape[1:] for segment in self.segments}) > 1:
            raise ValueError("the rows of its segments differ in shape")
        is_quantized = self.layout.dtype == "pq"
        if any((segment.texts is None) == self.keep_texts for segment in self.segments):
            raise ValueError(f"it keeps {'texts' if self.keep_texts else 'no texts'}, and a segment does not agree")
        if self.codebook is not None and not is_quantized:
            raise ValueError("it has codebooks, and its rows are not kept as pq")
        if is_quantized:
            if self.segments and (self.codebook is None or not self.layout.code_bytes):
                raise ValueError("it keeps codes of memory tokens, without codebooks")
            if any(segment.shape[1] <= self.layout.whole_tokens for segment in self.segments):
                raise ValueError(f"its rows have no tokens beside {self.layout.whole_tokens:,} that have no codes")
        if not self.layout.lexical_vectors and any(segment.places for segment in self.segments):
            raise ValueError("its rows are kept in one layout, and those of a segment in another")
        return self

    def encoded(self) -> bytes:
        """The bytes of the file."""
        return sealed({"format": FORMAT, **self.model_dump(mode="json")})

    @property
    def digests(self) -> dict[str, str]:
        """Sha256 of each file that it names, by its name."""
        named = {name: digest for info in self.segments for name, digest in info.digests.items()}
        return named if self.codebook is None else named | dict.fromkeys(self.codebook_files, self.codebook)

    @property
    def codebook_files(self) -> tuple[str, str]:
        """Names of the quantizer's file and its copy, in a bank with rows pq."""
        return f"{self.codebook_name}.safetensors", f"{self.codebook_name}.copy.safetensors"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replaces the manifest and its copy. The files that the manifest names must be on disk already."""
    data = manifest.encoded()
    for name in (MANIFEST_COPY, MANIFEST):
        _keep_former(folder / name, manifest.secure_delete)
        write_file(folder / name, [data], secure_delete=manifest.secure_delete)
        sync_folder(folder)
    for name in (MANIFEST_COPY, MANIFEST):
        with suppress(OSError):
            remove_file(_former(folder / name), secure_delete=manifest.secure_delete)


def restore_manifest(folder: Path, manifest: Manifest) -> None:
    """Goes back to a manifest that `write_manifest` was replacing when it failed."""
    former = _former(folder / MANIFEST)
    if read_manifest(folder / MANIFEST) == manifest:
        remove_file(former, secure_delete=manifest.secure_delete)
        return
    if _is(former, manifest):
        replace_file(former, folder / MANIFEST, secure_delete=manifest.secure_delete)
        sync_folder(folder)
    else:
        write_manifest(folder, manifest)


def _is(path: Path, manifest: Manifest) -> bool:
    """True if a file is this manifest; it may be missing, or overwritten in part."""
    try:
        return read_manifest(path) == manifest
    except (FileNotFoundError, DamageError):
        return False


def _former(path: Path) -> Path:
    return path.with_name(path.name + _FORMER)


def _keep_former(path: Path, secure_delete: bool) -> None:
    former = _former(path)
    if path.is_file():
        remove_file(former, secure_delete=secure_delete)
        try:
            former.hardlink_to(path)
        except OSError:  # not every file system has links
            copy_file(path, former, secure_delete=secure_delete)


def renew_copy(folder: Path, manifest: Manifest) -> None:
    """Makes the copy that of this manifest if it is not: after a crash or an error it can be one commit ahead."""
    copy, data = folder / MANIFEST_COPY, manifest.encoded()
    if not _holds(copy, data):
        if _holds(_former(copy), data):
            replace_file(_former(copy), copy, secure_delete=manifest.secure_delete)
        else:
            write_file(copy, [data], secure_delete=manifest.secure_delete)
        sync_folder(folder)


def _holds(path: Path, data: bytes) -> bool:
    try:
        return read_text_bytes(path, LARGEST) == data
    except (FileNotFoundError, MalformedError):
        return False


def read_manifest(path: Path) -> Manifest:
    """Reads a manifest or its copy.

    Raises:
        FileNotFoundError: when the file does not exist.
        DamageError: when the file is not what was written.
        BankError: when its format is not one that this version reads.
    """
    while True:
        identity = _identity(path)
        try:
            return _read(path)
        except DamageError:
            # It may have been replaced, and overwritten, while it was read.
            if _identity(path) == identity:
                raise


def _identity(path: Path) -> tuple[int, int, int]:
    """What differs between a file and another that takes its name."""
    status = path.lstat()
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _read(path: Path) -> Manifest:
    try:
        data = read_text_bytes(path, LARGEST)
    except MalformedError as error:
        raise DamageError(f"{path} is damaged: {error}") from error
    return decode_manifest(data, path)


def decode_manifest(data: bytes, path: Path | str) -> Manifest:
    """The manifest that a file's bytes are.

    Args:
        data: the bytes.
        path: path or URL of the file, for messages.

    Raises:
        DamageError, BankError: as `read_manifest`.
    """
    try:
        content = unsealed(data)
        version = content.pop("format", None)
        if type(version) is not int or version != FORMAT:
            raise BankError(
                f"{path} has format {version!r:.40}, and this version of mac_rag reads format {FORMAT}; read it with "
                "the version that wrote it, or adapt to the documents again into a new folder"
            )
        return Manifest.model_validate(content)
    except ValidationError as error:
        fault = error.errors()[0]
        raise DamageError(f"{path} is damaged: {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from error
    except MalformedError as error:
        raise DamageError(f"{path} is damaged: {error}") from error
