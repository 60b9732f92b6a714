"""What the segments of a bank must not say about each other, even if every file is what its checksum says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from mac_rag.errors import DamageError
from mac_rag.memory.parts import Part
from mac_rag.memory.storage.manifest import Manifest


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


def check_consistency(folder: Path | str, manifest: Manifest, parts: Sequence[Part], codebook: Tensor | None) -> None:
    """Refuses a bank whose segments contradict each other, the manifest or the codebook.

    Raises:
        DamageError: for the first contradiction, which it names.
    """
    for fault in faults(manifest, parts, codebook):
        raise DamageError(
            f"{folder} contradicts itself: {fault.problem}; repair the bank to keep what does not contradict the rest"
        )


def faults(manifest: Manifest, parts: Sequence[Part], codebook: Tensor | None) -> list[Fault]:
    """All live entries that contradict an earlier entry, the manifest or the codebook."""
    return list(_faults(manifest, parts, codebook))


def _faults(manifest: Manifest, parts: Sequence[Part], codebook: Tensor | None) -> Iterator[Fault]:
    known: set[str] = set()
    before = -1
    for part in parts:
        unknown_codes = codebook is not None and part.count > 0 and int(part.stored.main.max()) >= len(codebook)
        last = before
        for sequence, (record, start) in part.entries.items():
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
            if unknown_codes and codebook is not None:
                highest = int(part.stored.main[start : start + record.rows].max())
                if highest >= len(codebook):
                    yield Fault(
                        part, sequence, f"code {highest:,} of document {names[0][:200]!r} is not in the codebook"
                    )
                    continue
            known.update(names)
            last = sequence
        before = max(before, last)
