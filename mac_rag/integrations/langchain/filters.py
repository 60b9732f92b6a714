"""Conditions on metadata for the memory bank: a filtered document has no influence."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from mac_rag.engine import MACEngine
from mac_rag.integrations.filtered_documents import PassingDocuments
from mac_rag.memory.metadata_filters import Filters, fits


class WhereMetadata(PassingDocuments[Filters]):
    """The ids of the documents in an engine's bank whose metadata fit, for the engine's `allowed`.

    It follows changes of the bank. A document that the bank does not hold never passes.

    Examples:
        >>> from mac_rag import Document
        >>> engine = MACEngine("mac-tiny")
        >>> texts = {1995: "A storm has hit Haibburn.", 2000: "A storm has hit Wunville."}
        >>> report = engine.adapt([Document(f"storm-{year}", text, {"year": year}) for year, text in texts.items()])
        >>> recent = WhereMetadata(engine, {"year": [2000, 2001]})
        >>> "storm-2000" in recent, "storm-1995" in recent
        (True, False)

    Args:
        engine: the engine of the bank.
        filters: the values that metadata must have by their keys, or lists of which they must have one.
    """

    def __init__(self, engine: MACEngine, filters: Filters) -> None:
        super().__init__(engine, deepcopy(dict(filters)))  # the caller's may change
        self._key = _key(filters)

    @property
    def key(self) -> str:
        """Equal for equal filters; 1 and True are not equal."""
        return self._key

    def passes(self, document_id: str, metadata: Mapping[str, Any]) -> bool:
        """True if the metadata fit; see `mac_rag.memory.metadata_filters.fits`."""
        return fits(metadata, self.filters)


def where(engine: MACEngine, filters: Filters | None, last: WhereMetadata | None) -> WhereMetadata | None:
    """The documents that filters let pass; None for all.

    Args:
        engine: the engine of the bank.
        filters: the filters.
        last: those of the call before, which know what passes if the filters are the same.
    """
    if not filters:
        return None
    return last if last is not None and last.key == _key(filters) else WhereMetadata(engine, filters)


def _key(filters: Filters) -> str:
    return repr(sorted(filters.items()))
