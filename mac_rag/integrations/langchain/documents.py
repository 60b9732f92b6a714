"""LangChain's documents as documents for a memory bank, and back; filters on metadata; the retriever."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from datetime import datetime
from functools import partial
from typing import Any, TypeAlias

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document as LangChainDocument
from langchain_core.retrievers import BaseRetriever
from pydantic import BaseModel, Field, PrivateAttr, model_validator

from mac_rag.data.characters import is_blank
from mac_rag.data.dates import AsOf, with_written_dates
from mac_rag.data.metadata_filters import Filters, condition
from mac_rag.data.types import Document, Source
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, ConfigError, DocumentError
from mac_rag.integrations.framework import ATTENTION, PassingDocuments, in_thread, remembers
from mac_rag.retrieval.base import check_k

Documents: TypeAlias = Iterable[LangChainDocument]

logger = logging.getLogger(__name__)


def to_documents(documents: Documents) -> list[Document]:
    """Converts documents of LangChain, from a loader or a splitter, for `MACEngine.adapt`.

    Each keeps its id and metadata. The id of a document without one is the hash of its text and metadata, so that
    nothing is computed if it comes again; exact copies are one document. Documents without text, such as blank pages,
    are left out, with a warning. Give whole documents rather than small pieces:
    the engine itself splits a document that is longer than the model's limit.

    Examples:
        >>> documents = [LangChainDocument("A storm has hit Wunville.", id="storm"), LangChainDocument("It rained.")]
        >>> engine = MACEngine("mac-tiny")
        >>> engine.adapt(to_documents(documents)).added, engine.adapt(to_documents(documents)).unchanged
        (2, 2)

    Args:
        documents: the documents. The attention that a `MACRetriever` put into their metadata is left out.

    Raises:
        DocumentError: for a document without an id whose metadata JSON cannot hold.
    """
    unnamed: dict[str, Document] = {}
    copies: list[Document] = []  # the engine checks that ids which documents bring are unique
    blank = 0
    for document in documents:
        if is_blank(document.page_content):
            blank += 1
            continue
        metadata = with_written_dates({key: value for key, value in document.metadata.items() if key != ATTENTION})
        if document.id is not None:
            copies.append(Document(document.id, document.page_content, metadata))
            continue
        name = _hash(document.page_content, metadata)
        if name not in unnamed:
            unnamed[name] = Document(name, document.page_content, metadata)
            copies.append(unnamed[name])
    if blank:
        logger.warning("%d documents without text were left out", blank)
    return copies


def _hash(text: str, metadata: dict[str, object]) -> str:
    try:
        content = json.dumps([text, metadata], sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DocumentError(
            f"JSON cannot hold the metadata of the document that begins {text[:60]!r} ({error}); write "
            "paths as texts, or give the document an id"
        ) from None
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def check_texts(engine: MACEngine) -> None:
    """Checks that there are texts to retrieve.

    Raises:
        ConfigError: for an engine whose bank keeps no texts and that has no retriever.
    """
    if not engine.bank.keep_texts and engine.retriever is None:
        raise ConfigError(
            "the engine's bank keeps no texts to retrieve; give an engine with "
            "MemoryBank(model.fingerprint, keep_texts=True), or one with a retriever"
        )


def from_source(source: Source, engine: MACEngine) -> LangChainDocument:
    """A document of the bank, with its share of the attention in its metadata.

    Raises:
        BankError: if neither the bank nor the engine's retriever holds its text.
    """
    text, retriever = source.text, engine.retriever
    if text is None and retriever is not None and source.document_id in retriever:
        [document] = retriever.documents([source.document_id])
        text = document.text
    if text is None:
        raise BankError(
            f"the memory holds document {source.document_id!r:.200}, but nothing holds its text; adapt to it again, "
            "with a bank that keeps texts, or reconcile bank and retriever"
        )
    return LangChainDocument(text, id=source.document_id, metadata={**source.metadata, ATTENTION: source.share})


class WhereMetadata(PassingDocuments[Filters]):
    """The ids of the documents in an engine's bank whose metadata match filters, for the engine's `allowed`.

    Follows changes of the bank. A document that the bank does not hold never passes.

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
        filters: metadata key -> the value that it must have, a list of values of which it must have one, or operators;
            see `mac_rag.data.metadata_filters.condition`.

    Raises:
        ConfigError: for an operator that is not supported.
    """

    def __init__(self, engine: MACEngine, filters: Filters) -> None:
        super().__init__(engine, deepcopy(dict(filters)))  # a copy, because the caller may change its own
        self._key = _key(filters)
        self._fits = condition(self.filters)

    @property
    def key(self) -> str:
        """A key that is equal for equal filters; 1 and True are not equal."""
        return self._key

    def passes(self, document_id: str, metadata: Mapping[str, Any]) -> bool:
        """True if the metadata match; see `mac_rag.data.metadata_filters.condition`."""
        return self._fits(metadata)


def where(engine: MACEngine, filters: Filters | None, last: WhereMetadata | None) -> WhereMetadata | None:
    """The documents that filters let pass; None for all.

    Args:
        engine: the engine of the bank.
        filters: the filters.
        last: the result of the call before, which is reused if the filters are equal.
    """
    if not filters:
        return None
    return last if last is not None and last.key == _key(filters) else WhereMetadata(engine, filters)


def _key(filters: Filters) -> str:
    return repr(sorted(filters.items()))


def check_names(cls: type[BaseModel], given: dict[str, Any], without_effect: Collection[str] = ()) -> dict[str, Any]:
    """The arguments of a constructor, without those that have no effect.

    Raises:
        ConfigError: for an argument that the class does not have; LangChain would ignore it.
    """
    known = {name for field, info in cls.model_fields.items() for name in (field, info.alias) if name}
    if unknown := sorted(set(given) - known - set(without_effect)):
        raise ConfigError(
            f"{cls.__name__} has no argument {', '.join(unknown)}; it has {', '.join(sorted(cls.model_fields))}"
        )
    return {name: value for name, value in given.items() if name not in without_effect}


class MACRetriever(BaseRetriever):
    """A retriever that ranks the documents of an engine's bank by the attention that a question pays to each.

    A document has the id and metadata with which the engine adapted to it, and in its metadata `mac_attention`, its
    share of the question's attention; the shares of all documents sum to 1. Its text comes from the bank or, if the
    bank keeps none, from the engine's retriever. If no document passes the filters, or the bank is empty, the result is
    empty. The async methods do not block the event loop.

    `k`, `filters` and `as_of` are also arguments of a call: `retriever.invoke(question, k=1)`.

    Examples:
        >>> from langchain_core.documents import Document
        >>> from mac_rag import MACModel, MemoryBank
        >>> from mac_rag.integrations.langchain import to_documents
        >>> model = MACModel.from_pretrained("mac-tiny")
        >>> engine = MACEngine(model, MemoryBank(model.fingerprint, keep_texts=True))
        >>> documents = [Document("A storm has hit Wunville.", id="storm"), Document("Rainga prints.", id="press")]
        >>> report = engine.adapt(to_documents(documents))
        >>> [document.id for document in MACRetriever(engine=engine, k=1).invoke("Where did the storm hit?")]
        ['storm']

    Args:
        engine: the engine.
        k: number of documents per question.
        filters: metadata key -> the value that a document must have, or a list of values of which it must have one.
        as_of: the moment of the question: later documents are not found, and have no influence.

    Raises:
        ConfigError: for an engine whose bank keeps no texts and that has no retriever; for an unknown argument.
    """

    engine: MACEngine = Field(exclude=True, repr=False)
    k: int = Field(default=5, ge=1)
    filters: dict[str, Any] | None = None
    as_of: str | datetime | None = None

    _filtered: WhereMetadata | None = PrivateAttr(default=None)  # cache: from the last call

    @model_validator(mode="before")
    @classmethod
    def _check(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        arguments = check_names(cls, arguments)
        if isinstance(engine := arguments.get("engine"), MACEngine):
            check_texts(engine)
        return arguments

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun | None,
        k: int | None = None,
        filters: dict[str, Any] | None = None,
        as_of: AsOf = None,
    ) -> list[LangChainDocument]:
        engine, k = self.engine, self.k if k is None else k
        check_k(k)
        self._filtered = allowed = where(engine, self.filters if filters is None else filters, self._filtered)
        moment = self.as_of if as_of is None else as_of
        if not remembers(engine, allowed, moment):
            return []
        sources = engine.sources(query, most=k, allowed=allowed, as_of=moment)
        return [from_source(source, engine) for source in sources]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **options: Any
    ) -> list[LangChainDocument]:
        return await in_thread(partial(self._get_relevant_documents, query, run_manager=None, **options))
