"""How MACLLM answers prompt templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_index.core.instrumentation.events.llm import LLMPredictEndEvent, LLMPredictStartEvent
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.llm import (
    astream_chat_response_to_tokens,
    astream_completion_response_to_tokens,
    stream_chat_response_to_tokens,
    stream_completion_response_to_tokens,
)
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import TokenAsyncGen, TokenGen
from llama_index_instrumentation import get_dispatcher

from mac_rag.integrations.llama_index.conversation import read_template
from mac_rag.integrations.llama_index.instructions import check_template
from mac_rag.integrations.llama_index.plain_text import PlainTextLLM, refuse_structure
from mac_rag.integrations.llama_index.responses import single
from mac_rag.integrations.llama_index.slots import Request, read_slots

dispatcher = get_dispatcher(__name__)


class PredictingLLM(PlainTextLLM, CustomLLM):
    """Prompt templates: as conversations for a checkpoint that follows instructions, by their slots for any other."""

    def predict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        """Answers a prompt template; see `read_template` and `read_slots`.

        Raises:
            InstructionError: for a template that asks for anything but the answer to a question, if the checkpoint
                follows no instructions.
            MACError: when the slots hold no question; and as `complete`.
        """
        request = self._request(prompt, prompt_args)
        answer = request.settled
        if answer is None and request.messages is not None:
            answer = self._parse_output(self.chat(request.messages, **_asked(request)).message.content or "")
        elif answer is None:
            answer = self.complete(request.question, formatted=True, contexts=request.contexts).text
        dispatcher.event(LLMPredictEndEvent(output=answer))
        return answer

    async def apredict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        """As `predict`."""
        request = self._request(prompt, prompt_args)
        answer = request.settled
        if answer is None and request.messages is not None:
            response = await self.achat(request.messages, **_asked(request))
            answer = self._parse_output(response.message.content or "")
        elif answer is None:
            answer = (await self.acomplete(request.question, formatted=True, contexts=request.contexts)).text
        dispatcher.event(LLMPredictEndEvent(output=answer))
        return answer

    def stream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> TokenGen:
        """As `predict`, token by token."""
        request = self._request(prompt, prompt_args)
        if request.settled is not None:
            return (token for token in [request.settled])
        if request.messages is not None:
            return stream_chat_response_to_tokens(self.stream_chat(request.messages, **_asked(request)))
        return stream_completion_response_to_tokens(
            self.stream_complete(request.question, formatted=True, contexts=request.contexts)
        )

    async def astream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> TokenAsyncGen:
        """As `stream`."""
        request = self._request(prompt, prompt_args)
        if request.settled is not None:
            return single(request.settled)
        if request.messages is not None:
            return await astream_chat_response_to_tokens(await self.astream_chat(request.messages, **_asked(request)))
        return await astream_completion_response_to_tokens(
            await self.astream_complete(request.question, formatted=True, contexts=request.contexts)
        )

    def _request(self, prompt: BasePromptTemplate, prompt_args: Mapping[str, Any]) -> Request:
        """Announces a prediction as LlamaIndex's own LLMs do, and reads the template."""
        dispatcher.event(LLMPredictStartEvent(template=prompt, template_args=dict(prompt_args)))
        self._log_template_data(prompt, **prompt_args)
        if self.reads_instructions:
            return read_template(self, prompt, prompt_args) or read_slots(prompt, prompt_args)
        if self.output_parser is not None:
            refuse_structure()
        check_template(prompt, self)
        return read_slots(prompt, prompt_args)


def _asked(request: Request) -> dict[str, Any]:
    return {"question": request.question or None, "contexts": request.contexts}
