"""Any retriever of `mac_rag`, or a memory bank, as a LlamaIndex retriever.

`mac_rag.retrieval.llama_index` does the reverse.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode, NodeRelationship, NodeWithScore, QueryBundle, TextNode
from llama_index.core.storage.docstore import BaseDocumentStore
from llama_index.core.vector_stores.types import MetadataFilter, MetadataFilters

from mac_rag.bank.interface import BankContents
from mac_rag.data.characters import shown_id
from mac_rag.data.dates import AsOf
from mac_rag.data.provenance import Member
from mac_rag.data.types import Source
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, ConfigError
from mac_rag.integrations.framework import in_thread, warn_of_empty_bank
from mac_rag.retrieval.base import Retriever, check_k

logger = logging.getLogger(__name__)


class MACRetriever(BaseRetriever):
    """Any retriever of `mac_rag`, or the memory of an engine, as a LlamaIndex retriever.

    Each node is a whole document: node id, source id and metadata are the document's. An engine's memory ranks
    documents by the attention that the question pays to each, which is the node's score; the scores of all documents
    sum to 1. The texts come from the bank if it keeps texts, or from `source`, whose nodes are returned unchanged.

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
        >>> from mac_rag.bank import MemoryBank
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
        source: index or docstore that holds the texts of an engine's documents; None if the engine's bank keeps them.
        as_of: the moment of the question, for an engine: later documents are not found, and have no influence.
        callback_manager: LlamaIndex's callback manager.

    Raises:
        ConfigError: if `similarity_top_k` is below 1; for an engine whose bank keeps no texts, without a source; for
            `source` or `as_of` without an engine.
    """

    def __init__(
        self,
        retriever: Retriever | MACEngine,
        *,
        similarity_top_k: int = 5,
        allowed: Container[str] | None = None,
        source: BaseIndex[Any] | BaseDocumentStore | None = None,
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
            raise ConfigError("source and as_of are for an engine, and this is a retriever; leave them out")
        self._source = source
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
        """The documents with the most attention. An empty bank has none; a warning says so once."""
        if not len(engine.snapshot):
            warn_of_empty_bank("MACRetriever finds nothing", engine.snapshot)
            return []
        sources = engine.sources(question, most=self.similarity_top_k, allowed=self.allowed, as_of=self.as_of)
        return [scored for source in sources for scored in source_nodes(source, self._source)]


def nodes_of(document_id: str, source: BaseIndex[Any] | BaseDocumentStore) -> list[BaseNode]:
    """The nodes of a document, in their order; logs a warning if there are none.

    Args:
        document_id: id of the document in the bank.
        source: a docstore, or an index with a docstore or with a vector store that stores texts.

    Raises:
        ConfigError: for an index without a docstore whose vector store cannot return nodes.
    """
    if isinstance(source, BaseDocumentStore):
        nodes = _in_docstore(document_id, source)
    else:
        nodes = _in_docstore(document_id, source.docstore)
        store = getattr(source, "vector_store", None)
        if not nodes and store is not None and store.stores_text:
            nodes = _in_vector_store(document_id, store)
    if not nodes:
        logger.warning(
            "document %r is in the memory bank, but %s has no nodes of it", document_id, type(source).__name__
        )
    return nodes


def source_nodes(source: Source, documents: BaseIndex[Any] | BaseDocumentStore | None) -> list[NodeWithScore]:
    """The nodes of a document that an answer rests on, with its share of the attention as their score.

    Args:
        source: the document.
        documents: docstore or index in which its nodes are found; None for none.

    Returns:
        Its nodes. If there are none: one node with the text that the bank keeps, or nothing if it keeps none.

    Raises:
        ConfigError: as `nodes_of`.
    """
    nodes = [] if documents is None else nodes_of(source.document_id, documents)
    if not nodes and source.text is not None:
        nodes = [document_node(source.document_id, source.text, source.metadata)]
    return [NodeWithScore(node=node, score=source.share) for node in nodes]


def document_node(document_id: str, text: str, metadata: Mapping[str, Any]) -> TextNode:
    """A whole document as a node, which is its own source."""
    node = TextNode(id_=document_id, text=text, metadata=dict(metadata))
    node.relationships[NodeRelationship.SOURCE] = node.as_related_node_info()
    return node


def _in_docstore(document_id: str, docstore: BaseDocumentStore) -> list[BaseNode]:
    info = docstore.get_ref_doc_info(document_id)
    ids = [document_id] if info is None else info.node_ids
    nodes = [docstore.get_document(name, raise_error=False) for name in ids]
    return [node for node in nodes if node is not None]


def _in_vector_store(document_id: str, store: Any) -> list[BaseNode]:
    try:
        by_source = MetadataFilters(filters=[MetadataFilter(key="ref_doc_id", value=document_id)])
        return list(store.get_nodes(node_ids=None, filters=by_source))
    except NotImplementedError:
        raise ConfigError(
            f"{type(store).__name__} cannot return the nodes of a document, and the index has no docstore; build the "
            "index with store_nodes_override=True"
        ) from None


def kept_text(bank: BankContents, document_id: str) -> tuple[Member, str]:
    """A document of a bank that keeps texts, and its text.

    Raises:
        BankError: if the bank has lost the text, or does not hold the document.
    """
    entry = bank[document_id]
    place = entry.place(document_id)
    text = entry.texts[place]
    if text is None:
        raise BankError(
            f"the bank has lost the text of {shown_id(document_id)}; adapt to the document again, or restore a backup"
        )
    return entry.members[place], text
