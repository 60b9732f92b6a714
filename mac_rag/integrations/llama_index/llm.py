"""MACLLM: the engine as a LlamaIndex LLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeAlias

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
)
from llama_index.core.bridge.pydantic import Field
from llama_index.core.callbacks import CallbackManager
from llama_index.core.instrumentation.events.llm import LLMPredictEndEvent, LLMPredictStartEvent
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import (
    astream_chat_response_to_tokens,
    astream_completion_response_to_tokens,
    stream_chat_response_to_tokens,
    stream_completion_response_to_tokens,
)
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.schema import MetadataMode
from llama_index.core.types import TokenAsyncGen, TokenGen
from llama_index.core.vector_stores.types import MetadataFilters
from llama_index_instrumentation import get_dispatcher

from mac_rag.engine import Answer, MACEngine
from mac_rag.errors import BankError, ConfigError, InstructionError
from mac_rag.integrations.framework import (
    Options,
    check_question,
    details_of,
    each_in_thread,
    in_thread,
    last_question,
    name_of,
    read_conversation,
    read_options,
    warn_of_empty_bank,
)
from mac_rag.integrations.llama_index.component import FilteringComponent
from mac_rag.integrations.llama_index.instructions import (
    FRAMEWORK,
    FilledTemplate,
    Request,
    check_template,
    plain_messages,
    read_slots,
    read_template,
)
from mac_rag.integrations.llama_index.instrumentation import NodeReader, listen, reported
from mac_rag.lm.decoding import GREEDY, Sampling
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.model import MACModel
from mac_rag.retrieval.base import Hit
from mac_rag.shipped_models import DEFAULT_MODEL

dispatcher = get_dispatcher(__name__)

# LlamaIndex subtracts its own prompt templates, the chat history and 500 tokens for refined answers from the window,
# all counted with another model's tokenizer, although none of them enters a MAC prompt. Without this reserve, it would
# refuse small windows, split a context that the LM can read as a whole, and fail after a few turns of a chat. With it,
# LlamaIndex splits no text that the LM could read: the engine, which counts the LM's own tokens, decides.
LLAMA_INDEX_RESERVE = 4096

Contexts: TypeAlias = Sequence[str] | FittedPrompt | None  # texts for one question, or its prompt with them


def refuse_structure() -> NoReturn:
    """Raises the error for structured output and tools, which need a checkpoint that follows instructions."""
    raise InstructionError(
        "MACLLM answers in plain text and supports neither structured output nor tools; "
        "give those steps another LLM (llm=...), or give MACLLM a checkpoint whose prompt format is chat"
    )


def _if_instructed(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of LlamaIndex's that raises an InstructionError for a checkpoint that follows no instructions."""

    @wraps(method)
    def checked(self: MACLLM, *args: Any, **kwargs: Any) -> Any:
        if not self.reads_instructions:
            refuse_structure()
        return method(self, *args, **kwargs)

    return checked


