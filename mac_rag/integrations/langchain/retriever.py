"""The memory of an engine as a LangChain retriever."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import Field, PrivateAttr, model_validator

from mac_rag.data.dates import AsOf
from mac_rag.engine import MACEngine
from mac_rag.integrations.filtered_documents import remembers
from mac_rag.integrations.framework import in_thread
from mac_rag.integrations.langchain.documents import WhereMetadata, check_names, check_texts, from_source, where
from mac_rag.retrieval.base import check_k


class MACRetriever(BaseRetriever):
    """The documents of an engine's bank, ranked by the attention that a question pays to each.

    A document has the id and metadata that the engine has adapted to, and in its metadata `mac_attention`, its share of
    the question's attention; the shares of all documents sum to 1. Its text is the one that the bank keeps, or else
    that of the engine's retriever. Where nothing passes the filters, or the bank is empty, there are none. The async
    methods do not block the event loop.

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
        filters: values that the metadata of a document must have by their keys, or lists of which it must have one.
        as_of: the moment of the question: later documents are not found, and have no influence.

    Raises:
        ConfigError: for an engine whose bank keeps no texts, without a retriever; for an unknown argument.
    """

    engine: MACEngine = Field(exclude=True, repr=False)
    k: int = Field(default=5, ge=1)
    filters: dict[str, Any] | None = None
    as_of: str | datetime | None = None

    _filtered: WhereMetadata | None = PrivateAttr(default=None)  # of the last call

    @model_validator(mode="before")
    @classmethod
    def _check(cls, given: dict[str, Any]) -> dict[str, Any]:
        given = check_names(cls, given)
        if isinstance(engine := given.get("engine"), MACEngine):
            check_texts(engine)
        return given

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun | None,
        k: int | None = None,
        filters: dict[str, Any] | None = None,
        as_of: AsOf = None,
    ) -> list[Document]:
        engine, k = self.engine, self.k if k is None else k
        check_k(k)
        self._filtered = allowed = where(engine, self.filters if filters is None else filters, self._filtered)
        moment = self.as_of if as_of is None else as_of
        if not remembers(engine, allowed, moment):
            return []
        found = engine.sources(query, most=k, allowed=allowed, as_of=moment)
        return [from_source(source, engine) for source in found]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        return await in_thread(partial(self._get_relevant_documents, query, run_manager=None, **options))
