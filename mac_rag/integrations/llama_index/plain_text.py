"""Structured output, tools and options of a call: what MACLLM takes and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from llama_index.core.llms import LLM

from mac_rag.errors import InstructionError, MACError
from mac_rag.lm.sampling import Sampling


class PlainTextLLM(LLM):
    """An LLM that answers in text: structured output and tools are for checkpoints that follow instructions."""

    @property
    def reads_instructions(self) -> bool:
        """True if the checkpoint follows instructions; False if it reads question and context only."""
        return False

    def structured_predict(self, *args: Any, **kwargs: Any) -> Any:
        """As LlamaIndex's; InstructionError for structured output of a checkpoint that follows no instructions."""
        if not self.reads_instructions:
            refuse_structure()
        return super().structured_predict(*args, **kwargs)

    async def astructured_predict(self, *args: Any, **kwargs: Any) -> Any:
        """As LlamaIndex's; InstructionError for structured output of a checkpoint that follows no instructions."""
        if not self.reads_instructions:
            refuse_structure()
        return await super().astructured_predict(*args, **kwargs)

    def stream_structured_predict(self, *args: Any, **kwargs: Any) -> Any:
        """As LlamaIndex's; InstructionError for structured output of a checkpoint that follows no instructions."""
        if not self.reads_instructions:
            refuse_structure()
        return super().stream_structured_predict(*args, **kwargs)

    async def astream_structured_predict(self, *args: Any, **kwargs: Any) -> Any:
        """As LlamaIndex's; InstructionError for structured output of a checkpoint that follows no instructions."""
        if not self.reads_instructions:
            refuse_structure()
        return await super().astream_structured_predict(*args, **kwargs)

    def as_structured_llm(self, *args: Any, **kwargs: Any) -> Any:
        """As LlamaIndex's; InstructionError for structured output of a checkpoint that follows no instructions."""
        if not self.reads_instructions:
            refuse_structure()
        return super().as_structured_llm(*args, **kwargs)

    def predict_and_call(self, *args: Any, **kwargs: Any) -> Any:
        """As LlamaIndex's; InstructionError for tools of a checkpoint that follows no instructions."""
        if not self.reads_instructions:
            refuse_structure()
        return super().predict_and_call(*args, **kwargs)

    async def apredict_and_call(self, *args: Any, **kwargs: Any) -> Any:
        """As LlamaIndex's; InstructionError for tools of a checkpoint that follows no instructions."""
        if not self.reads_instructions:
            refuse_structure()
        return await super().apredict_and_call(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Options:
    """How one call is answered.

    Attributes:
        sampling: how tokens are chosen, and what ends the answer.
        max_new_tokens: longest answer; None for the model's configured length.
    """

    sampling: Sampling
    max_new_tokens: int | None


def read_options(options: Mapping[str, Any], sampling: Sampling, max_new_tokens: int | None) -> Options:
    """The options of a call: `temperature`, `top_p`, `seed`, `stop` (a string or several) and `max_tokens`.

    Args:
        options: the keyword arguments of the call; None stands for what the LLM does otherwise.
        sampling, max_new_tokens: what the LLM does otherwise.

    Raises:
        MACError: for any other option or value; names it.
    """
    given = {name: value for name, value in options.items() if value is not None}
    max_tokens = given.pop("max_tokens", max_new_tokens)
    refused = {name: value for name, value in given.items() if name not in ("temperature", "top_p", "seed", "stop")}
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        refused["max_tokens"] = max_tokens
    if refused:
        named = ", ".join(f"{name}={value!r}" for name, value in sorted(refused.items()))
        raise MACError(
            f"MACLLM does not support {named}: its options are contexts, max_tokens (at least 1), temperature, top_p, "
            "seed and stop; it calls no tools by itself"
        )
    if "stop" in given:
        given["stop"] = (given["stop"],) if isinstance(given["stop"], str) else tuple(given["stop"])
    return Options(replace(sampling, **given), max_tokens)


def refuse_structure() -> NoReturn:
    raise InstructionError(
        "MACLLM answers in plain text and supports neither structured output nor tools; "
        "give those steps another LLM (llm=...), or MACLLM a checkpoint whose prompt format is chat"
    )