class MACLLM(CustomLLM, FilteringComponent, NodeReader):
    """A LlamaIndex LLM that answers through a `MACEngine`: from its memory bank, from retrieved context, or both.

    What the LM reads depends on the checkpoint's prompt format.

    **Templates of its own** (`mac-small`): the LM reads question and context in the format of its training, from the
    slots of LlamaIndex's prompt templates (see `read_slots`), and never the wording of templates or chat histories.
    `complete(question, contexts=...)` answers a question, `chat(messages)` the last user message. Components that give
    instructions (rerankers, evaluators, extractors, agents, rewriting steps of chat engines, system prompts) get an
    `InstructionError`, as do structured output, output parsers and tools.

    **`chat`**, around an instruct LM: the LM reads everything, through its chat template, with the memory as a prefix.

    - `chat(messages)` passes the conversation, `complete(prompt)` one user message, and a prompt template its messages
      with their wording, documents inside the user's turn. A conversation without a system message gets the one of the
      checkpoint's format. Output parsers, pydantic programs and ReAct agents work; the LM calls no functions.
    - If there is no wording, as in `complete(question, contexts=...)`, `MACSynthesizer`, or a template that is nothing
      but slots, question and documents have the format of the training.
    - The question in the slots (`query_str`), or else the last message, queries the memory. If the memory is empty,
      the LM answers alone.

    The async methods do not block the event loop; the streaming ones yield tokens as the LM generates them. Each call
    takes `max_tokens`, `temperature`, `top_p`, `seed` and `stop`.

    The LM reads the text of the nodes and none of their metadata, such as a file's path; `metadata_mode` changes that.
    If a context exceeds the LM's window, its end is left out and a warning is logged; retrieve fewer or smaller nodes,
    or use `MACSynthesizer`, which also keeps the nodes separate.

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
        sampling: how answers are decoded, unless a call says otherwise.
        sources: most documents that `raw["mac_sources"]` of a response names as what the answer rests on (see
            `MACEngine.answer`); streamed responses name none.
        min_confidence: if the confidence is below this value, the answer is "I don't know", and `raw` has the guess
            (`mac_guess`). `mac_confidence` is the confidence of every answer. Streams then have one piece.
        metadata_mode: the metadata of a node that the LM reads in front of its text: none, or with `MetadataMode.LLM`
            all but those in `node.excluded_llm_metadata_keys`.
        filters: filters for the documents that may influence an answer through the bank; give the retriever the same
            filters. For one request, `llm.model_copy(update={"filters": filters})` is cheap and shares the engine.
        as_of: the moment of the question, as `MACEngine.answer` takes it: later documents of the bank have no influence
            through it, nor through the engine's retriever. For one request, copy the LLM as for filters.
        callback_manager: LlamaIndex's callback manager.

    Raises:
        ConfigError: if both `model` and `engine` are given.
        ModelLoadError: if the model cannot be loaded.
    """

    model: str = Field(description="Name or path of the model; a description if it is an object.")
    use_memory: bool | None = Field(default=None, description="Whether to answer with the bank; None if it is filled.")
    max_new_tokens: int | None = Field(default=None, ge=1, description="Longest answer; None for the model's own.")
    sampling: Sampling = Field(default=GREEDY, description="How answers are decoded.")
    min_confidence: float | None = Field(default=None, ge=0, le=1, description="Below it, the answer is withheld.")
    sources: int = Field(default=0, ge=0, description="Most sources that a response names.")

    def __init__(
        self,
        model: str | Path | MACModel | None = None,
        *,
        engine: MACEngine | None = None,
        use_memory: bool | None = None,
        max_new_tokens: int | None = None,
        sampling: Sampling = GREEDY,
        sources: int = 0,
        min_confidence: float | None = None,
        metadata_mode: MetadataMode = MetadataMode.NONE,
        filters: MetadataFilters | None = None,
        as_of: str | datetime | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        if engine is not None and model is not None:
            raise ConfigError(f"give model or engine, not both; the engine already holds a model (got model={model!r})")
        if engine is not None:
            name = name_of(engine.model)
        elif isinstance(model, MACModel):
            name, engine = name_of(model), MACEngine(model)
        else:
            name = str(model or DEFAULT_MODEL)
            engine = MACEngine(name)
        super().__init__(
            model=name,
            use_memory=use_memory,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            sources=sources,
            min_confidence=min_confidence,
            metadata_mode=metadata_mode,
            filters=filters,
            as_of=as_of,
            callback_manager=callback_manager or CallbackManager([]),
        )
        self._engine = engine
        listen()

    @classmethod
    def class_name(cls) -> str:
        return "MACLLM"

    @property
    def reads_instructions(self) -> bool:
        """True if the checkpoint's prompt format is `chat`."""
        return self.engine.model.config.prompt.chat

    @property
    def metadata(self) -> LLMMetadata:
        """Sizes that LlamaIndex plans with. If the LM does not read its prompts, the window has a reserve for them."""
        model = self.engine.model
        return LLMMetadata(
            context_window=model.context_window + (0 if self.reads_instructions else LLAMA_INDEX_RESERVE),
            num_output=self.max_new_tokens or model.config.max_new_tokens,
            is_chat_model=self.reads_instructions,
            model_name=self.model,
        )

    # -- the engine --

    @property
    def answers_from_memory(self) -> bool:
        """True if the bank has influence on answers."""
        return self.remembers if self.use_memory is None else self.use_memory

    def _settings(self, request: Request, options: Options) -> dict[str, Any]:
        """Keyword arguments for one call of the engine; raises if there is nothing to answer from."""
        engine, contexts = self.engine, request.contexts
        engine.bank.check_model(engine.model.fingerprint)
        use_memory = self.answers_from_memory
        retrieves = contexts is None and engine.retriever is not None
        texts = contexts.contexts if isinstance(contexts, FittedPrompt) else contexts
        if self.use_memory is None and not (use_memory or texts or retrieves or self.reads_instructions):
            raise BankError(
                "there is nothing to answer from: the memory bank is empty, or holds no document that passes the "
                "filters and counts at as_of, and no context was given; adapt to some documents first (MemoryWriter, "
                "or llm.engine.adapt), or ask the LM alone with use_memory=False"
            )
        return {
            "use_memory": use_memory,
            "max_new_tokens": options.max_new_tokens,
            "sampling": options.sampling,
            "allowed": self.allowed,
            "as_of": self.as_of,
        }

    def fit_to_window(self, question: str, texts: Sequence[str], max_new_tokens: int | None = None) -> FittedPrompt:
        """Builds a prompt of question and texts that fits the LM's window.

        Documents that the model reads from the bank do not stand in it (see `MACEngine.fit`). If texts are truncated or
        left out, it fires a `DocumentsTruncatedEvent`, and the first time it logs a warning.

        Args:
            question: the question.
            texts: the texts to answer from, the best first.
            max_new_tokens: longest answer, for which the prompt leaves room; None for that of the LLM.

        Raises:
            DocumentError: for an empty question, or one that alone exceeds the window.
        """
        room = max_new_tokens or self.max_new_tokens

        def write(some: Sequence[str]) -> FittedPrompt:
            prompt = self.engine.model.fit_to_window(question, some, overflow="truncate", max_new_tokens=room)
            return reported(prompt, some)

        return self._fit(texts, write)

    def _fit(self, texts: Sequence[str], write: Callable[[Sequence[str]], FittedPrompt]) -> FittedPrompt:
        hits = [Hit("", text, 0.0) for text in texts]
        return self.engine.fit(hits, write, use_memory=self.answers_from_memory, allowed=self.allowed, as_of=self.as_of)

    def _fit_conversation(
        self, messages: Sequence[ChatMessage], question: str, texts: Sequence[str], max_new_tokens: int | None
    ) -> FittedPrompt:
        """A conversation as the LM reads it; `texts` in its messages may be truncated."""
        prompt = self.engine.model.fit_conversation(
            read_conversation(plain_messages(messages), FRAMEWORK),
            question=question or None,
            contexts=texts,
            max_new_tokens=max_new_tokens,
        )
        return reported(prompt, texts)

    def _call(self, request: Request, options: Options) -> tuple[str | FittedPrompt, dict[str, Any]]:
        """The arguments of one call of the engine: a fitted prompt, or a question for which it may retrieve."""
        settings, contexts = self._settings(request, options), request.contexts
        if isinstance(contexts, FittedPrompt):
            return contexts, settings
        if request.messages is not None:
            room = options.max_new_tokens
            return self._fit_conversation(request.messages, request.question, contexts or (), room), settings
        if contexts is None:
            return request.question, settings
        return self.fit_to_window(request.question, contexts, options.max_new_tokens), settings

    def _answer(self, request: Request, options: Options) -> Answer:
        prompt, settings = self._call(request, options)
        [answer] = self.engine.answer([prompt], sources=self.sources, min_confidence=self.min_confidence, **settings)
        note(answer)
        return answer

    def _stream(self, request: Request, options: Options) -> Iterator[tuple[str, str]]:
        """Yields the answer so far and its newest piece. Errors are raised at the call, not at the first piece."""
        if self.min_confidence is not None:
            return accumulate(iter([self._answer(request, options).text]))
        prompt, settings = self._call(request, options)
        return accumulate(self.engine.stream(prompt, **settings))

    def _completion(
        self, prompt: str, is_question: bool, contexts: Contexts = None, **options: Any
    ) -> tuple[Request, Options]:
        """A completion, as a question with its contexts or as a message of the user; and how it is decoded."""
        decoding = read_options(options, self.sampling, self.max_new_tokens, FRAMEWORK)
        if self.reads_instructions and contexts is None and self.engine.retriever is None:
            return Request(prompt, messages=(ChatMessage(role=MessageRole.USER, content=prompt),)), decoding
        if not is_question and contexts is None and not self.reads_instructions:
            check_question(prompt, FRAMEWORK)
        texts = contexts if contexts is None or isinstance(contexts, FittedPrompt) else tuple(contexts)
        return Request(prompt, texts), decoding

    def _conversation(
        self, messages: Sequence[ChatMessage], question: str | None = None, contexts: Contexts = None, **options: Any
    ) -> tuple[Request, Options]:
        decoding = read_options(options, self.sampling, self.max_new_tokens, FRAMEWORK)
        if not self.reads_instructions:
            return Request(last_question(plain_messages(messages), FRAMEWORK)), decoding
        fitted = contexts if isinstance(contexts, FittedPrompt) else tuple(contexts or ())
        return Request(question or "", fitted, messages=tuple(messages)), decoding

    # -- questions --

    @llm_completion_callback()
    def complete(
        self, prompt: str, formatted: bool = False, *, contexts: Contexts = None, **kwargs: Any
    ) -> CompletionResponse:
        """Answers `prompt`: a question, or for a checkpoint that follows instructions any message.

        Args:
            prompt: the question or message.
            formatted: True if `prompt` is known to be a question; it is then not checked.
            contexts: texts to answer from, the best first, or the result of `fit_to_window`; None for those of the
                engine's retriever, if it has one.
            kwargs: `max_tokens`, the longest answer, and `temperature`, `top_p`, `seed` and `stop` (see `Sampling`).

        Raises:
            InstructionError: if `prompt` is a prompt to complete and not a question.
            BankError: for an empty bank, if memory is required or there is no context either.
            FingerprintError: if another model wrote the bank.
            DocumentError: for an empty question, or one that alone exceeds the LM's window.
            MACError: for any other option.
        """
        return completion_response(self._answer(*self._completion(prompt, formatted, contexts, **kwargs)))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """As `complete`."""
        return completion_response(await in_thread(self._answer, *self._completion(prompt, formatted, **kwargs)))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """As `complete`, token by token; errors come at the call."""
        pieces = self._stream(*self._completion(prompt, formatted, **kwargs))
        return (CompletionResponse(text=text, delta=piece) for text, piece in pieces)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """As `stream_complete`."""
        pieces = each_in_thread(await in_thread(self._stream, *self._completion(prompt, formatted, **kwargs)))
        return (CompletionResponse(text=text, delta=piece) async for text, piece in pieces)

    @llm_chat_callback()
    def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        question: str | None = None,
        contexts: Contexts = None,
        **kwargs: Any,
    ) -> ChatResponse:
        """Answers a conversation; a checkpoint that follows no instructions reads only the last user message.

        Args:
            messages: the conversation.
            question: the question that queries the memory; None for the last message.
            contexts: texts in the messages that may be truncated if the conversation exceeds the LM's window; or the
                prompt that the LM reads in place of the messages.
            kwargs: options as `complete` takes them.

        Raises:
            InstructionError: for system messages, results of tools, or a prompt to complete in place of a question, if
                the checkpoint follows no instructions.
            PromptError: for a conversation that the chat template refuses, or that exceeds the window.
            MACError: if there is no user message, or one holds more than text; and as `complete`.
        """
        answer = self._answer(*self._conversation(messages, question, contexts, **kwargs))
        return chat_response(answer.text, raw=raw_of(answer))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As `chat`."""
        answer = await in_thread(self._answer, *self._conversation(messages, **kwargs))
        return chat_response(answer.text, raw=raw_of(answer))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """As `chat`, token by token; errors come at the call."""
        return (chat_response(*pieces) for pieces in self._stream(*self._conversation(messages, **kwargs)))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """As `stream_chat`."""
        pieces = each_in_thread(await in_thread(self._stream, *self._conversation(messages, **kwargs)))
        return (chat_response(text, piece) async for text, piece in pieces)

    # -- prompt templates: a checkpoint that follows instructions reads their wording, any other only their slots --

    def predict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        """Answers a prompt template; see `read_template` and `read_slots`.

        Raises:
            InstructionError: for a template that asks for anything other than the answer to a question, if the
                checkpoint follows no instructions.
            MACError: if the slots hold no question; and as `complete`.
        """
        request = self._request(prompt, prompt_args)
        answer = request.settled
        if answer is None and request.messages is not None:
            answer = self._parse_output(self.chat(request.messages, contexts=request.contexts).message.content or "")
        elif answer is None:
            answer = self.complete(request.question, formatted=True, contexts=request.contexts).text
        dispatcher.event(LLMPredictEndEvent(output=answer))
        return answer

    async def apredict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        """As `predict`."""
        return await in_thread(self.predict, prompt, **prompt_args)

    def stream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> TokenGen:
        """As `predict`, token by token."""
        request = self._request(prompt, prompt_args)
        if request.settled is not None:
            return (token for token in [request.settled])
        if request.messages is not None:
            return stream_chat_response_to_tokens(self.stream_chat(request.messages, contexts=request.contexts))
        return stream_completion_response_to_tokens(
            self.stream_complete(request.question, formatted=True, contexts=request.contexts)
        )

    async def astream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> TokenAsyncGen:
        """As `stream`."""
        request = await in_thread(self._request, prompt, prompt_args)
        if request.settled is not None:
            return single(request.settled)
        if request.messages is not None:
            return await astream_chat_response_to_tokens(
                await self.astream_chat(request.messages, contexts=request.contexts)
            )
        return await astream_completion_response_to_tokens(
            await self.astream_complete(request.question, formatted=True, contexts=request.contexts)
        )

    def _request(self, prompt: BasePromptTemplate, prompt_args: Mapping[str, Any]) -> Request:
        """Announces a prediction as LlamaIndex's own LLMs do, and reads the template."""
        dispatcher.event(LLMPredictStartEvent(template=prompt, template_args=dict(prompt_args)))
        self._log_template_data(prompt, **prompt_args)
        if self.reads_instructions:
            template = read_template(self, prompt, prompt_args)
            request = read_slots(prompt, prompt_args) if template is None else self._filled(template)
        else:
            if self.output_parser is not None:
                refuse_structure()
            check_template(prompt, self)
            request = read_slots(prompt, prompt_args)
        texts = request.contexts.contexts if isinstance(request.contexts, FittedPrompt) else request.contexts
        if texts and self.use_memory is None and not len(self.engine.snapshot):
            warn_of_empty_bank("MACLLM answers from the retrieved texts alone", self.engine.snapshot)
        return request

    def _filled(self, template: FilledTemplate) -> Request:
        def write(some: Sequence[str]) -> FittedPrompt:
            return self._fit_conversation(template.fill(some), template.question, some, self.max_new_tokens)

        messages = tuple(template.fill(template.texts))
        return Request(template.question, self._fit(template.texts, write), messages=messages)

    # -- structured output and tools: LlamaIndex's, only for checkpoints that follow instructions --

    structured_predict: ClassVar[Callable[..., Any]] = _if_instructed(CustomLLM.structured_predict)
    astructured_predict: ClassVar[Callable[..., Any]] = _if_instructed(CustomLLM.astructured_predict)
    stream_structured_predict: ClassVar[Callable[..., Any]] = _if_instructed(CustomLLM.stream_structured_predict)
    astream_structured_predict: ClassVar[Callable[..., Any]] = _if_instructed(CustomLLM.astream_structured_predict)
    as_structured_llm: ClassVar[Callable[..., Any]] = _if_instructed(CustomLLM.as_structured_llm)
    predict_and_call: ClassVar[Callable[..., Any]] = _if_instructed(CustomLLM.predict_and_call)
    apredict_and_call: ClassVar[Callable[..., Any]] = _if_instructed(CustomLLM.apredict_and_call)


