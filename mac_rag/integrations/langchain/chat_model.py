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

from mac_rag import DEFAULT_MODEL
from mac_rag.asking import conversation_prompt
from mac_rag.data.types import Answer, Source
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, MACError, PromptError
from mac_rag.integrations.framework import (
    SOURCES,
    TRUNCATED,
    Framework,
    Options,
    Said,
    bank_state,
    details_of,
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
from mac_rag.memory.metadata_filters import Filters
from mac_rag.sources import source_record, texts_read


@dataclass(frozen=True)
class Settings:
    """Fields of a `ChatMAC` that a call may set."""

    use_memory: bool | None
    filters: Filters | None
    as_of: str | datetime | None
    k: int | None
    memory_weight: float | None
    sources: int
    min_confidence: float | None


@dataclass(frozen=True)
class Call:
    """One question of one call, and how it is answered.

    Attributes:
        question: the question, or the last message.
        before: the conversation before it; empty where the checkpoint reads none.
        contexts: texts to answer from; None for those of the engine's retriever.
        memory: True to answer with the bank.
        allowed: documents that may have influence; None for all.
    """

    question: str
    before: tuple[Message, ...]
    contexts: tuple[str, ...] | None
    memory: bool
    allowed: WhereMetadata | None
    settings: Settings
    options: Options

    @property
    def influence(self) -> dict[str, Any]:
        """What decides which documents have influence, as all methods of the engine take it."""
        return {"allowed": self.allowed, "as_of": self.settings.as_of}

    @property
    def arguments(self) -> dict[str, Any]:
        """What `MACEngine.answer` and `stream` have in common."""
        return {
            **self.influence,
            "use_memory": self.memory,
            "memory_weight": self.settings.memory_weight,
            "max_new_tokens": self.options.max_new_tokens,
            "sampling": self.options.sampling,
        }


@dataclass(frozen=True)
class Read:
    """A prompt with the documents that were retrieved for it: their ids, and their whole texts."""

    prompt: FittedPrompt
    ids: tuple[str, ...]
    texts: tuple[str, ...]


logger = logging.getLogger(__name__)

# LangChain's standard parameters that are about a network. They are taken, because a chain may set them for any model.
_NETWORK = ("api_key", "base_url", "max_retries", "timeout")

# Questions of a `batch` that are asked at a time: a batch of the engine. LangChain's own number, six on two cores,
# would be the largest batch.
_CONCURRENCY = 32

_SETTINGS = tuple(one.name for one in fields(Settings))

RETRIEVED = "mac_retrieved"  # of an answer: ids of the documents that the engine's retriever put in front


class ChatMAC(BaseChatModel):
    """A LangChain chat model that answers through a `MACEngine`: from its memory, from documents, or both.

    What the LM reads depends on the checkpoint's prompt format.

    - **Templates of its own** (`mac-small`): the last message of the user, which is the question, in the form of the
      training. Earlier messages have no influence, which a warning says once. System messages, results of tools, and a
      prompt to complete in place of a question are an `InstructionError`.
    - **`chat`**, around an instruct LM: the whole conversation, through the LM's chat template, with the memory as a
      prefix. The memory is asked the last message. While it is empty, the LM answers alone.

    `contexts` of a call are texts that are put in front of the question; without them, the engine's retriever finds
    some, if it has one. `create_documents_chain` passes on the documents of a LangChain retriever.

    A message has in `usage_metadata` the numbers of tokens, and in `response_metadata`: `model_name`, `finish_reason`,
    `mac_truncated`, `mac_retrieved`, and, where they are asked for, `mac_sources`, `mac_confidence` and `mac_guess`. A
    stream has them in its last chunk. `batch` and `abatch` answer questions together. The async methods do not block
    the event loop. It calls no tools, and has no structured output.

    A call, or `bind`, takes `max_tokens`, `temperature`, `top_p`, `seed`, `stop`, `use_memory`, `filters`, `as_of`,
    `k`, `memory_weight`, `sources` and `min_confidence` in place of those of the constructor.

    Examples:
        >>> from mac_rag import Document
        >>> llm = ChatMAC(model="mac-tiny", sources=1)
        >>> text = "Edgar Flara will join the board of Rainga Press. The company employs 180 people."
        >>> report = llm.engine.adapt([Document("press", text)])
        >>> message = llm.invoke("How many workers does Rainga Press have?")
        >>> message.content, message.response_metadata["mac_sources"][0]["document_id"]
        ('180', 'press')

    Args:
        model: name or path of a checkpoint, or None for the default. With an engine, what messages call the model.
        engine: an engine with its model and bank; None for one with an empty bank.
        max_tokens: longest answer; None for the model's configured length.
        temperature, top_p, seed, stop: how answers are decoded, as `Sampling` takes them; greedily by default.
        use_memory: True to always answer with the bank, which must then not be empty; False to never use it; None to
            use it if it holds documents that may have influence.
        filters: values that the metadata of a document of the bank must have by their keys, or lists of which it must
            have one; other documents have no influence.
        as_of, k, memory_weight: as `MACEngine.answer` takes them.
        sources: largest number of documents to name as what an answer rests on.
        min_confidence: below this confidence the answer is "I don't know"; it is then not streamed, but comes at once.
        streaming: True to answer `invoke` by a stream, for callbacks that take single tokens; False to stream nothing.

    Raises:
        ConfigError: for an unknown argument. LangChain's `api_key`, `base_url`, `max_retries` and `timeout`, which are
            about a network, have no effect.
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
    streaming: bool | None = None  # False, where it is given, is LangChain's word for no streams at all

    _filtered: WhereMetadata | None = PrivateAttr(default=None)  # of the last call

    @model_validator(mode="before")
    @classmethod
    def _load(cls, given: dict[str, Any]) -> dict[str, Any]:
        given = check_names(cls, given, _NETWORK)
        name, engine = given.get("model"), given.get("engine")
        if engine is None:
            name = str(name or DEFAULT_MODEL)
            engine = MACEngine(name)
        elif isinstance(engine, MACEngine) and not name:
            name = name_of(engine.model)
        return {**given, "model": name, "engine": engine}

    @property
    def reads_instructions(self) -> bool:
        """True if the checkpoint's prompt format is `chat`."""
        return self.engine.model.config.prompt.chat

    # -- what LangChain asks about a model --

    @property
    def _llm_type(self) -> str:
        return "mac_rag"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """All that an answer depends on, and so the key of LangChain's caches: the bank as it is now, too."""
        names = (
            "model",
            "max_tokens",
            "temperature",
            "top_p",
            "seed",
            "stop",
            *(one.name for one in fields(Settings)),
        )
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
        """As LangChain's; so many questions at a time that the engine answers them in batches."""
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
        chunks = self._stream(messages, stop, None, **kwargs)
        while (chunk := await in_thread(next, chunks, None)) is not None:
            yield chunk

    def _call(self, messages: Sequence[BaseMessage], stop: list[str] | None, given: Mapping[str, Any]) -> Call:
        """Reads a call; raises if there is nothing to answer from."""
        engine, given = self.engine, dict(given)
        engine.bank.check_model(engine.model.fingerprint)
        contexts: Sequence[str] | None = given.pop("contexts", None)
        given.pop("stream", None)  # LangChain's switch between `_generate` and `_stream`
        settings = Settings(**{name: given.pop(name, getattr(self, name)) for name in _SETTINGS})
        usual = Sampling(self.temperature, self.top_p, self.seed, tuple(self.stop or ()))
        options = read_options({"stop": stop, **given}, usual, self.max_tokens, FRAMEWORK)
        question, before = self._question(messages)
        self._filtered = allowed = where(engine, settings.filters, self._filtered)
        use = settings.use_memory
        memory = remembers(engine, allowed, settings.as_of) if use is None else use
        if isinstance(contexts, str) or not all(isinstance(text, str) for text in contexts or ()):
            raise MACError(f"contexts is {contexts!r:.80}; give a list of texts, of documents their page_content")
        texts = None if contexts is None else tuple(text for text in contexts if text.strip())
        retrieves = texts is None and engine.retriever is not None
        if use is None and not (memory or texts or retrieves or self.reads_instructions):
            raise BankError(
                "there is nothing to answer from: the memory bank is empty, or holds nothing that the filters let "
                "pass, or that counts by then, and no context was given; adapt to some documents first "
                "(llm.engine.adapt(to_documents(documents))), or ask the LM alone with use_memory=False"
            )
        return Call(question, before, texts, memory, allowed, settings, options)

    def _question(self, messages: Sequence[BaseMessage]) -> tuple[str, tuple[Message, ...]]:
        """The question, and the conversation before it that the checkpoint reads."""
        if not self.reads_instructions:
            return last_question(said(messages), FRAMEWORK), ()
        conversation = read_conversation(said(messages), FRAMEWORK)
        last = conversation[-1].role if conversation else "nobody"
        if last != "user":
            raise PromptError(f"a conversation must end with a message of the user, but the last one is of {last}")
        return conversation[-1].text, conversation[:-1]

    def _read(self, call: Call) -> Read:
        """What the LM reads."""
        engine, longest = self.engine, call.options.max_new_tokens
        ids: tuple[str, ...] = ()
        texts = call.contexts
        if texts is None:
            [hits] = engine.retrieve([call.question], k=call.settings.k, **call.influence)
            ids, texts = tuple(hit.document_id for hit in hits), tuple(hit.text for hit in hits)
        if self.reads_instructions:
            prompt = conversation_prompt(engine.model, call.before, call.question, texts, longest)
        else:
            prompt = engine.model.fit_to_window(call.question, texts, overflow="truncate", max_new_tokens=longest)
        return Read(prompt, ids, texts)

    def _answered(self, call: Call) -> AIMessage:
        if self.reads_instructions:
            return self._answered_conversation(call)
        # The engine itself retrieves, for all questions of a batch.
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
        return answer_message(answer.text, usage_of(used, self._tokens(answer.text)), metadata)

    def _answered_conversation(self, call: Call) -> AIMessage:
        read = self._read(call)
        least = call.settings.min_confidence
        [answer] = self.engine.answer([read.prompt], min_confidence=least, **call.arguments)
        text = answer.text
        metadata = self._metadata(call, text, read.prompt.truncated, read.ids) | details_of(answer)
        metadata |= self._sources(call, read, answer)
        return answer_message(text, usage_of(len(read.prompt.ids), self._tokens(text)), metadata)

    def _streamed(self, call: Call) -> Iterator[AIMessageChunk]:
        if call.settings.min_confidence is not None:
            whole = self._answered(call)
            usage = whole.usage_metadata
            assert usage is not None
            yield last_chunk(str(whole.text), usage, whole.response_metadata)
            return
        read, text = self._read(call), ""
        for piece in self.engine.stream(read.prompt, **call.arguments):
            text += piece
            yield AIMessageChunk(content=piece)
        answer = Answer(text, read.prompt.contexts, read.ids, read.prompt.truncated)
        metadata = self._metadata(call, text, read.prompt.truncated, read.ids) | self._sources(call, read, answer)
        yield last_chunk("", usage_of(len(read.prompt.ids), self._tokens(text)), metadata)

    # -- what is told of an answer --

    def _sources(self, call: Call, read: Read, answer: Answer) -> dict[str, Any]:
        """The documents that an answer rests on, where the engine does not find them as it answers."""
        if not call.settings.sources or not (call.memory or read.ids):
            return {}
        found: tuple[Source, ...] = self.engine.sources(
            call.question,
            answer.guess or answer.text,
            most=call.settings.sources,
            texts=texts_read(read.ids, read.texts, read.prompt.contexts),
            use_memory=call.memory,
            **call.influence,
        )
        return {SOURCES: [source_record(source, answer.said) for source in found]} if found else {}

    def _metadata(self, call: Call, text: str, truncated: bool, ids: Sequence[str]) -> dict[str, Any]:
        if truncated and first_time("truncated"):
            logger.warning(
                "documents and the question are beyond the LM's window; the documents were shortened or left out: "
                "retrieve fewer or smaller ones (this is said once; every time, response_metadata['mac_truncated'] is "
                "true)"
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


def _together(config: RunnableConfig | list[RunnableConfig] | None) -> RunnableConfig | list[RunnableConfig]:
    """A configuration with room for a whole batch of the engine, where it names no number itself."""
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
    behind_prompt="; to ask about texts, hand them over: llm.invoke(question, contexts=[...]), or by a "
    "create_documents_chain",
    behind_system="; or leave the system message out",
    behind_tools="",
)

_ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "ai": "assistant",
    "assistant": "assistant",
}


