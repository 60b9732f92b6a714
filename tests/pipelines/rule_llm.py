"""A LlamaIndex LLM that does by rules what self-study asks for, with faults on demand."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LLMMetadata
from llama_index.core.llms import CustomLLM

GAP = "the gap"
MILL = (
    "The old mill at Ulvby was built by Karl Ek in May 1862. It ground 400 tonnes of rye a year for the bakers of "
    "Norby. Fire destroyed the wooden wheel in 1911, because lightning struck."
)


class RuleLLM(CustomLLM):
    """Asks for a chosen answer by its sentence with a gap, and fills the gap from the passage.

    Of a passage it asks why its first sentence is true, and answers with that sentence.

    Attributes:
        faults: chosen answer -> what the LLM writes in place of a question to it.
        requests: what was asked so far, in order.
        before: called with the number of requests so far, before each one.
    """

    faults: ClassVar[dict[str, str]] = {}
    requests: ClassVar[list[list[str]]] = []
    before: ClassVar[Callable[[int], object]] = lambda _: None

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(context_window=4096)

    def chat(self, messages: Sequence[ChatMessage], **_: Any) -> ChatResponse:
        type(self).before(len(self.requests))
        self.requests.append([str(message.content) for message in messages])
        return ChatResponse(message=ChatMessage(role="assistant", content=self._said(self.requests[-1][-1])))

    def _said(self, request: str) -> str:
        passage, *rest = request.removeprefix("Passage: ").split("\n\n")
        first = passage.split(". ")[0].rstrip(".")
        if not rest:
            return f"Question: Why is it true that {' '.join(first.split()[:3])}?\nAnswer: {first}."
        if rest[0].startswith("Sentence: "):
            sentence, answer = rest[0].removeprefix("Sentence: "), rest[1].removeprefix("Answer: ")
            default = f"What stands in {GAP} of: {sentence.replace(answer, GAP, 1).rstrip('.')}?"
            return self.faults.get(answer, default)
        if ": " not in rest[0]:
            return first
        pattern = re.escape(rest[0].split(": ", 1)[1].rstrip("?")).replace(re.escape(GAP), "(.+?)", 1)
        found = re.search(pattern + r"(?=[.]|$)", passage)
        return found[1] if found and found.groups() else "I do not know."

    def complete(self, prompt: str, formatted: bool = False, **_: Any) -> CompletionResponse:
        raise NotImplementedError

    def stream_complete(self, prompt: str, formatted: bool = False, **_: Any) -> Any:
        raise NotImplementedError


class KilledLLM(RuleLLM):
    """A `RuleLLM` whose process dies, as by kill -9, at the 400th request."""

    before: ClassVar[Callable[[int], object]] = lambda number: (
        os.kill(os.getpid(), signal.SIGKILL) if number == 400 else None
    )


class NarrowLLM(RuleLLM):
    """A `RuleLLM` with a window too narrow for examples."""

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(context_window=400)
