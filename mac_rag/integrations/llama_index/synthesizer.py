"""MACSynthesizer: all nodes in one prompt, each as a separate document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks import CallbackManager, CBEventType, EventPayload
from llama_index.core.indices.base import BaseIndex
from llama_index.core.instrumentation.events.synthesis import SynthesizeEndEvent, SynthesizeStartEvent
from llama_index.core.llms import LLM
from llama_index.core.prompts import PromptTemplate, PromptType
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, QueryBundle, QueryType
from llama_index.core.settings import Settings
from llama_index.core.storage.docstore import BaseDocumentStore
from llama_index.core.types import RESPONSE_TEXT_TYPE
from llama_index_instrumentation import get_dispatcher

from mac_rag.data.types import Answer, Source
from mac_rag.errors import ConfigError
from mac_rag.integrations.framework import SOURCES, TRUNCATED, in_thread
from mac_rag.integrations.llama_index.llm import MACLLM, noting, raw_of
from mac_rag.integrations.llama_index.retriever import source_nodes
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.sources import source_record

# Only the slots of this template are read; see `read_slots`.
_SLOTS = PromptTemplate("{context_str}\n{query_str}", prompt_type=PromptType.QUESTION_ANSWER)

dispatcher = get_dispatcher(__name__)


@dataclass
class _Synthesis:
    """A synthesis in progress. `from_memory`: True if there were no nodes, and memory alone answers."""

    question: str
    texts: list[str]
    source_nodes: list[NodeWithScore]
    from_memory: bool
    prompt: FittedPrompt | None = None
    answers: list[Answer] = field(default_factory=list)
    response: RESPONSE_TYPE | None = None


class MACSynthesizer(BaseSynthesizer):
    """Answers from all nodes at once, as the model was trained to: `LM(d1 + ... + dk + x; phi*)` in one pass.

    Other synthesizers join the nodes to one text, or ask about one node after the other. Here each node is a separate
    document `d`, in the order of the nodes, with the metadata that the `MACLLM` reads. If the nodes exceed the window,
    the last ones are truncated or left out (see `MACLLM.fit_to_window`), and the response has the metadata
    `mac_truncated: True` (False otherwise). Its source nodes are not truncated. Without nodes, it answers from memory
    alone; if there is no memory either, it does what LlamaIndex's own synthesizers do.

    The source nodes of an answer from memory alone are those of the documents that it rests on, with their shares of
    the attention as scores: the nodes in `source`, or else one node with the text that the bank keeps. The metadata
    `mac_sources` holds the ids, dates and sentences of these documents, also of those whose text is not available. If
    the engine's `attention` does not tell single documents apart, there are no source nodes.

        index.as_query_engine(llm=llm, response_synthesizer=MACSynthesizer(llm))

    If the LLM has a `min_confidence`, the metadata also hold `mac_confidence` and `mac_guess`.

    Examples:
        >>> from llama_index.core.schema import TextNode
        >>> texts = ["Rainga Press employs 180 people.", "A storm has hit Wunville."]
        >>> nodes = [NodeWithScore(node=TextNode(text=text)) for text in texts]
        >>> synthesizer = MACSynthesizer(MACLLM("mac-tiny"))
        >>> response = synthesizer.synthesize("How many workers does Rainga Press have?", nodes)
        >>> response.response, response.metadata["mac_truncated"], len(response.source_nodes)
        ('180', False, 2)

    Args:
        llm: the `MACLLM` that answers; None for `Settings.llm`.
        streaming: True to yield the answer piece by piece.
        sources: most documents that an answer from memory alone names; 0 for none, which saves a pass over the bank.
        source: index or docstore in which nodes are found by the id of their document; None for none.
        callback_manager: LlamaIndex's callback manager.

    Raises:
        ConfigError: if the LLM is no `MACLLM`.
    """

    def __init__(
        self,
        llm: LLM | None = None,
        *,
        streaming: bool = False,
        sources: int = 3,
        source: BaseIndex[Any] | BaseDocumentStore | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        llm = llm or Settings.llm
        if not isinstance(llm, MACLLM):
            raise ConfigError(
                f"MACSynthesizer answers with a MACLLM, not with {type(llm).__name__}; "
                "give it llm=MACLLM(...), or choose a response_mode for the other LLM"
            )
        super().__init__(llm=llm, streaming=streaming, callback_manager=callback_manager)
        self._most_sources = sources
        self._source = source

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        """Does nothing: the wording of a prompt is part of the model."""

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """Answers a question from texts, each a separate document.

        Raises:
            BankError, DocumentError, FingerprintError: as `MACLLM.complete`, but not for documents that exceed the
                window.
        """
        return self._answer(self._mac.fit_to_window(query_str, text_chunks))

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """As `get_response`, without blocking the event loop."""
        return await self._aanswer(await in_thread(self._mac.fit_to_window, query_str, text_chunks))

    @dispatcher.span
    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answers a question from nodes.

        Raises:
            BankError, DocumentError, FingerprintError: as `get_response`.
        """
        if self._is_empty(nodes):
            return super().synthesize(query, nodes, additional_source_nodes, **response_kwargs)
        with self._synthesis(query, nodes, additional_source_nodes) as work:
            work.prompt = self._mac.fit_to_window(work.question, work.texts)
            with noting() as work.answers:
                answer = self._answer(work.prompt)
            return self._respond(work, answer, self._sources(work, answer))

    @dispatcher.span
    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """As `synthesize`, without blocking the event loop."""
        if self._is_empty(nodes):
            return await super().asynthesize(query, nodes, additional_source_nodes, **response_kwargs)
        with self._synthesis(query, nodes, additional_source_nodes) as work:
            work.prompt = await in_thread(self._mac.fit_to_window, work.question, work.texts)
            with noting() as work.answers:
                answer = await self._aanswer(work.prompt)
            return self._respond(work, answer, await in_thread(self._sources, work, answer))

    def _is_empty(self, nodes: Sequence[NodeWithScore]) -> bool:
        """True if there are neither nodes nor memory to answer from."""
        llm = self._mac
        return not nodes and not llm.answers_from_memory

    @property
    def _mac(self) -> MACLLM:
        assert isinstance(self._llm, MACLLM)
        return self._llm

    @contextmanager
    def _synthesis(
        self, query: QueryType, nodes: Sequence[NodeWithScore], additional: Sequence[NodeWithScore] | None
    ) -> Iterator[_Synthesis]:
        """Fires the events of a synthesis as LlamaIndex's own synthesizers do; the caller sets the response."""
        dispatcher.event(SynthesizeStartEvent(query=query))
        query = QueryBundle(query) if isinstance(query, str) else query
        payload: dict[str, Any] = {EventPayload.QUERY_STR: query.query_str}
        with self._callback_manager.event(CBEventType.SYNTHESIZE, payload=payload) as event:
            texts = [scored.node.get_content(metadata_mode=self._mac.metadata_mode) for scored in nodes]
            work = _Synthesis(query.query_str, texts, [*nodes, *(additional or ())], from_memory=not nodes)
            yield work
            event.on_end(payload={EventPayload.RESPONSE: work.response})
        dispatcher.event(SynthesizeEndEvent(query=query, response=work.response))

    def _sources(self, work: _Synthesis, answer: RESPONSE_TEXT_TYPE) -> tuple[Source, ...]:
        """The sources of an answer from memory alone; without sentences for a streamed answer."""
        tells_documents_apart = self._mac.engine.attention.strategy != "hierarchical"
        if not (self._most_sources and work.from_memory and tells_documents_apart):
            return ()
        llm = self._mac
        return llm.engine.sources(
            work.question, _said(work, answer), most=self._most_sources, allowed=llm.allowed, as_of=llm.as_of
        )

    def _respond(self, work: _Synthesis, answer: RESPONSE_TEXT_TYPE, sources: Sequence[Source]) -> RESPONSE_TYPE:
        nodes = [scored for source in sources for scored in source_nodes(source, self._source)]
        response = self._prepare_response_output(answer, [*work.source_nodes, *nodes])
        truncated = work.prompt is not None and work.prompt.truncated
        response.metadata = {**(response.metadata or {}), TRUNCATED: truncated}
        for noted in work.answers:
            response.metadata |= {name: value for name, value in (raw_of(noted) or {}).items() if name != SOURCES}
        if sources:
            response.metadata[SOURCES] = [source_record(source, _said(work, answer)) for source in sources]
        work.response = response
        return response

    def _answer(self, prompt: FittedPrompt) -> RESPONSE_TEXT_TYPE:
        ask = self._mac.stream if self._streaming else self._mac.predict
        return ask(_SLOTS, query_str=prompt.question, context_str=prompt)

    async def _aanswer(self, prompt: FittedPrompt) -> RESPONSE_TEXT_TYPE:
        ask = self._mac.astream if self._streaming else self._mac.apredict
        return await ask(_SLOTS, query_str=prompt.question, context_str=prompt)


def _said(work: _Synthesis, answer: RESPONSE_TEXT_TYPE) -> str | None:
    """The LM's own answer; None for a streamed answer."""
    if work.answers:
        return work.answers[0].said
    return answer if isinstance(answer, str) else None