def said(messages: Sequence[BaseMessage]) -> list[Said]:
    """The messages as texts."""
    return [Said(_role(message), str(message.text), _others(message)) for message in messages]


def _role(message: BaseMessage) -> str:
    name = message.role if isinstance(message, ChatMessage) else message.type.removesuffix("MessageChunk").lower()
    return _ROLES.get(name, name)


def _others(message: BaseMessage) -> tuple[str, ...]:
    """What a message holds beside text."""
    blocks = message.content if isinstance(message.content, list) else []
    kinds = [str(block.get("type")) for block in blocks if isinstance(block, dict) and block.get("type") != "text"]
    if isinstance(message, AIMessage) and message.tool_calls:
        kinds.append("calls of tools")
    return tuple(kinds)


def answer_message(text: str, usage: UsageMetadata, metadata: dict[str, Any]) -> AIMessage:
    """A whole answer."""
    return AIMessage(content=text, usage_metadata=usage, response_metadata=metadata)


def last_chunk(text: str, usage: UsageMetadata, metadata: dict[str, Any]) -> AIMessageChunk:
    """The end of an answer that comes piece by piece."""
    return AIMessageChunk(content=text, usage_metadata=usage, response_metadata=metadata, chunk_position="last")


def usage_of(prompt_tokens: int, answer_tokens: int) -> UsageMetadata:
    """Numbers of the LM's tokens."""
    total = prompt_tokens + answer_tokens
    return UsageMetadata(input_tokens=prompt_tokens, output_tokens=answer_tokens, total_tokens=total)


