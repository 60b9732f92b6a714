"""ChatMAC: the engine as a LangChain chat model."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ChatMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from pydantic import Field, PrivateAttr, model_validator

from mac_rag.asking import conversation_prompt
from mac_rag.data.metadata_filters import Filters
from mac_rag.data.types import Answer, Source
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, MACError, PromptError
from mac_rag.integrations.framework import (
    SOURCES,
    TRUNCATED,
    Framework,
    Options,
    PlainMessage,
    bank_state,
    details_of,
    each_in_thread,
    first_time,
    in_thread,
    last_question,
    name_of,
    read_conversation,
    read_options,
    remembers,
)
from mac_rag.integrations.langchain.documents import WhereMetadata, check_names, where
from mac_rag.lm.chat import Message
from mac_rag.lm.decoding import Sampling
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.retrieval.base import Hit
from mac_rag.shipped_models import DEFAULT_MODEL
from mac_rag.sources import source_record, texts_read


@dataclass(frozen=True)
class CallSettings:
    """The fields of a `ChatMAC` that a call may override."""

    use_memory: bool | None
    filters: Filters | None
    as_of: str | datetime | None
    k: int | None
    memory_weight: float | None
    sources: int
    min_confidence: float | None


@dataclass(frozen=True)
class ChatCall:
    """One question, and how to answer it.

    Attributes:
        question: the question, or the last message.
        before: the conversation before it; empty if the checkpoint reads none.
        contexts: texts to answer from; None for those of the engine's retriever.
        memory: True to answer with the bank.
        allowed: documents that may have influence; None for all.
        settings: the fields of the `ChatMAC`, or what the call gives instead.
        options: decoding options.
    """

    question: str
    before: tuple[Message, ...]
    contexts: tuple[str, ...] | None
    memory: bool
    allowed: WhereMetadata | None
    settings: CallSettings
    options: Options

    @property
    def influence(self) -> dict[str, Any]:
        """The arguments that decide which documents have influence, as all methods of the engine take them."""
        return {"allowed": self.allowed, "as_of": self.settings.as_of}

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that `MACEngine.answer` and `stream` have in common."""
        return {
            **self.influence,
            "use_memory": self.memory,
            "memory_weight": self.settings.memory_weight,
            "max_new_tokens": self.options.max_new_tokens,
            "sampling": self.options.sampling,
        }


