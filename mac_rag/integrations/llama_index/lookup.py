"""Nodes by the id under which the memory bank files their text, out of what a LlamaIndex application has."""

from __future__ import annotations

import logging
from typing import Any

from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode
from llama_index.core.storage.docstore import BaseDocumentStore
from llama_index.core.vector_stores.types import MetadataFilter, MetadataFilters

from mac_rag.errors import ConfigError
from mac_rag.retrieval.llama_index import FiledBy

logger = logging.getLogger(__name__)


def nodes_of(document_id: str, source: BaseIndex[Any] | BaseDocumentStore, filed_by: FiledBy) -> list[BaseNode]:
    """The nodes of a document of the bank, in their order; none, and a warning, where the source lacks it.

    Args:
        document_id: as the bank files it.
        source: a docstore, or an index with its docstore, or else with a vector store that keeps texts.
        filed_by: how ids of nodes and of the bank go together.

    Raises:
        ConfigError: for an index without a docstore, whose vector store does not give its nodes out.
    """
    if isinstance(source, BaseDocumentStore):
        nodes = _stored(document_id, source, filed_by)
    else:
        nodes = _stored(document_id, source.docstore, filed_by)
        store = getattr(source, "vector_store", None)
        if not nodes and store is not None and store.stores_text:
            nodes = _kept_with_vectors(document_id, store, filed_by)
    if not nodes:
        logger.warning(
            "document %r is in the memory bank, but %s has no node of it", document_id, type(source).__name__
        )
    return nodes


def _stored(document_id: str, docstore: BaseDocumentStore, filed_by: FiledBy) -> list[BaseNode]:
    info = docstore.get_ref_doc_info(document_id) if filed_by == "source" else None
    ids = [document_id] if info is None else info.node_ids
    found = [docstore.get_document(name, raise_error=False) for name in ids]
    return [node for node in found if node is not None]


def _kept_with_vectors(document_id: str, store: Any, filed_by: FiledBy) -> list[BaseNode]:
    try:
        if filed_by == "node":
            return list(store.get_nodes(node_ids=[document_id]))
        by_source = MetadataFilters(filters=[MetadataFilter(key="ref_doc_id", value=document_id)])
        return list(store.get_nodes(node_ids=None, filters=by_source))
    except NotImplementedError:
        raise ConfigError(
            f"{type(store).__name__} does not give its nodes out by their documents, and the index has no docstore; "
            "build the index with store_nodes_override=True"
        ) from None