def create_documents_chain(
    llm: ChatMAC, *, question_key: str = "input", documents_key: str = "context"
) -> Runnable[dict[str, Any], AIMessage]:
    """What answers a question from documents: LangChain's `create_stuff_documents_chain`, without a prompt.

    A checkpoint that reads question and context has no use for the wording of a prompt. Here each document stays a
    document of its own, in the form of the training, and where the LM's window is short, the last ones are left out,
    never the question. It goes with `create_retrieval_chain`, which expects these keys.

    Examples:
        >>> from langchain_core.documents import Document
        >>> chain = create_documents_chain(ChatMAC(model="mac-tiny"))
        >>> text = "Edgar Flara will join the board of Rainga Press. The company employs 180 people."
        >>> chain.invoke({"input": "How many workers does Rainga Press have?", "context": [Document(text)]}).content
        '180'

    Args:
        llm: the chat model.
        question_key: the key of the question, a text.
        documents_key: the key of the documents, the best first.

    Returns:
        A runnable from a dictionary to a message; it streams, and batches, as the chat model does.
    """

    def ask(values: Mapping[str, Any]) -> Runnable[Any, AIMessage]:
        question, documents = values.get(question_key), values.get(documents_key)
        if not isinstance(question, str) or documents is None:
            raise MACError(
                f"a documents chain reads a question from {question_key!r} and documents from {documents_key!r}, and "
                f"the keys here are: {', '.join(map(str, values)) or 'none'}"
            )
        bound = llm.bind(contexts=[document.page_content for document in documents])
        return RunnableLambda(lambda _: question) | bound

    return RunnableLambda(ask, name="mac_documents_chain")
