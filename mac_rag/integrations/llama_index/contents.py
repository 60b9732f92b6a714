"""What an index, a docstore, a vector store or a Chroma collection holds, as documents for a memory bank."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode, MetadataMode, TextNode
from llama_index.core.storage.docstore import BaseDocumentStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from llama_index.core.vector_stores.utils import metadata_dict_to_node

from mac_rag.data.types import Document
from mac_rag.errors import ConfigError
from mac_rag.retrieval.llama_index import FiledBy, document_id

logger = logging.getLogger(__name__)

Source: TypeAlias = Any  # BaseIndex, BaseDocumentStore, BasePydanticVectorStore, or a Collection of chromadb

_PAGE = 1000  # records of a Chroma collection that are read at a time


def documents_in(source: Source, filed_by: FiledBy) -> list[Document]:
    """The documents of a source, in its order; logs a warning if some have no text.

    Args:
        source: an index, a docstore, a vector store that stores texts, or a Chroma collection.
        filed_by: `source` to put the nodes of a document together again; `node` to make a document of each node.

    Raises:
        ConfigError: for a source of another kind, or one that does not give its nodes out.
    """
    nodes: dict[str, list[BaseNode]] = {}
    for node in _nodes_in(source):
        nodes.setdefault(document_id(node, filed_by), []).append(node)
    documents = [Document(name, _text(parts), dict(parts[0].metadata)) for name, parts in nodes.items()]
    without = [document.id for document in documents if not document.text.strip()]
    if without:
        logger.warning("%d documents without text were left out, such as %r", len(without), without[0])
    return [document for document in documents if document.text.strip()]


def _nodes_in(source: Source) -> Iterable[BaseNode]:
    if isinstance(source, BaseDocumentStore):
        return source.docs.values()
    if isinstance(source, BasePydanticVectorStore):
        return _in_vector_store(source)
    if isinstance(source, BaseIndex):
        return _in_index(source)
    if type(source).__module__.partition(".")[0] == "chromadb" and hasattr(source, "get"):
        return _in_collection(source)
    raise ConfigError(
        f"{type(source).__name__} is no source of documents; give an index, a docstore, a vector store of LlamaIndex, "
        "or a Chroma collection"
    )


def _in_index(index: BaseIndex[Any]) -> Iterable[BaseNode]:
    struct = index.index_struct
    listed = getattr(struct, "nodes_dict", None) or getattr(struct, "nodes", None)
    if isinstance(listed, dict):
        listed = list(listed.values())
    # A docstore may serve several indexes; the structure of this one tells which nodes are its own.
    nodes = list(index.docstore.docs.values()) if not listed else index.docstore.get_nodes(listed, raise_error=False)
    store = getattr(index, "vector_store", None)
    if not nodes and store is not None and store.stores_text:
        return _in_vector_store(store)
    return nodes


def _in_vector_store(store: BasePydanticVectorStore) -> list[BaseNode]:
    try:
        return store.get_nodes(node_ids=None, filters=None)
    except NotImplementedError:
        raise ConfigError(
            f"{type(store).__name__} does not give its nodes out; give the docstore, or the index if it has one "
            "(store_nodes_override=True)"
        ) from None


def _in_collection(collection: Any) -> Iterator[BaseNode]:
    for first in range(0, collection.count(), _PAGE):
        page = collection.get(limit=_PAGE, offset=first, include=["documents", "metadatas"])
        for name, text, metadata in zip(page["ids"], page["documents"], page["metadatas"], strict=True):
            if metadata and "_node_content" in metadata:  # written by LlamaIndex
                node = metadata_dict_to_node(metadata, text=text or "")
            else:
                node = TextNode(id_=name, text=text or "", metadata=dict(metadata or {}))
            yield node


def _text(nodes: list[BaseNode]) -> str:
    """The text of a document from its nodes; where they overlap, it is not repeated."""
    if all(isinstance(node, TextNode) and node.start_char_idx is not None for node in nodes):
        nodes = sorted(nodes, key=lambda node: node.start_char_idx or 0)  # type: ignore[attr-defined]
    text, end = "", 0
    for node in nodes:
        part = node.get_content(metadata_mode=MetadataMode.NONE)
        start = node.start_char_idx if isinstance(node, TextNode) else None
        if not text or start is None:
            text = f"{text}\n\n{part}" if text else part
        elif start < end and text.endswith(part[: end - start]):
            text += part[end - start :]
        else:
            text += (" " if start > end else "") + part
        end = max(end, (start or 0) + len(part))
    return text