@dataclass(frozen=True)
class PromptWithDocuments:
    """A prompt with the documents that were retrieved for it, not truncated."""

    prompt: FittedPrompt
    hits: tuple[Hit, ...]

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the retrieved documents."""
        return tuple(hit.document_id for hit in self.hits if hit.document_id)


logger = logging.getLogger(__name__)

# LangChain's standard parameters for a network. They are accepted, because a chain may set them for any model.
_NETWORK = ("api_key", "base_url", "max_retries", "timeout")

# Concurrent questions of a `batch`: one batch of the engine. With LangChain's own number, six on two cores, no batch
# could be larger than six.
_CONCURRENCY = 32

_SETTINGS = tuple(one.name for one in fields(CallSettings))

RETRIEVED = "mac_retrieved"  # ids of the documents that the engine's retriever put in front of the question


class ChatMAC(BaseChatModel):
    """A LangChain chat model that answers through a `MACEngine`: from its memory, from documents, or both.

    What the LM reads depends on the checkpoint's prompt format.

    - **Templates of its own** (`mac-small`): the LM reads the last user message, which is the question, in the format
      of its training. Earlier messages have no influence; a warning says so once. A system message, the result of a
      tool, or a prompt to complete in place of a question raises an `InstructionError`.
    - **`chat`**, around an instruct LM: the LM reads the whole conversation, through its chat template, with the memory
      as a prefix. The last message queries the memory. If the memory is empty, the LM answers alone.

    `contexts` of a call are texts to put in front of the question; without them, the engine's retriever finds some, if
    it has one. `create_documents_chain` passes on the documents of a LangChain retriever.

    A message has the numbers of tokens in `usage_metadata`, and in `response_metadata`: `model_name`, `finish_reason`,
    `mac_truncated`, `mac_retrieved`, and, if requested, `mac_sources`, `mac_confidence` and `mac_guess`. A stream has
    them in its last chunk. `batch` and `abatch` answer questions together. The async methods do not block the event
    loop. The model calls no tools, and has no structured output.

    A call, or `bind`, takes `max_tokens`, `temperature`, `top_p`, `seed`, `stop`, `use_memory`, `filters`, `as_of`,
    `k`, `memory_weight`, `sources` and `min_confidence`, which override those of the constructor.

    Examples:
        >>> from mac_rag import Document
        >>> llm = ChatMAC(model="mac-tiny", sources=1)
        >>> text = "Edgar Flara will join the board of Rainga Press. The company employs 180 people."
        >>> report = llm.engine.adapt([Document("press", text)])
        >>> message = llm.invoke("How many workers does Rainga Press have?")
        >>> message.content, message.response_metadata["mac_sources"][0]["document_id"]
        ('180', 'press')

    Args:
        model: name or path of a checkpoint; empty for the default. With an engine, the model's name in messages.
        engine: an engine with its model and bank; None for one with an empty bank.
        max_tokens: longest answer; None for the model's configured length.
        temperature, top_p, seed, stop: how answers are decoded, as `Sampling` takes them; greedily by default.
        use_memory: True to always answer with the bank, which must then not be empty; False to never use it; None to
            use it if it holds documents that may have influence.
        filters: metadata key -> the value that a document of the bank must have, or a list of values of which it must
            have one. Other documents have no influence.
        as_of, k, memory_weight: as `MACEngine.answer` takes them.
        sources: most documents to name as what an answer rests on.
        min_confidence: if the confidence is below this value, the answer is "I don't know". A stream is then one piece.
        streaming: True to answer `invoke` by a stream, for callbacks that take single tokens; False to never stream.

    Raises:
        ConfigError: for an unknown argument. LangChain's `api_key`, `base_url`, `max_retries` and `timeout`, which
            concern a network, have no effect.
        ModelLoadError: if the model cannot be loaded.
    """

    model: str = ""
    engine: MACEngine = Field(exclude=True, repr=False)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = None
    stop: list[str] | None = None
    use_memory: bool | None = None
    filters: dict[str, Any] | None = None
    as_of: str | datetime | None = None
    k: int | None = Field(default=None, ge=1)
    memory_weight: float | None = Field(default=None, gt=0, le=1)
    sources: int = Field(default=0, ge=0)
    min_confidence: float | None = Field(default=None, ge=0, le=1)
    streaming: bool | None = None  # not False by default: to LangChain, an explicit False means no streams at all

    _filtered: WhereMetadata | None = PrivateAttr(default=None)  # cache: from the last call

    @model_validator(mode="before")
    @classmethod
    def _load(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        arguments = check_names(cls, arguments, _NETWORK)
        name, engine = arguments.get("model"), arguments.get("engine")
        if engine is None:
            name = str(name or DEFAULT_MODEL)
            engine = MACEngine(name)
        elif isinstance(engine, MACEngine) and not name:
            name = name_of(engine.model)
        return {**arguments, "model": name, "engine": engine}

    @property
    def reads_instructions(self) -> bool:
        """True if the checkpoint's prompt format is `chat`."""
        return self.engine.model.config.prompt.chat

    # -- properties of a model that LangChain reads --

    @property
    def _llm_type(self) -> str:
        return "mac_rag"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """Everything that an answer depends on, including the bank's present state: the key of LangChain's caches."""
        names = ("model", "max_tokens", "temperature", "top_p", "seed", "stop", *_SETTINGS)
        state = {"fingerprint": self.engine.model.fingerprint, "bank": bank_state(self.engine.bank)}
        return {**{name: getattr(self, name) for name in names}, **state}

    def _resolve_model_profile(self) -> ModelProfile:
        model = self.engine.model
        return ModelProfile(
            max_input_tokens=model.context_window,
            max_output_tokens=self.max_tokens or model.config.max_new_tokens,
            text_inputs=True,
            text_outputs=True,
            image_inputs=False,
            tool_calling=False,
            structured_output=False,
        )

    def get_token_ids(self, text: str) -> list[int]:
        """The LM's tokens of a text."""
        return list(self.engine.model.base_lm.prompts.texts.ids(text))

    # -- many questions --

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """As LangChain's, with enough questions at a time for the engine to answer them in batches."""
        return super().batch(inputs, _together(config), return_exceptions=return_exceptions, **kwargs)

    # -- one question --

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        message = self._answered(self._call(messages, stop, kwargs))
        return ChatResult(generations=[ChatGeneration(message=message)])

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return await in_thread(self._generate, messages, stop, None, **kwargs)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        for message in self._streamed(self._call(messages, stop, kwargs)):
            yield ChatGenerationChunk(message=message)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        async for chunk in each_in_thread(self._stream(messages, stop, None, **kwargs)):
            yield chunk

    def _call(self, messages: Sequence[BaseMessage], stop: list[str] | None, arguments: Mapping[str, Any]) -> ChatCall:
        """Reads a call; raises if there is nothing to answer from."""
        engine, arguments = self.engine, dict(arguments)
        engine.bank.check_model(engine.model.fingerprint)
        contexts: Sequence[str] | None = arguments.pop("contexts", None)
        arguments.pop("stream", None)  # LangChain's switch between `_generate` and `_stream`
        settings = CallSettings(**{name: arguments.pop(name, getattr(self, name)) for name in _SETTINGS})
        usual = Sampling(self.temperature, self.top_p, self.seed, tuple(self.stop or ()))
        options = read_options({"stop": stop, **arguments}, usual, self.max_tokens, FRAMEWORK)
        question, before = self._question(messages)
        self._filtered = allowed = where(engine, settings.filters, self._filtered)
        use = settings.use_memory
        memory = remembers(engine, allowed, settings.as_of) if use is None else use
        if isinstance(contexts, str) or not all(isinstance(text, str) for text in contexts or ()):
            raise MACError(f"contexts is {contexts!r:.80}; give a list of texts, such as the page_content of documents")
        texts = None if contexts is None else tuple(text for text in contexts if text.strip())
        retrieves = texts is None and engine.retriever is not None
        if use is None and not (memory or texts or retrieves or self.reads_instructions):
            raise BankError(
                "there is nothing to answer from: the memory bank is empty, or holds no document that passes the "
                "filters and counts at as_of, and no context was given; adapt to some documents first "
                "(llm.engine.adapt(to_documents(documents))), or ask the LM alone with use_memory=False"
            )
        return ChatCall(question, before, texts, memory, allowed, settings, options)

    def _question(self, messages: Sequence[BaseMessage]) -> tuple[str, tuple[Message, ...]]:
        """The question, and the conversation before it that the checkpoint reads."""
        if not self.reads_instructions:
            return last_question(plain_messages(messages), FRAMEWORK), ()
        conversation = read_conversation(plain_messages(messages), FRAMEWORK)
        last = conversation[-1].role if conversation else "nobody"
        if last != "user":
            raise PromptError(f"a conversation must end with a message of the user, but the last one is of {last}")
        return conversation[-1].text, conversation[:-1]

    def _read(self, call: ChatCall) -> PromptWithDocuments:
        """The prompt that the LM reads, and the documents retrieved for it."""
        engine, longest = self.engine, call.options.max_new_tokens
        if call.contexts is None:
            [hits] = engine.retrieve([call.question], k=call.settings.k, **call.influence)
        else:
            hits = [Hit("", text, 0.0) for text in call.contexts]

        def write(texts: Sequence[str]) -> FittedPrompt:
            if self.reads_instructions:
                return conversation_prompt(engine.model, call.before, call.question, texts, longest)
            return engine.model.fit_to_window(call.question, texts, overflow="truncate", max_new_tokens=longest)

        prompt = engine.fit(hits, write, use_memory=call.memory, **call.influence)
        return PromptWithDocuments(prompt, tuple(hits))

    def _answered(self, call: ChatCall) -> AIMessage:
        if self.reads_instructions:
            return self._answered_conversation(call)
        # The engine itself retrieves, at once for all questions of a batch.
        [answer] = self.engine.answer(
            [call.question],
            contexts=None if call.contexts is None else [call.contexts],
            k=call.settings.k,
            overflow="truncate",
            sources=call.settings.sources,
            min_confidence=call.settings.min_confidence,
            **call.arguments,
        )
        used = len(self.engine.model.base_lm.prompts.prompt(call.question, answer.contexts))
        metadata = self._metadata(call, answer.text, answer.truncated, answer.document_ids) | details_of(answer)
        return AIMessage(answer.text, usage_metadata=self._usage(used, answer.text), response_metadata=metadata)

    def _answered_conversation(self, call: ChatCall) -> AIMessage:
        read = self._read(call)
        least = call.settings.min_confidence
        [answer] = self.engine.answer([read.prompt], min_confidence=least, **call.arguments)
        text = answer.text
        metadata = self._metadata(call, text, read.prompt.truncated, read.ids) | details_of(answer)
        metadata |= self._sources(call, read, answer)
        return AIMessage(text, usage_metadata=self._usage(len(read.prompt.ids), text), response_metadata=metadata)

    def _streamed(self, call: ChatCall) -> Iterator[AIMessageChunk]:
        if call.settings.min_confidence is not None:
            whole = self._answered(call)
            yield AIMessageChunk(
                content=str(whole.text),
                usage_metadata=whole.usage_metadata,
                response_metadata=whole.response_metadata,
                chunk_position="last",
            )
            return
        read, text = self._read(call), ""
        for piece in self.engine.stream(read.prompt, **call.arguments):
            text += piece
            yield AIMessageChunk(content=piece)
        answer = Answer(text, read.prompt.contexts, read.ids, read.prompt.truncated)
        metadata = self._metadata(call, text, read.prompt.truncated, read.ids) | self._sources(call, read, answer)
        usage = self._usage(len(read.prompt.ids), text)
        yield AIMessageChunk(content="", usage_metadata=usage, response_metadata=metadata, chunk_position="last")

    # -- metadata of an answer --

    def _sources(self, call: ChatCall, read: PromptWithDocuments, answer: Answer) -> dict[str, Any]:
        """The documents that an answer rests on, if the engine did not find them while it answered."""
        if not call.settings.sources or not (call.memory or read.ids):
            return {}
        sources: tuple[Source, ...] = self.engine.sources(
            read.prompt,
            answer.guess or answer.text,
            most=call.settings.sources,
            texts=texts_read(read.hits, read.prompt),
            use_memory=call.memory,
            **call.influence,
        )
        return {SOURCES: [source_record(source, answer.said) for source in sources]} if sources else {}

    def _metadata(self, call: ChatCall, text: str, truncated: bool, ids: Sequence[str]) -> dict[str, Any]:
        if truncated and first_time("truncated"):
            logger.warning(
                "documents and the question exceed the LM's window, so documents were shortened or left out; retrieve "
                "fewer or smaller ones (shown once; response_metadata['mac_truncated'] is true each time)"
            )
        most = call.options.max_new_tokens or self.engine.model.config.max_new_tokens
        return {
            "model_name": self.model,
            "finish_reason": "length" if self._tokens(text) >= most else "stop",
            TRUNCATED: truncated,
            RETRIEVED: list(ids),
        }

    def _tokens(self, text: str) -> int:
        return len(self.get_token_ids(text)) if text else 0

    def _usage(self, read: int, text: str) -> UsageMetadata:
        """Numbers of tokens that the LM read, and of those of its answer."""
        written = self._tokens(text)
        return UsageMetadata(input_tokens=read, output_tokens=written, total_tokens=read + written)


