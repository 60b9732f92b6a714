"""A node postprocessor that reranks, annotates or expands retrieved nodes by the attention of the memory bank."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.callbacks import CallbackManager, CBEventType, EventPayload
from llama_index.core.indices.base import BaseIndex
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle
from llama_index.core.storage.docstore import BaseDocumentStore
from llama_index.core.vector_stores.types import MetadataFilters
from llama_index_instrumentation import get_dispatcher

from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError, MACError
from mac_rag.integrations.framework import ATTENTION, first_time, in_thread, warn_of_empty_bank
from mac_rag.integrations.llama_index.component import FilteringComponent
from mac_rag.integrations.llama_index.retriever import nodes_of
from mac_rag.retrieval.hybrid import RANK_OFFSET
from mac_rag.retrieval.llama_index import document_id

# Metadata keys that are hidden from LLMs and embeddings, as is ATTENTION.
IN_MEMORY = "mac_in_memory"  # False if the bank does not hold the node's document
FOUND_BY = "mac_found_by"  # "memory" on a node that the retriever missed

dispatcher = get_dispatcher(__name__)
logger = logging.getLogger(__name__)


class MACNodePostprocessor(FilteringComponent, BaseNodePostprocessor):
    """Scores nodes by the attention mass of the question on their documents in the bank.

    The masses of all documents in the bank sum to 1. Each node is returned as a copy with the mass of its document in
    the metadata `mac_attention`, or with `mac_in_memory: False` if the bank does not hold the document. These keys are
    hidden from LLMs and embeddings. Nodes of one document have the same mass. The modes:

    - `rerank` orders nodes by reciprocal-rank fusion: the score of a node becomes `fusion_weight / (60 + rank by mass)
      + (1 - fusion_weight) / (60 + rank by the retriever)`. Equal nodes share a rank and keep their order. A node that
      is not in the bank gets no first term, and a node that the retriever missed gets no second term. The retriever's
      ranks follow its scores if all nodes have one, otherwise the order of the nodes.
    - `annotate` keeps order and scores.
    - `expand` takes the `expand_to` documents with the most attention and appends the nodes of those that the
      retriever missed, by descending mass, which is their score. These nodes have `mac_found_by: "memory"`. To rerank
      them as well, put a postprocessor with mode `rerank` after this one.

    If the bank is empty, the first `top_n` nodes pass unchanged, and a warning is logged once.

    Thread-safe.

    Examples:
        >>> from llama_index.core.schema import TextNode
        >>> from mac_rag import Document
        >>> engine = MACEngine("mac-tiny")
        >>> texts = {"press": "Rainga Press employs 180 people.", "match": "Irene Searkwell struck the first goal."}
        >>> report = engine.adapt([Document(name, text) for name, text in texts.items()])
        >>> nodes = [NodeWithScore(node=TextNode(id_=name, text=text)) for name, text in texts.items()]
        >>> memory = MACNodePostprocessor(engine, fusion_weight=0.9)
        >>> reranked = memory.postprocess_nodes(nodes, query_str="Who struck the opening goal?")
        >>> [scored.node.node_id for scored in reranked]
        ['match', 'press']

    Args:
        engine: an engine whose bank was written by `MemoryWriter` or `engine.adapt`.
        mode: `rerank`, `annotate` or `expand`; see above.
        top_n: number of nodes to return; None for all.
        fusion_weight: weight of memory in `rerank`, from 0 (retriever only) to 1 (memory only).
        expand_to: number of documents in `expand`, at least 1.
        source: index or docstore in which `expand` finds nodes by the id of their document.
        filters: filters for the documents that may have any influence through the bank; give the retriever the same
            filters.
        as_of: the moment of the question, as `MACEngine.answer` takes it: later documents of the bank have no
            influence, and are treated as not in the bank.
        callback_manager: LlamaIndex's callback manager.

    Raises:
        ConfigError: for `expand` without a source, and for a source in another mode.
    """

    mode: Literal["rerank", "annotate", "expand"] = "rerank"
    top_n: int | None = Field(default=None, ge=1)
    fusion_weight: float = Field(default=0.5, ge=0, le=1)
    expand_to: int = Field(default=3, ge=1)
    _source: BaseIndex[Any] | BaseDocumentStore | None = PrivateAttr()

    def __init__(
        self,
        engine: MACEngine,
        *,
        mode: Literal["rerank", "annotate", "expand"] = "rerank",
        top_n: int | None = None,
        fusion_weight: float = 0.5,
        expand_to: int = 3,
        source: BaseIndex[Any] | BaseDocumentStore | None = None,
        filters: MetadataFilters | None = None,
        as_of: str | datetime | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        super().__init__(
            mode=mode,
            top_n=top_n,
            fusion_weight=fusion_weight,
            expand_to=expand_to,
            filters=filters,
            as_of=as_of,
            callback_manager=callback_manager or CallbackManager([]),
        )
        if (mode == "expand") != (source is not None):
            raise ConfigError(
                f"mode {mode!r} {'needs a' if source is None else 'takes no'} source; give source=index with "
                "mode='expand' (which finds nodes there), and leave it out with any other mode"
            )
        self._engine = engine
        self._source = source

    @classmethod
    def class_name(cls) -> str:
        return "MACNodePostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        """Processes nodes as described for the class.

        Raises:
            MACError: if there is no question.
            FingerprintError: if another model wrote the bank.
            ConfigError: for a source in which nodes cannot be found.
        """
        if query_bundle is None:
            raise MACError("MACNodePostprocessor scores nodes by the question: pass query_bundle or query_str")
        if not nodes and self.mode != "expand":
            return []
        bank = self.engine.snapshot
        bank.check_model(self.engine.model.fingerprint)
        if not len(bank):
            warn_of_empty_bank("MACNodePostprocessor passes nodes on as they are", bank)
            return nodes[: self.top_n]
        is_foreign = nodes and not any(document_id(scored.node) in bank for scored in nodes)
        if is_foreign and first_time("foreign nodes"):
            logger.warning(
                "the memory bank holds none of the %d nodes that were retrieved; add their documents by "
                "MemoryWriter.from_index(index, engine) (shown once)",
                len(nodes),
            )
        model_name = self.class_name()
        dispatcher.event(
            ReRankStartEvent(query=query_bundle, nodes=nodes, top_n=self.top_n or len(nodes), model_name=model_name)
        )
        payload: dict[str, Any] = {
            EventPayload.NODES: nodes,
            EventPayload.MODEL_NAME: model_name,
            EventPayload.QUERY_STR: query_bundle.query_str,
            EventPayload.TOP_K: self.top_n,
        }
        with self.callback_manager.event(CBEventType.RERANKING, payload=payload) as event:
            masses = self._masses(query_bundle.query_str)
            annotated = [self._annotated(scored, masses) for scored in nodes]
            if self.mode == "rerank":
                annotated = self._fused(annotated)
            elif self.mode == "expand":
                annotated += self._missed(annotated, masses)
            result = annotated[: self.top_n]
            event.on_end(payload={EventPayload.NODES: result})
        dispatcher.event(ReRankEndEvent(nodes=result))
        return result

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        """As `_postprocess_nodes`, without blocking the event loop."""
        return await in_thread(self._postprocess_nodes, nodes, query_bundle)

    def _masses(self, question: str) -> dict[str, float]:
        """Document id -> attention mass, for the documents that pass the filters and count at `as_of`."""
        if not self.remembers:
            return {}
        ids, mass = self.engine.document_attention([question], self.allowed, as_of=self.as_of)
        return dict(zip(ids, mass[0].tolist()))

    def _annotated(self, scored: NodeWithScore, masses: dict[str, float]) -> NodeWithScore:
        """A copy of a node with the mass of its document in its metadata."""
        mass = masses.get(document_id(scored.node))
        metadata = {IN_MEMORY: False} if mass is None else {ATTENTION: mass}
        return NodeWithScore(node=_with_metadata(scored.node, metadata), score=scored.score)

    def _fused(self, nodes: list[NodeWithScore]) -> list[NodeWithScore]:
        """Annotated nodes in the order of reciprocal-rank fusion."""
        masses = [scored.node.metadata.get(ATTENTION) for scored in nodes]
        by_order = any(scored.score is None for scored in nodes)
        relevance = [
            None if scored.node.metadata.get(FOUND_BY) else -position if by_order else scored.score
            for position, scored in enumerate(nodes)
        ]
        fused = [
            NodeWithScore(
                node=scored.node,
                score=self.fusion_weight * by_memory + (1 - self.fusion_weight) * by_retriever,
            )
            for scored, by_memory, by_retriever in zip(nodes, _reciprocal_ranks(masses), _reciprocal_ranks(relevance))
        ]
        return sorted(fused, key=NodeWithScore.get_score, reverse=True)

    def _missed(self, nodes: list[NodeWithScore], masses: dict[str, float]) -> list[NodeWithScore]:
        """Nodes of the documents with the most attention that are not among `nodes`."""
        assert self._source is not None
        present = {document_id(scored.node) for scored in nodes}
        most = sorted(masses, key=masses.__getitem__, reverse=True)[: self.expand_to]
        return [
            NodeWithScore(node=_with_metadata(node, {ATTENTION: masses[name], FOUND_BY: "memory"}), score=masses[name])
            for name in most
            if name not in present
            for node in nodes_of(name, self._source)
        ]


def _reciprocal_ranks(values: Sequence[float | None]) -> list[float]:
    """`1 / (60 + rank)` by descending value; equal values share the better rank, and None gives 0."""
    ranks: dict[float, int] = {}
    for rank, value in enumerate(sorted((value for value in values if value is not None), reverse=True), 1):
        ranks.setdefault(value, rank)
    return [0.0 if value is None else 1 / (RANK_OFFSET + ranks[value]) for value in values]


def _with_metadata(node: BaseNode, metadata: dict[str, Any]) -> BaseNode:
    """A copy of the node with more metadata, hidden from LLMs and embeddings."""
    return node.model_copy(
        update={
            "metadata": {**node.metadata, **metadata},
            "excluded_llm_metadata_keys": [*node.excluded_llm_metadata_keys, *metadata],
            "excluded_embed_metadata_keys": [*node.excluded_embed_metadata_keys, *metadata],
        }
    )
