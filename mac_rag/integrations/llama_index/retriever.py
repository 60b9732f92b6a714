"""Any retriever of `mac_rag` as a LlamaIndex retriever; `mac_rag.retrieval.llama_index` does the reverse."""

from __future__ import annotations

from collections.abc import Container

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import NodeRelationship, NodeWithScore, QueryBundle, TextNode

from mac_rag.integrations.llama_index.threads import in_thread
from mac_rag.retrieval.base import Hit, Retriever, check_k


class MACRetriever(BaseRetriever):
    """Any retriever of `mac_rag` as a LlamaIndex retriever.

    Each node is a whole document: node id, source id and metadata are the document's.

    Examples:
        >>> from mac_rag import Document
        >>> from mac_rag.retrieval import BM25Retriever
        >>> retriever = BM25Retriever()
        >>> documents = [Document("bridge", "Anna Berg opened the bridge."), Document("river", "A ferry on the river.")]
        >>> retriever.add(documents)
        >>> nodes = MACRetriever(retriever, similarity_top_k=1).retrieve("Who opened the bridge?")
        >>> [(scored.node.node_id, scored.text) for scored in nodes]
        [('bridge', 'Anna Berg opened the bridge.')]

    Args:
        retriever: the retriever; an engine's own retriever keeps following the engine.
        similarity_top_k: number of nodes per question.
        allowed: ids of the documents that may be found, evaluated for every question; None for all.
        callback_manager: LlamaIndex's callback manager.

    Raises:
        ConfigError: when `similarity_top_k` is below 1.
    """

    def __init__(
        self,
        retriever: Retriever,
        *,
        similarity_top_k: int = 5,
        allowed: Container[str] | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        super().__init__(callback_manager=callback_manager)
        check_k(similarity_top_k)
        self.retriever = retriever
        self.similarity_top_k = similarity_top_k
        self.allowed = allowed

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        [hits] = self.retriever.retrieve([query_bundle.query_str], self.similarity_top_k, allowed=self.allowed)
        return [NodeWithScore(node=_node(hit), score=hit.score) for hit in hits]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await in_thread(self._retrieve, query_bundle)


def _node(hit: Hit) -> TextNode:
    node = TextNode(id_=hit.document_id, text=hit.text, metadata=dict(hit.metadata))
    node.relationships[NodeRelationship.SOURCE] = node.as_related_node_info()
    return node