# LlamaIndex passes on only the text of a prediction. The whole answers are collected in this list.
_answers: ContextVar[list[Answer] | None] = ContextVar("answers", default=None)


@contextmanager
def noting() -> Iterator[list[Answer]]:
    """Yields a list that collects every answer of a `MACLLM` within the block, also from other threads."""
    answers: list[Answer] = []
    token = _answers.set(answers)
    try:
        yield answers
    finally:
        _answers.reset(token)


def note(answer: Answer) -> None:
    """Appends an answer to the list of the innermost `noting`, if there is one."""
    answers = _answers.get()
    if answers is not None:
        answers.append(answer)


def accumulate(pieces: Iterator[str]) -> Iterator[tuple[str, str]]:
    """Yields the text so far and its newest piece."""
    text = ""
    for piece in pieces:
        text += piece
        yield text, piece


async def single(text: str) -> TokenAsyncGen:
    """Yields one text."""
    yield text


def completion_response(answer: Answer) -> CompletionResponse:
    """An answer as a completion."""
    return CompletionResponse(text=answer.text, raw=raw_of(answer))


def chat_response(text: str, delta: str | None = None, raw: dict[str, Any] | None = None) -> ChatResponse:
    """An answer as a message of the assistant."""
    return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=delta, raw=raw)


def raw_of(answer: Answer) -> dict[str, Any] | None:
    """Confidence, guess and sources of an answer, for `raw` of LlamaIndex's responses; None if there are none."""
    return details_of(answer) or None
