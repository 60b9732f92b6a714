"""MACVectorStore: what an application deletes from its vector store, the memory bank forgets as well."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)

from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError
from mac_rag.integrations.llama_index.component import EngineComponent
from mac_rag.retrieval.llama_index import FiledBy


class MACVectorStore(EngineComponent, BasePydanticVectorStore):
    """Any vector store of LlamaIndex, with the memory bank beside it.

    LlamaIndex deletes a document by telling the vector store: `index.delete_ref_doc`, `update_ref_doc`,
    `refresh_ref_docs` and pipelines with a docstore strategy, sync and async, all end in `delete(ref_doc_id)`. Here the
    engine forgets the document, in its bank and its retriever, before the vector store does, so that no failure in
    between leaves it with influence; deleting again finishes what was interrupted. Documents get into the bank by a
    `MemoryWriter` among the transformations, not by `add`. All else is the vector store's own.

        store = MACVectorStore(SimpleVectorStore(), engine)
        index = VectorStoreIndex.from_documents(
            documents,
            storage_context=StorageContext.from_defaults(vector_store=store),
            transformations=[MemoryWriter(engine), SentenceSplitter()],
        )
        index.delete_ref_doc("bridge")

    Args:
        vector_store: where vectors are.
        engine: whose bank forgets.
        filed_by: as set in the `MemoryWriter`. With `node`, the bank forgets the nodes that `delete_nodes` names, and
            `delete` finds the nodes of a document by `get_nodes`, which the vector store has to offer.
    """

    stores_text: bool
    is_embedding_query: bool
    filed_by: FiledBy
    _store: BasePydanticVectorStore = PrivateAttr()

    def __init__(
        self, vector_store: BasePydanticVectorStore, engine: MACEngine, *, filed_by: FiledBy = "source"
    ) -> None:
        super().__init__(
            stores_text=vector_store.stores_text,
            is_embedding_query=vector_store.is_embedding_query,
            filed_by=filed_by,
        )
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
            BankError: when the bank is not open for writing.
        """
        self._forget(self._filed(ref_doc_id))
        self._store.delete(ref_doc_id, **delete_kwargs)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """As `delete`, without blocking the event loop."""
        await asyncio.to_thread(lambda: self._forget(self._filed(ref_doc_id)))
        await self._store.adelete(ref_doc_id, **delete_kwargs)

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Deletes nodes; the bank forgets them where it files nodes, and else keeps their document.

        Raises:
            BankError: as `delete`.
        """
        self._forget(self._chosen(node_ids, filters))
        self._store.delete_nodes(node_ids, filters, **delete_kwargs)

    async def adelete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """As `delete_nodes`, without blocking the event loop."""
        await asyncio.to_thread(lambda: self._forget(self._chosen(node_ids, filters)))
        await self._store.adelete_nodes(node_ids, filters, **delete_kwargs)

    def clear(self) -> None:
        """Empties the bank and the vector store."""
        self._forget(self.engine.bank.document_ids)
        self._store.clear()

    async def aclear(self) -> None:
        """As `clear`, without blocking the event loop."""
        await asyncio.to_thread(lambda: self._forget(self.engine.bank.document_ids))
        await self._store.aclear()

    def _filed(self, ref_doc_id: str) -> list[str]:
        """The ids under which the bank files a document, or its nodes."""
        if self.filed_by == "source":
            return [ref_doc_id]
        by_source = MetadataFilters(filters=[MetadataFilter(key="ref_doc_id", value=ref_doc_id)])
        return self._chosen(None, by_source)

    def _chosen(self, node_ids: list[str] | None, filters: MetadataFilters | None) -> list[str]:
        """The ids of nodes that the bank files."""
        if self.filed_by == "source":
            return []
        if filters is None:
            return node_ids or []
        try:
            return [node.node_id for node in self._store.get_nodes(node_ids, filters)]
        except NotImplementedError:
            raise ConfigError(
                f"{type(self._store).__name__} does not tell which nodes a document has, so the bank cannot forget "
                "them; file whole documents (filed_by='source'), or delete nodes by their ids"
            ) from None

    def _forget(self, document_ids: Sequence[str]) -> None:
        for document_id in document_ids:
            # One that was merged with another goes together with it.
            if document_id in self.engine.bank:
                self.engine.forget(document_id)

    # -- the vector store's own --

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
        return self._store.query(query, **kwargs)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        return await self._store.aquery(query, **kwargs)

    def persist(self, persist_path: str, fs: Any = None) -> None:
        self._store.persist(persist_path, fs)
