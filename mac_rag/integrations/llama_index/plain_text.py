"""What MACLLM refuses: structured output, tools and sampling options, each with an error that says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from mac_rag.errors import MACError


class PlainTextLLM:
    """An LLM that answers in plain text: LlamaIndex's structured output and tools are refused."""

    def structured_predict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises MACError: structured output is not supported."""
        refuse_structure()

    async def astructured_predict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises MACError: structured output is not supported."""
        refuse_structure()

    def stream_structured_predict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises MACError: structured output is not supported."""
        refuse_structure()

    async def astream_structured_predict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises MACError: structured output is not supported."""
        refuse_structure()

    def as_structured_llm(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises MACError: structured output is not supported."""
        refuse_structure()

    def predict_and_call(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises MACError: tools are not supported."""
        refuse_structure()

    async def apredict_and_call(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises MACError: tools are not supported."""
        refuse_structure()


def refuse_options(options: Mapping[str, Any]) -> None:
    if options:
        raise MACError(
            f"MACLLM does not support {', '.join(sorted(options))}: it decodes greedily and calls no tools; "
            "its only option is contexts"
        )


def refuse_structure() -> NoReturn:
    raise MACError(
        "MACLLM answers in plain text and supports neither structured output nor tools; "
        "give those steps another LLM (llm=...)"
    )
