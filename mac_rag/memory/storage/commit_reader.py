"""Reads the last commit of a bank, also while a writer makes the next one and removes the files of this one.

A manifest can be an older one that was put in the place of the newest (`older_manifest`). A commit writes the copy
first, so after a crash the copy is one commit ahead, and the note of the lock's holder still lies there. In any other
case, a copy that is ahead means that an older manifest was put there.

Even if every file is what its checksum says, segments must not contradict each other (`check_consistency`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as tensor_bytes

from mac_rag.errors import BankError, DamageError
from mac_rag.memory.parts import Part
from mac_rag.memory.storage.lock import HOLDER
from mac_rag.memory.storage.manifest import MANIFEST, MANIFEST_COPY, Manifest, read_manifest
from mac_rag.memory.storage.segment import Segment, read_segment
from mac_rag.nn.product_quantizer import ProductQuantizer
from mac_rag.untrusted_files import MalformedError, read_file

# Bytes of the file of a quantizer, which has a few million numbers.
_LARGEST = 256 << 20


class Commit(NamedTuple):
    """What a bank on disk consists of.

    Attributes:
        manifest: the manifest.
        segments: the segments that it names.
        quantizer: with rows pq, what their codes are looked up in; otherwise None.
    """

    manifest: Manifest
    segments: tuple[Segment, ...]
    quantizer: ProductQuantizer | None


def read_commit(folder: Path, known: Commit | None = None) -> Commit:
    """Reads the last commit.

    Args:
        folder: folder of the bank.
        known: an earlier commit; what it has already is not read again.

    Raises:
        BankError: when the format is unknown.
        DamageError: when a file is missing, or not what was written.
        OSError: when a file cannot be read.
    """
    while True:
        try:
            manifest = read_manifest(folder / MANIFEST)
        except FileNotFoundError:
            has_copy = (folder / MANIFEST_COPY).is_file()
            remedy = "repair the bank" if has_copy else "nothing is left of this bank; restore a backup, or remove it"
            raise DamageError(f"{folder / MANIFEST} is missing; {remedy}") from None
        try:
            return read_files(folder, manifest, known)
        except (FileNotFoundError, DamageError) as error:
            # A writer may have removed, or overwritten, what the manifest names that was just read.
            if read_manifest(folder / MANIFEST) != manifest:
                continue
            if isinstance(error, DamageError):
                raise
            raise DamageError(f"{error.filename} is missing; repair the bank to keep what is not lost") from None


def read_files(folder: Path, manifest: Manifest, known: Commit | None = None) -> Commit:
    """Reads the files that a manifest names; `known` as for `read_commit`.

    Raises:
        FileNotFoundError: when a segment is missing.
        DamageError: when the quantizer is missing, or a file is not what was written.
    """
    segments = {} if known is None else {segment.name: segment for segment in known.segments}
    read = tuple(
        (info.name in segments and segments[info.name].at(info))
        or read_segment(folder, info, manifest.layout, secure_delete=manifest.secure_delete)
        for info in manifest.segments
    )
    if known is not None and known.manifest.codebook == manifest.codebook:
        return Commit(manifest, read, known.quantizer)
    return Commit(manifest, read, _quantizer(folder, manifest))


def _quantizer(folder: Path, manifest: Manifest) -> ProductQuantizer | None:
    if manifest.codebook is None:
        return None
    path = folder / manifest.codebook_files[0]
    try:
        return read_quantizer(path, manifest)[0]
    except FileNotFoundError:
        raise DamageError(f"{path} is missing; repair the bank") from None
    except MalformedError as error:
        raise DamageError(f"{path} is damaged: {error}; repair the bank") from None


def quantizer_bytes(quantizer: ProductQuantizer) -> bytes:
    """The bytes of the file of a quantizer: its parts as safetensors."""
    data: bytes = tensor_bytes({name: tensor.contiguous() for name, tensor in quantizer.tensors.items()})
    return data


def read_quantizer(path: Path, manifest: Manifest) -> tuple[ProductQuantizer, bytes]:
    """A quantizer, and the bytes of its file.

    Args:
        path: the file.
        manifest: the manifest, which has its sha256, and says for which rows it is.

    Raises:
        FileNotFoundError: when it is missing.
        MalformedError: when it is not what was written, or not what the manifest says.
    """
    data = read_file(path, _LARGEST)
    if hashlib.sha256(data).hexdigest() != manifest.codebook:
        raise MalformedError("its checksum differs from the manifest's")
    try:
        quantizer = ProductQuantizer.of_tensors(load_tensors(data))
    except SafetensorError as error:
        raise MalformedError(f"it holds no codebooks: {error!r:.200}") from None
    except ValueError as error:
        raise MalformedError(f"it holds {error}") from None
    if (fault := misfit(quantizer, manifest)) is not None:
        raise MalformedError(fault)
    return quantizer, data


def misfit(quantizer: ProductQuantizer, manifest: Manifest) -> str | None:
    """Why a quantizer cannot be that of a bank, as text; None if it can."""
    layout = manifest.layout
    if layout != layout.quantized(quantizer):
        return "its codebooks are for rows of another layout than those of the bank"
    if any(info.shape[1:] != quantizer.row_shape for info in manifest.segments):
        return "its codebooks are for rows of another shape than those of the bank"
    if quantizer.fingerprint != manifest.fingerprint:
        return "its codebooks are another model's"
    return None


def check_newest(folder: Path) -> None:
    """Refuses a bank whose manifest was replaced by an older one. Others may write to the bank at the same time.

    A writer would take the newest documents for leftovers of a crash, and remove them. The caller must not have the
    lock yet.

    Raises:
        DamageError: names the generations.
    """
    problem = older_manifest(folder)
    if problem is not None:
        raise DamageError(f"{problem}; repair the bank to go on with the newest")


def older_manifest(folder: Path) -> str | None:
    """What is wrong if the manifest was replaced by an older one; None if it was not, or if it cannot be read."""
    while True:
        was_open = (folder / HOLDER).exists()  # a writer is at work, or has been killed
        manifest, copy = _readable(folder / MANIFEST), _readable(folder / MANIFEST_COPY)
        if manifest is None or copy is None or copy.generation <= manifest.generation + was_open:
            return None
        # What a failed commit has left of the copy names segments that went at once.
        names = [name for info in copy.segments for name in info.files]
        if not all((folder / name).is_file() for name in names):
            return None
        if _readable(folder / MANIFEST) == manifest:  # otherwise a writer was at work
            return (
                f"{folder / MANIFEST} is at generation {manifest.generation:,} and its copy at {copy.generation:,}: an "
                "older manifest was put in the place of the newest"
            )


def _readable(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except (BankError, FileNotFoundError):
        return None


class Fault(NamedTuple):
    """An entry that cannot be where it is.

    Attributes:
        part: the part that has it.
        sequence: its sequence number.
        problem: what is wrong, as text.
    """

    part: Part
    sequence: int
    problem: str


def check_consistency(
    folder: Path, manifest: Manifest, parts: Sequence[Part], quantizer: ProductQuantizer | None
) -> None:
    """Refuses a bank whose segments contradict each other, the manifest or the quantizer.

    Raises:
        DamageError: for the first contradiction, which it names.
    """
    if quantizer is not None and (problem := misfit(quantizer, manifest)) is not None:
        raise DamageError(f"{folder} contradicts itself: {problem}; restore a backup")
    for fault in faults(manifest, parts):
        raise DamageError(
            f"{folder} contradicts itself: {fault.problem}; repair the bank to keep what does not contradict the rest"
        )


def faults(manifest: Manifest, parts: Sequence[Part]) -> list[Fault]:
    """All live entries that contradict an earlier entry or the manifest."""
    return list(_faults(manifest, parts))


def _are_plausible(manifest: Manifest, parts: Sequence[Part]) -> bool:
    """True if nothing contradicts, as far as numbers say without a look at the records."""
    sequences = torch.cat([torch.empty(0, dtype=torch.long), *(part.sequences for part in parts)])
    hashes = torch.cat([torch.empty(0, dtype=torch.long), *(part.id_hashes for part in parts)])
    if (sequences[1:] <= sequences[:-1]).any() or (len(sequences) and int(sequences[-1]) >= manifest.next_sequence):
        return False
    ordered = np.sort(hashes.numpy())
    return bool((ordered[1:] != ordered[:-1]).all())


def _faults(manifest: Manifest, parts: Sequence[Part]) -> Iterator[Fault]:
    if _are_plausible(manifest, parts):
        return
    known: set[str] = set()
    before = -1
    for part in parts:
        last = before
        for record, _ in part:
            sequence = record.sequence
            names = record.document_ids
            if sequence <= before:
                yield Fault(part, sequence, f"sequence number {sequence:,} comes after {before:,}")
                continue
            if sequence >= manifest.next_sequence:
                yield Fault(part, sequence, f"sequence number {sequence:,} is not below {manifest.next_sequence:,}")
                continue
            if len(set(names)) < len(names) or not known.isdisjoint(names):
                twice = next(name for index, name in enumerate(names) if name in known or name in names[:index])
                yield Fault(part, sequence, f"document {twice[:200]!r} comes twice")
                continue
            known.update(names)
            last = sequence
        before = max(before, last)
