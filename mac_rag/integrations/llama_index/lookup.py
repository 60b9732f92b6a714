"""Finds a document of the bank: its nodes in an application's docstore or index, or the text that the bank keeps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode, NodeRelationship, NodeWithScore, TextNode
from llama_index.core.storage.docstore import BaseDocumentStore
from llama_index.core.vector_stores.types import MetadataFilter, MetadataFilters

from mac_rag.data.characters import shown_id
from mac_rag.data.provenance import Member
from mac_rag.data.types import Source
from mac_rag.errors import BankError, ConfigError
from mac_rag.memory.interface import BankContents
from mac_rag.retrieval.llama_index import FiledBy

logger = logging.getLogger(__name__)


def nodes_of(document_id: str, source: BaseIndex[Any] | BaseDocumentStore, filed_by: FiledBy) -> list[BaseNode]:
    """The nodes of a document, in their order; logs a warning if there are none.

    Args:
        document_id: id of the document in the bank.
        source: a docstore; or an index with a docstore, or with a vector store that stores texts.
        filed_by: how ids of nodes and of the bank correspond; see `mac_rag.retrieval.llama_index.document_id`.

    Raises:
        ConfigError: for an index without a docstore whose vector store cannot return nodes.
    """
    if isinstance(source, BaseDocumentStore):
        nodes = _in_docstore(document_id, source, filed_by)
    else:
        nodes = _in_docstore(document_id, source.docstore, filed_by)
        store = getattr(source, "vector_store", None)
        if not nodes and store is not None and store.stores_text:
            nodes = _in_vector_store(document_id, store, filed_by)
    if not nodes:
        logger.warning(
            "document %r is in the memory bank, but %s has no node of it", document_id, type(source).__name__
        )
    return nodes


def source_nodes(
    source: Source, documents: BaseIndex[Any] | BaseDocumentStore | None, filed_by: FiledBy
) -> list[NodeWithScore]:
    """The nodes of a document that an answer rests on, with its share of the attention as their score.

    Args:
        source: the document.
        documents: docstore or index in which its nodes are found; None for none.
        filed_by: as `nodes_of` takes it.

    Returns:
        Its nodes; if there are none, one with the text that the bank keeps; if there is none either, nothing.

    Raises:
        ConfigError: as `nodes_of`.
    """
    nodes = [] if documents is None else nodes_of(source.document_id, documents, filed_by)
    if not nodes and source.text is not None:
        nodes = [document_node(source.document_id, source.text, source.metadata)]
    return [NodeWithScore(node=node, score=source.share) for node in nodes]


def document_node(document_id: str, text: str, metadata: Mapping[str, Any]) -> TextNode:
    """A whole document as a node, which is its own source."""
    node = TextNode(id_=document_id, text=text, metadata=dict(metadata))
    node.relationships[NodeRelationship.SOURCE] = node.as_related_node_info()
    return node


def _in_docstore(document_id: str, docstore: BaseDocumentStore, filed_by: FiledBy) -> list[BaseNode]:
    info = docstore.get_ref_doc_info(document_id) if filed_by == "source" else None
    ids = [document_id] if info is None else info.node_ids
    nodes = [docstore.get_document(name, raise_error=False) for name in ids]
    return [node for node in nodes if node is not None]


def _in_vector_store(document_id: str, store: Any, filed_by: FiledBy) -> list[BaseNode]:
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


def kept_text(bank: BankContents, document_id: str) -> tuple[Member, str]:
    """A document of a bank that keeps texts, and its text.

    Raises:
        BankError: when the bank has lost the text, or does not hold the document.
    """
    entry = bank[document_id]
    place = entry.place(document_id)
    text = entry.texts[place]
    if text is None:
        raise BankError(
            f"the bank has lost the text of {shown_id(document_id)}; adapt to the document again, or restore a backup"
        )
    return entry.members[place], text
