"""MemoryRetriever: the documents that a question attends to, as a LlamaIndex retriever without any index of its own."""

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
from mac_rag.integrations.llama_index.lookup import source_nodes
from mac_rag.integrations.llama_index.threads import in_thread
from mac_rag.retrieval.base import check_k
from mac_rag.retrieval.llama_index import FiledBy


class MemoryRetriever(BaseRetriever):
    """Retrieves the documents that a question attends to most, with their shares of the attention as scores.

    No embedding and no index is asked: the memory ranks by itself. The nodes of a document are those in `source`, or
    else one with the text that the bank keeps. While the bank is empty, nothing is found.

    Examples:
        >>> from mac_rag import Document, MACModel, MemoryBank
        >>> model = MACModel.from_pretrained("mac-tiny")
        >>> engine = MACEngine(model, MemoryBank(model.fingerprint, keep_texts=True))
        >>> texts = {"press": "Rainga Press employs 180 people.", "match": "Irene Searkwell struck the first goal."}
        >>> report = engine.adapt([Document(name, text) for name, text in texts.items()])
        >>> retriever = MemoryRetriever(engine, similarity_top_k=1)
        >>> [scored.text for scored in retriever.retrieve("How many workers does Rainga Press have?")]
        ['Rainga Press employs 180 people.']

    Args:
        engine: an engine whose bank was written by `MemoryWriter` or `engine.adapt`.
        source: index or docstore in which nodes are found by the id of their document; None for the bank's own texts.
        similarity_top_k: number of documents per question; one may have several nodes in `source`.
        filed_by: which document of the bank a node belongs to, as set in the `MemoryWriter`; see `document_id`.
        allowed: ids of the documents that may be found, evaluated for every question; None for all.
        as_of: the moment of the question: later documents are not found and have no influence; None for all dates.
        callback_manager: LlamaIndex's callback manager.

    Raises:
        ConfigError: when `similarity_top_k` is below 1; without a source, for a bank that keeps no texts.
    """

    def __init__(
        self,
        engine: MACEngine,
        source: BaseIndex[Any] | BaseDocumentStore | None = None,
        *,
        similarity_top_k: int = 5,
        filed_by: FiledBy = "source",
        allowed: Container[str] | None = None,
        as_of: AsOf = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        super().__init__(callback_manager=callback_manager)
        check_k(similarity_top_k)
        if source is None and not engine.snapshot.keep_texts:
            raise ConfigError(
                "MemoryRetriever returns texts, but the bank keeps none; give source=index, or make the bank with "
                "keep_texts=True"
            )
        self.engine = engine
        self.source = source
        self.similarity_top_k = similarity_top_k
        self.filed_by: FiledBy = filed_by
        self.allowed = allowed
        self.as_of = as_of

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        if not len(self.engine.snapshot):
            return []
        found = self.engine.sources(
            query_bundle.query_str, most=self.similarity_top_k, allowed=self.allowed, as_of=self.as_of
        )
        return [scored for document in found for scored in source_nodes(document, self.source, self.filed_by)]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await in_thread(self._retrieve, query_bundle)
