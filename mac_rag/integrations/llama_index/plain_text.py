"""Structured output and tools, which are for checkpoints that follow instructions."""

from __future__ import annotations

from typing import Any, NoReturn

from llama_index.core.llms import LLM

from mac_rag.errors import InstructionError


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


def refuse_structure() -> NoReturn:
    raise InstructionError(
        "MACLLM answers in plain text and supports neither structured output nor tools; "
        "give those steps another LLM (llm=...), or MACLLM a checkpoint whose prompt format is chat"
    )
