"""What MACLLM refuses: structured output, tools and sampling, each with an error that says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from mac_rag.errors import InstructionError, MACError


class PlainTextLLM:
    """An LLM that answers in plain text: LlamaIndex's structured output and tools are refused."""

    @property
    def reads_instructions(self) -> bool:
        """True if the checkpoint follows instructions; False if it reads question and context only."""
        return False

    def structured_predict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises InstructionError: structured output is not supported."""
        refuse_structure()

    async def astructured_predict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises InstructionError: structured output is not supported."""
        refuse_structure()

    def stream_structured_predict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises InstructionError: structured output is not supported."""
        refuse_structure()

    async def astream_structured_predict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises InstructionError: structured output is not supported."""
        refuse_structure()

    def as_structured_llm(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises InstructionError: structured output is not supported."""
        refuse_structure()

    def predict_and_call(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises InstructionError: tools are not supported."""
        refuse_structure()

    async def apredict_and_call(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises InstructionError: tools are not supported."""
        refuse_structure()


def read_options(options: Mapping[str, Any]) -> int | None:
    """The longest answer that the options of a call ask for; None if they say nothing about it.

    `max_tokens` is that length. `temperature=0` asks for greedy decoding, which is how MACLLM decodes.

    Raises:
        MACError: for any other option or value; names it.
    """
    refused = {name: value for name, value in options.items() if name not in ("temperature", "max_tokens")}
    if options.get("temperature") not in (None, 0):
        refused["temperature"] = options["temperature"]
    max_tokens = options.get("max_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        refused["max_tokens"] = max_tokens
    if refused:
        named = ", ".join(f"{name}={value!r}" for name, value in sorted(refused.items()))
        raise MACError(
            f"MACLLM does not support {named}: it decodes greedily and calls no tools; its options are contexts, "
            "max_tokens (at least 1) and temperature=0"
        )
    return max_tokens


def refuse_structure() -> NoReturn:
    raise InstructionError(
        "MACLLM answers in plain text and supports neither structured output nor tools; "
        "give those steps another LLM (llm=...), or MACLLM a checkpoint whose prompt format is chat"
    )
