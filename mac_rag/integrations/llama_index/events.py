"""Events that MAC fires through LlamaIndex's instrumentation."""

from __future__ import annotations

from llama_index_instrumentation.base import BaseEvent


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