def _together(config: RunnableConfig | list[RunnableConfig] | None) -> RunnableConfig | list[RunnableConfig]:
    """A configuration with enough concurrency for a whole batch of the engine, unless it sets a number itself."""
    if isinstance(config, list):
        return [_with_room(one) for one in config]
    return _with_room(config or {})


def _with_room(config: RunnableConfig) -> RunnableConfig:
    if config.get("max_concurrency") is not None:
        return config
    return {**config, "max_concurrency": _CONCURRENCY}


FRAMEWORK = Framework(
    llm="ChatMAC",
    options=(
        "contexts, max_tokens (at least 1), temperature, top_p, seed and stop, and use_memory, filters, as_of, k, "
        "memory_weight, sources and min_confidence"
    ),
    other_llm="Give this step of the chain another chat model",
    prompt_remedy="; to ask about texts, pass them: llm.invoke(question, contexts=[...]), or use "
    "create_documents_chain",
    system_remedy="; or leave the system message out",
    tool_remedy="; leave these messages out",
)

_ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "ai": "assistant",
    "assistant": "assistant",
}


def plain_messages(messages: Sequence[BaseMessage]) -> list[PlainMessage]:
    """The messages in the form that both frameworks share."""
    return [PlainMessage(_role(message), str(message.text), _others(message)) for message in messages]


