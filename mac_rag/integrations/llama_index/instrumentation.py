"""MAC in LlamaIndex's instrumentation: finds nodes and docstores in spans, and fires events.

LlamaIndex gives an LLM a single text, where each node follows its metadata, and gives a transformation its nodes and
nothing about the pipeline. Its instrumentation knows more: a span begins with the arguments of the call.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple
from uuid import uuid4

from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.llms import LLM
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore
from llama_index.core.storage.docstore import BaseDocumentStore
from llama_index_instrumentation import get_dispatcher, root_dispatcher
from llama_index_instrumentation.base import BaseEvent
from llama_index_instrumentation.span.base import BaseSpan
from llama_index_instrumentation.span_handlers import BaseSpanHandler

from mac_rag.integrations.framework import first_time
from mac_rag.lm.prompt import FittedPrompt

dispatcher = get_dispatcher(__name__)

logger = logging.getLogger(__name__)

_nodes: ContextVar[list[NodeWithScore] | None] = ContextVar("mac_nodes", default=None)
_run: ContextVar[_Run | None] = ContextVar("mac_run", default=None)


class _Run(NamedTuple):
    """A run of an ingestion pipeline.

    Attributes:
        docstore: its docstore; None for none.
        known: the hashes that the docstore knew before.
        documents: digest of the ids of its documents.
    """

    docstore: BaseDocumentStore | None
    known: frozenset[str]
    documents: str

    @classmethod
    def of(cls, pipeline: IngestionPipeline, arguments: Mapping[str, Any]) -> _Run:
        given = (arguments.get("documents"), arguments.get("nodes"), pipeline.documents)
        ids = [node.node_id for nodes in given for node in nodes or ()]
        if pipeline.readers:  # nobody knows yet what they will read
            ids.append(uuid4().hex)
        docstore = pipeline.docstore
        known = frozenset[str]() if docstore is None else frozenset(docstore.get_all_document_hashes())
        return cls(docstore, known, hashlib.sha256(json.dumps(ids).encode()).hexdigest())

    def undo(self) -> None:
        """After a failure: lets the docstore forget what it has noted of documents before they were processed.

        LlamaIndex notes the hashes of documents first if it looks for duplicates, so that the same run again would pass
        over them.
        """
        if self.docstore is None:
            return
        for digest, name in self.docstore.get_all_document_hashes().items():
            if digest not in self.known and not self.docstore.document_exists(name):
                self.docstore.delete_document(name, raise_error=False)


class NodeReader(LLM):
    """An LLM that declares which metadata of a node it reads.

    Attributes:
        metadata_mode: the metadata that stand in front of a node's text in the LM's prompt.
    """

    metadata_mode: MetadataMode = MetadataMode.NONE


class _SpanHandler(BaseSpanHandler[BaseSpan]):
    """Reads the arguments of spans, and keeps no spans."""

    @classmethod
    def class_name(cls) -> str:
        return "MACSpanHandler"

    def new_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        parent_span_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        arguments = bound_args.arguments
        if isinstance(instance, IngestionPipeline):
            _run.set(_Run.of(instance, arguments))
        elif isinstance(instance, BaseSynthesizer) and isinstance(instance._llm, NodeReader):
            if "nodes" in arguments:
                _nodes.set(arguments["nodes"])
            elif "text_chunks" in arguments:
                _show(arguments["text_chunks"], instance._llm.metadata_mode)

    def prepare_to_exit_span(
        self, id_: str, bound_args: inspect.BoundArguments, instance: Any | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if isinstance(instance, IngestionPipeline):
            _run.set(None)

    def prepare_to_drop_span(
        self, id_: str, bound_args: inspect.BoundArguments, instance: Any | None = None, *args: Any, **kwargs: Any
    ) -> None:
        run = _run.get()
        if isinstance(instance, IngestionPipeline) and run is not None:
            run.undo()
            _run.set(None)


def _show(chunks: Any, mode: MetadataMode) -> None:
    """Replaces the texts that `synthesize` made of its nodes, in place, by texts with the metadata of `mode`.

    `synthesize` makes the list of texts only for this call. Texts that are not those of the nodes stay as they are.
    """
    nodes = _nodes.get()
    _nodes.set(None)
    if nodes is None or not isinstance(chunks, list):
        return
    if chunks == [scored.node.get_content(metadata_mode=MetadataMode.LLM) for scored in nodes]:
        chunks[:] = [scored.node.get_content(metadata_mode=mode) for scored in nodes]


_handler = _SpanHandler()


def listen() -> None:
    """Registers the handler for LlamaIndex's spans. A second call changes nothing."""
    if _handler not in root_dispatcher.span_handlers:
        root_dispatcher.add_span_handler(_handler)


def running_docstore() -> BaseDocumentStore | None:
    """The docstore of the ingestion pipeline that is running in this context; None if there is none."""
    run = _run.get()
    return None if run is None else run.docstore


def running_documents() -> str:
    """Digest of the ids of the documents of the ingestion pipeline that is running; empty if there is none."""
    run = _run.get()
    return "" if run is None else run.documents


class DocumentsTruncatedEvent(BaseEvent):
    """Fired if documents were truncated or left out to fit the LM's window.

    Examples:
        >>> event = DocumentsTruncatedEvent(query_str="What hit Wunville?", given=["A storm.", "A town."], used=["A"])
        >>> f"{len(event.given) - len(event.used)} of {len(event.given)} documents left out"
        '1 of 2 documents left out'

    Attributes:
        query_str: the question, which is never truncated.
        given: the texts of the nodes.
        used: the texts that the LM reads, some of them truncated, without those that were left out.
    """

    query_str: str
    given: list[str]
    used: list[str]

    @classmethod
    def class_name(cls) -> str:
        return "DocumentsTruncatedEvent"


def reported(prompt: FittedPrompt, texts: Sequence[str]) -> FittedPrompt:
    """Returns the prompt. If texts were truncated for it, fires an event, and the first time logs a warning."""
    if not prompt.truncated:
        return prompt
    if first_time("truncated"):
        logger.warning(
            "%d documents and the question exceed the LM's window, so documents were shortened, and %d of them left "
            "out; retrieve fewer or smaller nodes (shown once; a DocumentsTruncatedEvent is fired each time)",
            len(texts),
            len(texts) - len(prompt.contexts),
        )
    event = DocumentsTruncatedEvent(query_str=prompt.question, given=list(texts), used=list(prompt.contexts))
    dispatcher.event(event)
    return prompt
