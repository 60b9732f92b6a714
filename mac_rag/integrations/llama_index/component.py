"""The bases of MAC's LlamaIndex components, which hold an engine, and metadata filters for the memory bank."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Self

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.schema import BaseComponent
from llama_index.core.vector_stores.types import FilterCondition, FilterOperator, MetadataFilters
from llama_index.core.vector_stores.utils import build_metadata_filter_fn

from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError, MACError
from mac_rag.integrations.framework import PassingDocuments, remembers


class EngineComponent(BaseComponent):
    """A LlamaIndex component around a `MACEngine`. Copies share the engine; it is never pickled."""

    _engine: MACEngine = PrivateAttr()

    @property
    def engine(self) -> MACEngine:
        """The engine of the component."""
        return self._engine

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> Self:
        """Builds a component from the dictionary of `to_dict`.

        Args:
            data: the dictionary.
            kwargs: arguments that the dictionary does not hold, such as the engine.
        """
        accepted = inspect.signature(cls).parameters
        return cls(**{name: value for name, value in {**data, **kwargs}.items() if name in accepted})

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self.model_copy()

    def __getstate__(self) -> dict[str, Any]:
        raise MACError(
            f"{type(self).__name__} holds the networks and the memory bank of this process and cannot be pickled; "
            "run the pipeline without num_workers, or build a component in each process"
        )


class FilteredDocuments(PassingDocuments[MetadataFilters]):
    """The ids of the documents in an engine's bank that pass metadata filters, for the engine's `allowed`.

    Follows changes of the bank. Filters see the metadata that `MemoryWriter` or `engine.adapt` stored with a document,
    and its id as `doc_id`, `document_id` and `ref_doc_id`. Missing keys are treated as in LlamaIndex's own
    `SimpleVectorStore`. A document that the bank does not hold never passes.

    Examples:
        >>> from llama_index.core.vector_stores import MetadataFilter
        >>> from mac_rag import Document
        >>> engine = MACEngine("mac-tiny")
        >>> texts = {1995: "A storm has hit Haibburn.", 2000: "A storm has hit Wunville."}
        >>> report = engine.adapt([Document(f"storm-{year}", text, {"year": year}) for year, text in texts.items()])
        >>> recent = FilteredDocuments(engine, MetadataFilters(filters=[MetadataFilter(key="year", value=2000)]))
        >>> "storm-2000" in recent, "storm-1995" in recent
        (True, False)
        >>> [answer] = engine.answer(["Where did the storm hit?"], allowed=recent)  # the older storm has no influence

    Args:
        engine: the engine of the bank.
        filters: LlamaIndex's metadata filters; they may be nested.

    Raises:
        ConfigError: for a value that its operator does not take; on access, for a filter that does not fit the metadata
            of a document.
    """

    def __init__(self, engine: MACEngine, filters: MetadataFilters) -> None:
        super().__init__(engine, filters)
        _check(filters)

    def passes(self, document_id: str, stored: Mapping[str, Any]) -> bool:
        ids = dict.fromkeys(("doc_id", "document_id", "ref_doc_id"), document_id)
        metadata = {**stored, **ids}
        try:
            return _matches(self.filters, lambda _: metadata)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the metadata filters do not fit document {document_id!r} of the memory bank: {error}; "
                "compare a key with values of its own type, by an operator that this type has"
            ) from None


_TEXTS = (FilterOperator.TEXT_MATCH, FilterOperator.TEXT_MATCH_INSENSITIVE)
_LISTS = (FilterOperator.IN, FilterOperator.NIN, FilterOperator.ANY, FilterOperator.ALL)
_EQUALS = (FilterOperator.EQ, FilterOperator.NE)


def _check(filters: MetadataFilters) -> None:
    """Refuses values for which LlamaIndex would let documents pass or not by chance, such as the letters of a text."""
    for one in filters.filters:
        if isinstance(one, MetadataFilters):
            _check(one)
            continue
        is_list, takes_list = isinstance(one.value, list), one.operator in _LISTS
        if one.operator == FilterOperator.IS_EMPTY or (is_list and one.operator in _EQUALS):
            continue
        if one.value is None or is_list != takes_list or (one.operator in _TEXTS and not isinstance(one.value, str)):
            kind = "a list" if takes_list else "a text" if one.operator in _TEXTS else "a single value"
            raise ConfigError(
                f"the filter {one.operator.value!r} of {one.key!r:.80} takes {kind}, got {one.value!r:.80}; for values "
                "that are missing, use is_empty"
            )


def _matches(filters: MetadataFilters, metadata: Callable[[str], Mapping[str, Any]]) -> bool:
    """True if a document passes; LlamaIndex itself applies single filters."""
    results = (
        _matches(one, metadata)
        if isinstance(one, MetadataFilters)
        else build_metadata_filter_fn(metadata, MetadataFilters(filters=[one]))("")
        for one in filters.filters
    )
    if filters.condition == FilterCondition.OR:
        return not filters.filters or any(results)
    if filters.condition == FilterCondition.NOT:
        return not any(results)
    return all(results)


class FilteringComponent(EngineComponent):
    """A component that reads the bank through metadata filters.

    Attributes:
        filters: filters for the documents that may have any influence; None for all.
        as_of: the moment of the question, as `MACEngine.answer` takes it; None for all dates.
    """

    as_of: str | datetime | None = Field(default=None, description="Later documents of the bank have no influence.")
    filters: MetadataFilters | None = Field(default=None, description="Documents that may have any influence.")
    _filtered: FilteredDocuments | None = PrivateAttr(default=None)

    @property
    def allowed(self) -> FilteredDocuments | None:
        """Ids of the documents of the bank that may have any influence; None for all."""
        filters, filtered = self.filters, self._filtered
        if filters is None:
            return None
        if filtered is None or filtered.filters is not filters:
            self._filtered = filtered = FilteredDocuments(self.engine, filters)
        return filtered

    @property
    def remembers(self) -> bool:
        """True if the bank holds a document that may have influence."""
        return remembers(self.engine, self.allowed, self.as_of)
