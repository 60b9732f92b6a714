"""Hashes of document ids, so that very many can be looked up at once."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


def id_hash(document_id: str) -> int:
    """A signed number of 64 bits that stands for a document's id: the first 8 bytes of blake2b of the id."""
    digest = hashlib.blake2b(document_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@runtime_checkable
class HashedIds(Protocol):
    """A container of `allowed` documents that knows the hashes of their ids.

    Attributes:
        among: a further container that must hold a document, too; None for no further one.
    """

    among: Container[str] | None

    def __contains__(self, document_id: object) -> bool: ...

    def holds(self, hashes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """`[n]`, True for each of n hashes whose document is one of them; ignores `among`."""


def those_in(document_ids: Sequence[str], allowed: Container[str]) -> list[str]:
    """The ids that a container holds, in their order."""
    if not isinstance(allowed, HashedIds):
        return [name for name in document_ids if name in allowed]
    held = allowed.holds(np.array([id_hash(name) for name in document_ids], dtype=np.int64))
    among = allowed.among
    return [name for name, is_held in zip(document_ids, held.tolist()) if is_held and (among is None or name in among)]
