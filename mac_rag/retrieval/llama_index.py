"""A LlamaIndex index or retriever as a retriever of `mac_rag`, and the bank's ids of LlamaIndex nodes."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Container, Sequence
from typing import Any

from llama_index.core import Document as IndexDocument
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.indices.base import BaseIndex
from llama_index.core.indices.vector_store import VectorIndexRetriever
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle
from llama_index.core.vector_stores.types import VectorStoreQueryMode

from mac_rag.data.provenance import check_document
from mac_rag.data.types import Document
from mac_rag.errors import BankError, ConfigError, DocumentError
from mac_rag.retrieval.base import Hit, Retriever, check_request


def document_id(node: BaseNode) -> str:
    """The id of a node's document in the memory bank: that of its source, or its own if it has no source."""
    name: str = node.ref_doc_id or node.node_id
    return name


class LlamaIndexRetriever(Retriever):
    """A LlamaIndex index, or any LlamaIndex retriever, as a retriever of `mac_rag`.

    Several nodes of one document make one hit, with the text of the best node. If that leaves fewer than `k` hits, more
    nodes are retrieved. A retriever without the attribute `similarity_top_k` can return fewer than `k` hits. In a
    vector search, documents with equal scores rank by id.

    Only a vector search takes `allowed`, because it scores each node by itself. In other retrievers (BM25, fusion,
    keywords, MMR), the documents that are not allowed would shift the scores and ranks of the others. A vector store
    that searches approximately may find different nodes from a store that never held these documents.

    Examples:
        >>> from llama_index.core import MockEmbedding, VectorStoreIndex
        >>> index = VectorStoreIndex([], embed_model=MockEmbedding(embed_dim=8))
        >>> retriever = LlamaIndexRetriever(index)
        >>> documents = [Document("bridge", "Anna Berg opened the bridge."), Document("river", "A ferry on the river.")]
        >>> retriever.add(documents)
        >>> [hits] = retriever.retrieve(["Who opened the bridge?"], k=1, allowed={"bridge"})
        >>> [hit.text for hit in hits], list(index.ref_doc_info)
        (['Anna Berg opened the bridge.'], ['bridge', 'river'])

    Args:
        source: an index, which is searched in its current state and takes new documents; or a retriever, which is only
            read. An index must have a docstore, because a vector store alone cannot tell which documents it holds.
        options: further arguments of the index's `as_retriever`, such as `vector_store_query_mode`.

    Raises:
        ConfigError: for a retriever with options; on `retrieve`, for `allowed` without a vector search.
    """

    def __init__(self, source: BaseRetriever | BaseIndex[Any], **options: Any) -> None:
        if options and isinstance(source, BaseRetriever):
            raise ConfigError(f"a retriever takes no options {', '.join(options)}; set them where it is made")
        self._source: Any = source
        self._options = options
        self._lock = threading.RLock()

    def add(self, documents: Sequence[Document]) -> None:
        with self._lock:
            index = self._index("add")
            known: set[str] = set(index.ref_doc_info)
            for document in documents:
                check_document(document)
                if document.id in known:
                    raise BankError(
                        f"document {document.id!r} is already in the index, or comes twice; "
                        "delete it before adding it again"
                    )
                known.add(document.id)
            done = []
            try:
                for document in documents:
                    done.append(document.id)
                    index.insert(IndexDocument(id_=document.id, text=document.text, metadata=dict(document.metadata)))
            except BaseException:
                for added in done:
                    index.delete_ref_doc(added, delete_from_docstore=True)
                raise

    def delete(self, document_id: str) -> None:
        with self._lock:
            index = self._index("delete")
            if document_id not in index.ref_doc_info:
                raise BankError(f"no document {document_id!r} in this index of {len(self)} documents")
            index.delete_ref_doc(document_id, delete_from_docstore=True)

    def retrieve(self, questions: Sequence[str], k: int, *, allowed: Container[str] | None = None) -> list[list[Hit]]:
        check_request(questions, k)
        with self._lock:
            return [self._hits(question, k, allowed) for question in questions]

    def __len__(self) -> int:
        with self._lock:
            return len(self._index("count").ref_doc_info)

    def __contains__(self, document_id: object) -> bool:
        with self._lock:
            return document_id in self._index("look up").ref_doc_info

    def _index(self, purpose: str) -> Any:
        """The index.

        Raises:
            ConfigError: for a retriever, or an index that cannot tell which documents it holds; names the purpose.
        """
        if isinstance(self._source, BaseRetriever):
            raise ConfigError(
                f"cannot {purpose} documents through the retriever {type(self._source).__name__}, which is only read; "
                "build on its index instead: LlamaIndexRetriever(index)"
            )
        try:
            _ = self._source.ref_doc_info
        except NotImplementedError:
            raise ConfigError(
                f"cannot {purpose} documents of {type(self._source).__name__}: its vector store does not tell which "
                "documents it holds; build the index with store_nodes_override=True"
            ) from None
        return self._source

    def _hits(self, question: str, k: int, allowed: Container[str] | None) -> list[Hit]:
        retriever: Any
        if isinstance(self._source, BaseRetriever):
            retriever = copy.copy(self._source)  # a copy, so that the caller's similarity_top_k does not change
        else:
            # A vector retriever finds only the nodes that existed when it was made, so each question needs a new one.
            retriever = self._source.as_retriever(**self._options)
        searches_vectors = (
            isinstance(retriever, VectorIndexRetriever)
            and retriever._vector_store_query_mode == VectorStoreQueryMode.DEFAULT
        )
        if allowed is not None and not searches_vectors:
            raise ConfigError(
                f"{type(retriever).__name__} cannot be restricted to allowed documents, because its scores and ranks "
                "depend on the others as well; build on a VectorStoreIndex in the default query mode, or use a "
                "retriever of mac_rag"
            )
        adjustable = hasattr(retriever, "similarity_top_k")
        limit = k
        while True:
            if adjustable:
                retriever.similarity_top_k = limit
            nodes = retriever.retrieve(QueryBundle(question))
            hits = self._documents_of(nodes, allowed)
            if searches_vectors:
                hits.sort(key=lambda hit: (-hit.score, hit.document_id))
            # Nodes beyond the limit may have the same score as the last one.
            enough = len(hits) >= k and not (searches_vectors and hits[k - 1].score <= (nodes[-1].score or 0.0))
            if enough or not adjustable or len(nodes) < limit:
                return hits[:k]
            limit *= 4

    def _documents_of(self, nodes: Sequence[NodeWithScore], allowed: Container[str] | None) -> list[Hit]:
        """One hit for each allowed document, from its best node, in the order of the documents' first nodes.

        Raises:
            DocumentError: for a score that is NaN.
        """
        hits: dict[str, Hit] = {}
        for scored in nodes:
            name = document_id(scored.node)
            if allowed is not None and name not in allowed:
                continue
            score = scored.score or 0.0
            if math.isnan(score):
                raise DocumentError(
                    f"a node of document {name!r} has NaN as its score, so it cannot be ranked; check the embedding "
                    "model and the embeddings in the index"
                )
            hit = Hit(name, scored.node.get_content(metadata_mode=MetadataMode.NONE), score, scored.node.metadata)
            first = hits.setdefault(name, hit)
            if score == first.score and hit.text < first.text:  # an order that does not depend on other documents
                hits[name] = hit
        return list(hits.values())