def _role(message: BaseMessage) -> str:
    name = message.role if isinstance(message, ChatMessage) else message.type.removesuffix("MessageChunk").lower()
    return _ROLES.get(name, name)


def _others(message: BaseMessage) -> tuple[str, ...]:
    """Kinds of a message's content other than text."""
    blocks = message.content if isinstance(message.content, list) else []
    kinds = [str(block.get("type")) for block in blocks if isinstance(block, dict) and block.get("type") != "text"]
    if isinstance(message, AIMessage) and message.tool_calls:
        kinds.append("calls of tools")
    return tuple(kinds)


def create_documents_chain(llm: ChatMAC) -> Runnable[dict[str, Any], AIMessage]:
    """Makes a chain that answers a question from documents: `create_stuff_documents_chain` without a prompt.

    A checkpoint that reads question and context does not read the wording of a prompt. Here each document stays a
    separate document, in the format of the training. If they exceed the LM's window, the last ones are left out, never
    the question. The question (a text) stands under `input` and the documents, the best first, under `context`, as
    `create_retrieval_chain` gives them.

    Examples:
        >>> from langchain_core.documents import Document
        >>> chain = create_documents_chain(ChatMAC(model="mac-tiny"))
        >>> text = "Edgar Flara will join the board of Rainga Press. The company employs 180 people."
        >>> chain.invoke({"input": "How many workers does Rainga Press have?", "context": [Document(text)]}).content
        '180'

    Args:
        llm: the chat model.

    Returns:
        A runnable from a dictionary to a message, which streams and batches as the chat model does.
    """

    def ask(values: Mapping[str, Any]) -> Runnable[Any, AIMessage]:
        question, documents = values.get("input"), values.get("context")
        if not isinstance(question, str) or documents is None:
            raise MACError(
                "a documents chain needs a question (a text) under the key 'input' and documents under 'context'; the "
                f"keys here are: {', '.join(map(str, values)) or 'none'}"
            )
        bound = llm.bind(contexts=[document.page_content for document in documents])
        return RunnableLambda(lambda _: question) | bound

    return RunnableLambda(ask, name="mac_documents_chain")
