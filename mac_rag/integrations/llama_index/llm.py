"""MACLLM: the engine as a LlamaIndex LLM."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    TextBlock,
)
from llama_index.core.bridge.pydantic import Field
from llama_index.core.callbacks import CallbackManager
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.instrumentation.events.llm import LLMPredictEndEvent, LLMPredictStartEvent
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import (
    astream_completion_response_to_tokens,
    stream_completion_response_to_tokens,
)
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import TokenAsyncGen, TokenGen
from llama_index.core.vector_stores.types import MetadataFilters
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.base import BaseEvent

from mac_rag import DEFAULT_MODEL
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, ConfigError, MACError
from mac_rag.integrations.llama_index.filters import FilteringComponent
from mac_rag.integrations.llama_index.plain_text import PlainTextLLM, refuse_options, refuse_structure
from mac_rag.integrations.llama_index.slots import Request, read_slots, rewritten_question
from mac_rag.integrations.llama_index.threads import in_thread
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.model import MACModel

# LlamaIndex subtracts from the window its own prompt templates, the chat history and 500 tokens for refined answers,
# all counted with another model's tokenizer, although none of them enters a MAC prompt. Without this reserve it would
# refuse small windows, cut a context in two that the LM can read in one, and fail after a few turns of a chat. With
# it, LlamaIndex cuts no text that the LM could read: the engine, which counts the LM's own tokens, decides.
LLAMA_INDEX_RESERVE = 4096

Contexts: TypeAlias = Sequence[str] | FittedPrompt | None  # of one question

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


class MACLLM(PlainTextLLM, FilteringComponent, CustomLLM):
    """A LlamaIndex LLM that answers through a `MACEngine`: from its memory bank, from retrieved context, or both.

    It takes question and context from the slots of LlamaIndex's prompt templates (see `read_slots`). The LM never reads
    the wording of the templates, system prompts or chat histories. Direct use:

    - `complete(prompt, contexts=...)` answers `prompt`, which is the question;
    - `chat(messages)` answers the last user message;
    - the async methods do not block the event loop, the streaming ones yield tokens as the LM generates them.

    LlamaIndex joins the nodes to one context, each behind its metadata. Hide metadata that the model was not trained on
    with `node.excluded_llm_metadata_keys`. If a context is beyond the LM's window, its end is left out and a warning is
    logged; retrieve fewer or smaller nodes, let LlamaIndex pack by the LM's own tokens (`prompt_helper`), or use
    `MACSynthesizer`, which also keeps the nodes separate. Chat engines get follow-up questions back unchanged, because
    the model cannot rewrite them. In the mode condense_plus_context, a custom rewriting prompt needs
    `skip_condense=True`. Structured output, output parsers and tools raise an error.

    Examples:
        >>> context = "Edgar Flara will join the board of Rainga Press. The company employs 180 people."
        >>> MACLLM("mac-tiny").complete("How many workers does Rainga Press have?", contexts=[context]).text
        '180'

    Args:
        model: name or path of a checkpoint, or a model; None for the default. Its bank is empty: fill `llm.engine`.
        engine: an engine with its model and bank, instead of `model`.
        use_memory: True to always answer with the bank, which must then not be empty; False to never use it; None to
            use it if it holds documents, and otherwise to answer from the context alone.
        max_new_tokens: longest answer; None for the model's configured length.
        filters: the documents that may influence an answer through the bank; give the retriever the same filters. For
            the filters of one request, `llm.model_copy(update={"filters": filters})` is cheap and shares the engine.
        callback_manager: LlamaIndex's callback manager.

    Raises:
        ConfigError: when both `model` and `engine` are given.
        ModelLoadError: when the model cannot be loaded.
    """

    model: str = Field(description="Name or path of the model; a description if it is an object.")
    use_memory: bool | None = Field(default=None, description="Whether to answer with the bank; None if it is filled.")
    max_new_tokens: int | None = Field(default=None, ge=1, description="Longest answer; None for the model's own.")

    def __init__(
        self,
        model: str | Path | MACModel | None = None,
        *,
        engine: MACEngine | None = None,
        use_memory: bool | None = None,
        max_new_tokens: int | None = None,
        filters: MetadataFilters | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        if engine is not None and model is not None:
            raise ConfigError(f"give model or engine, not both; the engine already holds a model (got model={model!r})")
        if engine is not None:
            name = _describe(engine.model)
        elif isinstance(model, MACModel):
            name, engine = _describe(model), MACEngine(model)
        else:
            name = str(model or DEFAULT_MODEL)
            engine = MACEngine(name)
        super().__init__(
            model=name,
            use_memory=use_memory,
            max_new_tokens=max_new_tokens,
            filters=filters,
            callback_manager=callback_manager or CallbackManager([]),
        )
        self._engine = engine

    @classmethod
    def class_name(cls) -> str:
        return "MACLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """Sizes that LlamaIndex plans with. The window includes what LlamaIndex subtracts for its own prompts."""
        model = self.engine.model
        return LLMMetadata(
            context_window=model.context_window + LLAMA_INDEX_RESERVE,
            num_output=self.max_new_tokens or model.config.max_new_tokens,
            model_name=self.model,
        )

    def prompt_helper(self) -> PromptHelper:
        """A prompt helper that counts the LM's own tokens against its true window.

        Without it, the end of a context that is too long is left out. Set it as `Settings.prompt_helper`, or give it to
        `get_response_synthesizer`, and LlamaIndex divides such a context: tree_summarize and accumulate ask about every
        part, compact and refine about the first one (with a warning), and simple_summarize cuts the rest off.
        """
        model = self.engine.model
        tokenizer = model.base_lm.tokenizer
        return PromptHelper(
            context_window=model.context_window,
            num_output=self.metadata.num_output,
            tokenizer=lambda text: list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids),
        )

    # -- the engine --

    def _settings(self, contexts: Contexts) -> dict[str, Any]:
        """Keyword arguments for one call of the engine; raises if there is nothing to answer from."""
        engine = self.engine
        engine.bank.check_model(engine.model.fingerprint)
        use_memory = self.remembers if self.use_memory is None else self.use_memory
        retrieves = contexts is None and engine.retriever is not None
        texts = contexts.contexts if isinstance(contexts, FittedPrompt) else contexts
        if self.use_memory is None and not (use_memory or texts or retrieves):
            raise BankError(
                "there is nothing to answer from: the memory bank is empty, or holds nothing that the filters let "
                "pass, and no context was given; adapt to some documents first (MemoryWriter, or llm.engine.adapt), "
                "or ask the LM alone with use_memory=False"
            )
        return {"use_memory": use_memory, "max_new_tokens": self.max_new_tokens, "allowed": self.allowed}

    def fit_to_window(self, question: str, texts: Sequence[str]) -> FittedPrompt:
        """The question and the texts as a prompt that fits the LM's window.

        If texts are cut or left out, it logs a warning and fires a `DocumentsTruncatedEvent`.

        Raises:
            DocumentError: for an empty question, or one that alone is beyond the window.
        """
        prompt = self.engine.model.fit_to_window(
            question, texts, overflow="truncate", max_new_tokens=self.max_new_tokens
        )
        if prompt.truncated:
            logger.warning(
                "%d documents and the question are beyond the LM's window; the documents were shortened, and %d of "
                "them left out: retrieve fewer or smaller nodes",
                len(texts),
                len(texts) - len(prompt.contexts),
            )
            event = DocumentsTruncatedEvent(query_str=question, given=list(texts), used=list(prompt.contexts))
            dispatcher.event(event)
        return prompt

    def _prompt_of(self, question: str, contexts: Contexts) -> str | FittedPrompt:
        """The engine's input: a fitted prompt, or a question without contexts, for which it may retrieve."""
        if contexts is None or isinstance(contexts, FittedPrompt):
            return contexts or question
        return self.fit_to_window(question, contexts)

    def _answer(self, question: str, contexts: Contexts) -> str:
        follow_up = rewritten_question(question)
        if follow_up is not None:
            return follow_up
        return self.engine.answer([self._prompt_of(question, contexts)], **self._settings(contexts))[0].text

    def _stream(self, question: str, contexts: Contexts) -> Iterator[tuple[str, str]]:
        """Yields the answer so far and its newest piece. Errors are raised at the call, not at the first piece."""
        pieces = self.engine.stream(self._prompt_of(question, contexts), **self._settings(contexts))
        return _accumulate(pieces)

    async def _astream(self, question: str, contexts: Contexts) -> AsyncIterator[tuple[str, str]]:
        pieces = await in_thread(self._stream, question, contexts)

        async def generate() -> AsyncIterator[tuple[str, str]]:
            while (piece := await in_thread(next, pieces, None)) is not None:
                yield piece

        return generate()

    # -- questions --

    @llm_completion_callback()
    def complete(
        self, prompt: str, formatted: bool = False, *, contexts: Contexts = None, **kwargs: Any
    ) -> CompletionResponse:
        """Answers `prompt`, which is the question itself.

        Args:
            prompt: the question.
            formatted: an argument of LlamaIndex's interface; it has no effect.
            contexts: texts to answer from, the best first, or the result of `fit_to_window`; None for those of the
                engine's retriever, if it has one.

        Raises:
            BankError: for an empty bank, if memory is required or there is no context either.
            FingerprintError: when another model wrote the bank.
            DocumentError: for an empty question, or one that alone is beyond the LM's window.
            MACError: for any other option.
        """
        refuse_options(kwargs)
        return CompletionResponse(text=self._answer(prompt, contexts))

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, *, contexts: Contexts = None, **kwargs: Any
    ) -> CompletionResponse:
        """As `complete`."""
        refuse_options(kwargs)
        return CompletionResponse(text=await in_thread(self._answer, prompt, contexts))

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, *, contexts: Contexts = None, **kwargs: Any
    ) -> CompletionResponseGen:
        """As `complete`, token by token; errors come at the call."""
        refuse_options(kwargs)
        pieces = self._stream(prompt, contexts)
        return (CompletionResponse(text=text, delta=piece) for text, piece in pieces)

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, *, contexts: Contexts = None, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """As `stream_complete`."""
        refuse_options(kwargs)
        pieces = await self._astream(prompt, contexts)
        return (CompletionResponse(text=text, delta=piece) async for text, piece in pieces)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answers the last user message; the messages before it are not read.

        Raises:
            MACError: when there is no user message, or it holds more than text; and as `complete`.
        """
        refuse_options(kwargs)
        return _chat_response(self._answer(_last_question(messages), None))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As `chat`."""
        refuse_options(kwargs)
        return _chat_response(await in_thread(self._answer, _last_question(messages), None))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """As `chat`, token by token; errors come at the call."""
        refuse_options(kwargs)
        pieces = self._stream(_last_question(messages), None)
        return (_chat_response(text, piece) for text, piece in pieces)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """As `stream_chat`."""
        refuse_options(kwargs)
        pieces = await self._astream(_last_question(messages), None)
        return (_chat_response(text, piece) async for text, piece in pieces)

    # -- prompt templates --

    def predict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        """Answers the question in the template's slots; see `read_slots`.

        Raises:
            MACError: when the slots hold no question; and as `complete`.
        """
        request = self._request(prompt, prompt_args)
        answer = request.settled
        if answer is None:
            answer = self.complete(request.question, contexts=request.contexts).text
        dispatcher.event(LLMPredictEndEvent(output=answer))
        return answer

    async def apredict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        """As `predict`."""
        request = self._request(prompt, prompt_args)
        answer = request.settled
        if answer is None:
            answer = (await self.acomplete(request.question, contexts=request.contexts)).text
        dispatcher.event(LLMPredictEndEvent(output=answer))
        return answer

    def stream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> TokenGen:
        """As `predict`, token by token."""
        request = self._request(prompt, prompt_args)
        if request.settled is not None:
            return (token for token in [request.settled])
        return stream_completion_response_to_tokens(self.stream_complete(request.question, contexts=request.contexts))

    async def astream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> TokenAsyncGen:
        """As `stream`."""
        request = self._request(prompt, prompt_args)
        if request.settled is not None:
            return _single(request.settled)
        return await astream_completion_response_to_tokens(
            await self.astream_complete(request.question, contexts=request.contexts)
        )

    def _request(self, prompt: BasePromptTemplate, prompt_args: Mapping[str, Any]) -> Request:
        """Announces a prediction as LlamaIndex's own LLMs do, and reads question and context from the slots."""
        dispatcher.event(LLMPredictStartEvent(template=prompt, template_args=dict(prompt_args)))
        self._log_template_data(prompt, **prompt_args)
        if self.output_parser is not None:
            refuse_structure()
        return read_slots(prompt, prompt_args)


def _describe(model: MACModel) -> str:
    return f"{model.config.base_lm.name} with MAC {model.fingerprint[:12]}"


def _accumulate(pieces: Iterator[str]) -> Iterator[tuple[str, str]]:
    text = ""
    for piece in pieces:
        text += piece
        yield text, piece


async def _single(text: str) -> TokenAsyncGen:
    yield text


def _chat_response(text: str, delta: str | None = None) -> ChatResponse:
    return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=delta)


def _last_question(messages: Sequence[ChatMessage]) -> str:
    message = next((message for message in reversed(messages) if message.role == MessageRole.USER), None)
    if message is None:
        raise MACError("MACLLM answers the last user message, and there is none among the messages")
    others = [block.block_type for block in message.blocks if not isinstance(block, TextBlock)]
    if others:
        raise MACError(f"MACLLM reads text only, but the last user message holds: {', '.join(others)}")
    return message.content or ""
