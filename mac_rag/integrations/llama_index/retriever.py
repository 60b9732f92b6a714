"""Any retriever of `mac_rag`, or a memory bank, as a LlamaIndex retriever.

`mac_rag.retrieval.llama_index` does the reverse.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.storage.docstore import BaseDocumentStore

from mac_rag.data.dates import AsOf
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError
from mac_rag.integrations.framework import in_thread
from mac_rag.integrations.llama_index.lookup import document_node, source_nodes
from mac_rag.retrieval.base import Retriever, check_k
from mac_rag.retrieval.llama_index import FiledBy


class MACRetriever(BaseRetriever):
    """Any retriever of `mac_rag`, or the memory of an engine, as a LlamaIndex retriever.

    Each node is a whole document: node id, source id and metadata are the document's. An engine's memory ranks
    documents by the attention that the question pays to each, which is the node's score; the scores of all documents
    sum to 1. Their texts are those that the bank keeps, or come from `source`, whose nodes are returned as they are.

    Examples:
        >>> from mac_rag import Document
        >>> from mac_rag.retrieval import BM25Retriever
        >>> retriever = BM25Retriever()
        >>> documents = [Document("bridge", "Anna Berg opened the bridge."), Document("river", "A ferry on the river.")]
        >>> retriever.add(documents)
        >>> nodes = MACRetriever(retriever, similarity_top_k=1).retrieve("Who opened the bridge?")
        >>> [(scored.node.node_id, scored.text) for scored in nodes]
        [('bridge', 'Anna Berg opened the bridge.')]

        >>> from mac_rag.engine import MACEngine
        >>> from mac_rag.memory import MemoryBank
        >>> from mac_rag.model import MACModel
        >>> model = MACModel.from_pretrained("mac-tiny")
        >>> engine = MACEngine(model, MemoryBank(model.fingerprint, keep_texts=True))
        >>> report = engine.adapt([Document("storm", "A storm has hit Wunville."), Document("press", "Rainga prints.")])
        >>> [node.node_id for node in MACRetriever(engine, similarity_top_k=1).retrieve("Where did the storm hit?")]
        ['storm']

    Args:
        retriever: the retriever, or an engine whose memory ranks documents; an engine's own retriever keeps following
            the engine.
        similarity_top_k: number of nodes per question.
        allowed: ids of the documents that may be found, evaluated for every question; None for all.
        source: index or docstore that holds the texts of an engine's documents; None where its bank keeps them.
        as_of: with an engine, the moment of the question: later documents are not found, and have no influence.
        filed_by: with a source, which document of the bank a node belongs to, as set in the `MemoryWriter`.
        callback_manager: LlamaIndex's callback manager.

    Raises:
        ConfigError: when `similarity_top_k` is below 1; for an engine whose bank keeps no texts, without a source; and
            for a source or a moment without an engine.
    """

    def __init__(
        self,
        retriever: Retriever | MACEngine,
        *,
        similarity_top_k: int = 5,
        allowed: Container[str] | None = None,
        source: BaseIndex[Any] | BaseDocumentStore | None = None,
        filed_by: FiledBy = "source",
        as_of: AsOf = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        super().__init__(callback_manager=callback_manager)
        check_k(similarity_top_k)
        if isinstance(retriever, MACEngine):
            if source is None and not retriever.bank.keep_texts:
                raise ConfigError(
                    "the engine's bank keeps no texts to retrieve; give source=index, or an engine with "
                    "MemoryBank(model.fingerprint, keep_texts=True)"
                )
        elif source is not None or as_of is not None:
            raise ConfigError("source and as_of are of a memory bank, and this is a retriever; leave them out")
        self._source = source
        self._filed_by = filed_by
        self.as_of = as_of
        self.retriever = retriever
        self.similarity_top_k = similarity_top_k
        self.allowed = allowed

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        if isinstance(self.retriever, MACEngine):
            return self._remembered(self.retriever, query_bundle.query_str)
        [hits] = self.retriever.retrieve([query_bundle.query_str], self.similarity_top_k, allowed=self.allowed)
        return [
            NodeWithScore(node=document_node(hit.document_id, hit.text, hit.metadata), score=hit.score) for hit in hits
        ]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await in_thread(self._retrieve, query_bundle)

    def _remembered(self, engine: MACEngine, question: str) -> list[NodeWithScore]:
        """The documents with the most attention; none from an empty bank."""
        if not len(engine.snapshot):
            return []
        found = engine.sources(question, most=self.similarity_top_k, allowed=self.allowed, as_of=self.as_of)
        return [scored for document in found for scored in source_nodes(document, self._source, self._filed_by)]
