"""MACVectorStore: deletes documents from a vector store and from the memory bank together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)

from mac_rag.engine import MACEngine
from mac_rag.integrations.framework import in_thread, warn_of_empty_bank
from mac_rag.integrations.llama_index.component import EngineComponent

logger = logging.getLogger(__name__)


class MACVectorStore(EngineComponent, BasePydanticVectorStore):
    """Any vector store of LlamaIndex together with the memory bank.

    All of LlamaIndex's ways to delete a document (`index.delete_ref_doc`, `update_ref_doc`, `refresh_ref_docs`,
    pipelines with a docstore strategy, sync and async) call `delete(ref_doc_id)` of the vector store. Here the engine
    first forgets the document, in its bank and its retriever, and then the vector store deletes it. So the document has
    no influence even if a failure comes in between, and a second delete completes the first. A `MemoryWriter` among
    the transformations writes documents to the bank; `add` does not. All other calls go to the vector store. If it
    finds documents while the bank is empty, a warning is logged once: the bank is not filled yet, or lost.

    Examples:
        >>> from llama_index.core import Document, MockEmbedding, StorageContext, VectorStoreIndex
        >>> from llama_index.core.vector_stores import SimpleVectorStore
        >>> from mac_rag.integrations.llama_index import MemoryWriter
        >>> engine = MACEngine("mac-tiny")
        >>> storage = StorageContext.from_defaults(vector_store=MACVectorStore(SimpleVectorStore(), engine))
        >>> options = {"transformations": [MemoryWriter(engine)], "embed_model": MockEmbedding(embed_dim=8)}
        >>> storm = Document(id_="storm", text="A storm has hit Wunville.")
        >>> index = VectorStoreIndex.from_documents([storm], storage_context=storage, **options)
        >>> index.delete_ref_doc("storm")
        >>> engine.bank.document_ids
        []

    Args:
        vector_store: the vector store.
        engine: the engine whose bank forgets deleted documents.
    """

    stores_text: bool
    is_embedding_query: bool
    _store: BasePydanticVectorStore = PrivateAttr()

    def __init__(self, vector_store: BasePydanticVectorStore, engine: MACEngine) -> None:
        super().__init__(stores_text=vector_store.stores_text, is_embedding_query=vector_store.is_embedding_query)
        self._engine = engine
        self._store = vector_store

    @classmethod
    def class_name(cls) -> str:
        return "MACVectorStore"

    @property
    def client(self) -> Any:
        return self._store.client

    # -- deletes --

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Deletes a document from the bank and the vector store.

        Raises:
            BankError: if the bank is not open for writing.
        """
        self._forget([ref_doc_id])
        self._store.delete(ref_doc_id, **delete_kwargs)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Like `delete`, without blocking the event loop."""
        await in_thread(self._forget, [ref_doc_id])
        await self._store.adelete(ref_doc_id, **delete_kwargs)

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Deletes nodes from the vector store. The bank holds whole documents, which `delete` deletes."""
        self._store.delete_nodes(node_ids, filters, **delete_kwargs)

    async def adelete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """As `delete_nodes`."""
        await self._store.adelete_nodes(node_ids, filters, **delete_kwargs)

    def clear(self) -> None:
        """Empties the bank and the vector store."""
        self._forget(self.engine.bank.document_ids)
        self._store.clear()

    async def aclear(self) -> None:
        """Like `clear`, without blocking the event loop."""
        await in_thread(lambda: self._forget(self.engine.bank.document_ids))
        await self._store.aclear()

    def _forget(self, document_ids: Sequence[str]) -> None:
        for document_id in document_ids:
            # A document that was merged with an earlier one is already deleted.
            if document_id in self.engine.bank:
                self.engine.forget(document_id)

    # -- passed on to the vector store --

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        return self._store.get_nodes(node_ids, filters)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        return await self._store.aget_nodes(node_ids, filters)

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        return self._store.add(nodes, **kwargs)

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        return await self._store.async_add(nodes, **kwargs)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        return self._checked(self._store.query(query, **kwargs))

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        return self._checked(await self._store.aquery(query, **kwargs))

    def _checked(self, result: VectorStoreQueryResult) -> VectorStoreQueryResult:
        """Returns the result; warns once if it holds documents and the bank is empty."""
        bank = self.engine.snapshot
        if (result.ids or result.nodes) and not len(bank):
            warn_of_empty_bank("the vector store of a MACVectorStore holds documents, but not the bank", bank)
        return result

    def persist(self, persist_path: str, fs: Any = None) -> None:
        self._store.persist(persist_path, fs)
