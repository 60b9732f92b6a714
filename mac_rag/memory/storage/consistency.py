"""What the segments of a bank must not say about each other, even if every file is what its checksum says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from mac_rag.errors import DamageError
from mac_rag.memory.parts import Part
from mac_rag.memory.storage.manifest import Manifest
from mac_rag.memory.storage.quantizer_file import misfit
from mac_rag.nn.product_quantizer import ProductQuantizer


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
