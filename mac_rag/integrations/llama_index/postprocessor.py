"""What the memory bank's attention says about retrieved nodes, and about those that the retriever missed."""

from __future__ import annotations

from collections.abc import Sequence
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
from mac_rag.integrations.llama_index.filters import FilteringComponent
from mac_rag.integrations.llama_index.lookup import nodes_of
from mac_rag.retrieval.hybrid import RANK_OFFSET
from mac_rag.retrieval.llama_index import FiledBy, document_id

# Metadata keys that neither the LLM nor an embedding is shown.
ATTENTION = "mac_attention"  # the share of the question's attention that goes to the node's document
IN_MEMORY = "mac_in_memory"  # False on a node whose document the bank does not hold
FOUND_BY = "mac_found_by"  # "memory" on a node that the retriever missed

dispatcher = get_dispatcher(__name__)


class MACNodePostprocessor(FilteringComponent, BaseNodePostprocessor):
    """Tells nodes by the attention mass that the question pays to their documents in the bank.

    The masses of all documents in the bank sum to 1. Each node comes back as a copy that carries its document's mass
    in the metadata `mac_attention`; one whose document is not in the bank carries `mac_in_memory: False` instead.
    Neither the LLM nor an embedding is shown these keys. Nodes of one document share its mass. The modes:

    - `rerank` orders nodes by reciprocal-rank fusion. A node's score becomes `memory_weight / (60 + rank by mass) +
      (1 - memory_weight) / (60 + rank by the retriever)`; equals share a rank, and keep their order. Memory gives
      nothing to a node that it does not hold, and the retriever nothing to one that it missed. The retriever ranks by
      its scores where all nodes have one, else by the order of the nodes. With `memory_weight=1` the retriever counts
      for nothing.
    - `annotate` leaves order and scores as they are.
    - `expand` adds the nodes of those among the `expand_to` documents with the most attention that are not there yet,
      behind all others and by falling mass, which is their score. They carry `mac_found_by: "memory"`. To rerank them
      as well, put a postprocessor of that mode behind this one.

    Calls from several threads are safe.

    Args:
        engine: the one whose bank was written by `MemoryWriter` or `engine.adapt`.
        mode: see above.
        top_n: keeps only the first; None keeps all.
        memory_weight: from 0, the retriever alone, to 1, memory alone.
        expand_to: see above.
        source: where `expand` finds nodes by the id of their document: an index, or a docstore.
        filed_by: which bank document a node belongs to, as set in the `MemoryWriter`; see `document_id`.
        filters: which documents may have any influence through the bank; give the same to the retriever.
        callback_manager: LlamaIndex's.

    Raises:
        ConfigError: for `expand` without a source, or a source without `expand`.
    """

    mode: Literal["rerank", "annotate", "expand"] = "rerank"
    top_n: int | None = Field(default=None, ge=1)
    memory_weight: float = Field(default=0.5, ge=0, le=1)
    expand_to: int = Field(default=3, ge=1)
    filed_by: FiledBy = "source"
    _source: BaseIndex[Any] | BaseDocumentStore | None = PrivateAttr()

    def __init__(
        self,
        engine: MACEngine,
        *,
        mode: Literal["rerank", "annotate", "expand"] = "rerank",
        top_n: int | None = None,
        memory_weight: float = 0.5,
        expand_to: int = 3,
        source: BaseIndex[Any] | BaseDocumentStore | None = None,
        filed_by: FiledBy = "source",
        filters: MetadataFilters | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        super().__init__(
            mode=mode,
            top_n=top_n,
            memory_weight=memory_weight,
            expand_to=expand_to,
            filed_by=filed_by,
            filters=filters,
            callback_manager=callback_manager or CallbackManager([]),
        )
        if (mode == "expand") != (source is not None):
            raise ConfigError(
                f"mode {mode!r} {'needs a' if source is None else 'takes no'} source; give source=index with "
                "mode='expand', which finds nodes there, and with no other mode"
            )
        self._engine = engine
        self._source = source

    @classmethod
    def class_name(cls) -> str:
        return "MACNodePostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        """See the class.

        Raises:
            MACError: without a question.
            BankError: when the bank is empty.
            FingerprintError: when another model wrote the bank.
            ConfigError: for a source in which nodes cannot be found.
        """
        if query_bundle is None:
            raise MACError("MACNodePostprocessor scores nodes by the question: pass query_bundle or query_str")
        if not nodes and self.mode != "expand":
            return []
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
            marked = [self._marked(scored, masses) for scored in nodes]
            if self.mode == "rerank":
                marked = self._fused(marked)
            elif self.mode == "expand":
                marked += self._missed(marked, masses)
            kept = marked[: self.top_n]
            event.on_end(payload={EventPayload.NODES: kept})
        dispatcher.event(ReRankEndEvent(nodes=kept))
        return kept

    def _masses(self, question: str) -> dict[str, float]:
        """The attention mass of each document that may have influence; none where the filters let nothing pass."""
        allowed = self.allowed
        if allowed is not None and not len(allowed):
            return {}
        ids, mass = self.engine.document_attention([question], allowed)
        return {name: share for name, share in zip(ids, mass[0].tolist()) if allowed is None or name in allowed}

    def _marked(self, scored: NodeWithScore, masses: dict[str, float]) -> NodeWithScore:
        mass = masses.get(document_id(scored.node, self.filed_by))
        marks = {IN_MEMORY: False} if mass is None else {ATTENTION: mass}
        return NodeWithScore(node=_with_metadata(scored.node, marks), score=scored.score)

    def _fused(self, nodes: list[NodeWithScore]) -> list[NodeWithScore]:
        masses = [scored.node.metadata.get(ATTENTION) for scored in nodes]
        by_order = any(scored.score is None for scored in nodes)
        found = [
            None if scored.node.metadata.get(FOUND_BY) else -place if by_order else scored.score
            for place, scored in enumerate(nodes)
        ]
        fused = [
            NodeWithScore(
                node=scored.node,
                score=self.memory_weight * by_memory + (1 - self.memory_weight) * by_retriever,
            )
            for scored, by_memory, by_retriever in zip(nodes, _reciprocal_ranks(masses), _reciprocal_ranks(found))
        ]
        return sorted(fused, key=NodeWithScore.get_score, reverse=True)

    def _missed(self, nodes: list[NodeWithScore], masses: dict[str, float]) -> list[NodeWithScore]:
        assert self._source is not None
        there = {document_id(scored.node, self.filed_by) for scored in nodes}
        most = sorted(masses, key=masses.__getitem__, reverse=True)[: self.expand_to]
        return [
            NodeWithScore(node=_with_metadata(node, {ATTENTION: masses[name], FOUND_BY: "memory"}), score=masses[name])
            for name in most
            if name not in there
            for node in nodes_of(name, self._source, self.filed_by)
        ]


def _reciprocal_ranks(values: Sequence[float | None]) -> list[float]:
    """`1 / (60 + rank)` by falling value; equals share the better rank, and None has no rank and gives 0."""
    ranks: dict[float, int] = {}
    for rank, value in enumerate(sorted((value for value in values if value is not None), reverse=True), 1):
        ranks.setdefault(value, rank)
    return [0.0 if value is None else 1 / (RANK_OFFSET + ranks[value]) for value in values]


def _with_metadata(node: BaseNode, marks: dict[str, Any]) -> BaseNode:
    """A copy of the node with more metadata, which is shown to users only."""
    return node.model_copy(
        update={
            "metadata": {**node.metadata, **marks},
            "excluded_llm_metadata_keys": [*node.excluded_llm_metadata_keys, *marks],
            "excluded_embed_metadata_keys": [*node.excluded_embed_metadata_keys, *marks],
        }
    )
