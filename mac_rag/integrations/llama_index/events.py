"""Events that MAC fires through LlamaIndex's instrumentation."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.base import BaseEvent

from mac_rag.integrations.once import first_time
from mac_rag.lm.prompt import FittedPrompt

dispatcher = get_dispatcher(__name__)
logger = logging.getLogger(__name__)


class DocumentsTruncatedEvent(BaseEvent):
    """Documents were cut or left out to fit into the LM's window.

    Examples:
        >>> event = DocumentsTruncatedEvent(query_str="What hit Wunville?", given=["A storm.", "A town."], used=["A"])
        >>> f"{len(event.given) - len(event.used)} of {len(event.given)} documents left out"
        '1 of 2 documents left out'

    Attributes:
        query_str: the question, which is never cut.
        given: the texts of the nodes.
        used: the texts that the LM reads, some of them cut. Texts that were left out are missing.
    """

    query_str: str
    given: list[str]
    used: list[str]

    @classmethod
    def class_name(cls) -> str:
        return "DocumentsTruncatedEvent"


def reported(prompt: FittedPrompt, texts: Sequence[str]) -> FittedPrompt:
    """The prompt; if texts were cut for it, fires an event, and the first time logs a warning."""
    if not prompt.truncated:
        return prompt
    if first_time("truncated"):
        logger.warning(
            "%d documents and the question are beyond the LM's window; the documents were shortened, and %d of "
            "them left out: retrieve fewer or smaller nodes (this is said once; every time, a "
            "DocumentsTruncatedEvent says it)",
            len(texts),
            len(texts) - len(prompt.contexts),
        )
    event = DocumentsTruncatedEvent(query_str=prompt.question, given=list(texts), used=list(prompt.contexts))
    dispatcher.event(event)
    return prompt
