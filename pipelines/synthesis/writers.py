"""The LMs that write: a local one of the Hugging Face kind, or any LlamaIndex LLM."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mac_rag.config import BaseLMConfig, PromptFormat
from mac_rag.errors import ConfigError, WorkerError
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.batching import length_buckets
from mac_rag.lm.chat import ChatPromptEncoder, Message
from mac_rag.lm.decoding import Sampling
from mac_rag.lm.devices import default_device, fastest_dtype
from mac_rag.lm.loading import load_tokenizer
from mac_rag.lm.text_tokenizer import TextTokenizer, text_tokenizer
from mac_rag.model.checkpoint import SHIPPED
from mac_rag.model.text_encoder import split
from mac_rag.retrieval.registry import import_object
from pipelines.synthesis.candidates import KINDS, SPAN_KINDS, Candidate
from pipelines.synthesis.prompts import Conversation, asking, most_tokens, reading

if TYPE_CHECKING:
    from llama_index.core.llms import LLM

_PASSAGE = 400  # most tokens of a passage
_LEAST_PASSAGE = 32
_ROOM = 160  # tokens for a question, its answer and the sentence around it, beside passage and examples
_CPU_BATCH, _GPU_BATCH = 4096, 65536  # padded tokens of a batch
_WORKERS = 4  # requests to a LlamaIndex LLM at the same time
_BASE_STOP = "\n\n"  # ends the text of an LM without a chat template


class Passage(NamedTuple):
    """A part of a document that the LM reads at once, and the number of its tokens."""

    text: str
    tokens: int


class Writer(ABC):
    """An LM that is asked in conversations.

    Args:
        texts: counts the tokens of texts, and cuts them.
        window: tokens that the LM reads and writes at once.
    """

    def __init__(self, texts: TextTokenizer, window: int) -> None:
        self._texts = texts
        self._around: dict[tuple[str, bool], int] = {}
        for kind in KINDS:
            asked = asking("", Candidate(kind, "x", "x") if kind in SPAN_KINDS else Candidate(kind))
            for answer, conversation in ((False, asked), (True, reading("", kind, ""))):
                self._around[kind, answer] = self._length(conversation) + most_tokens(kind, answer=answer)
        limit = window - _ROOM - max(self._around.values())
        if limit < _LEAST_PASSAGE:
            raise ConfigError(
                f"the LM reads {window:,} tokens at once, and the examples before a passage take "
                f"{window - limit:,}; take an LM with a longer window"
            )
        self._passage = min(limit, _PASSAGE)

    def passages(self, text: str) -> list[Passage]:
        """A document as passages of a few hundred tokens, cut at the ends of sentences as `mac-rag adapt` cuts.

        Raises:
            DocumentError: for a character that takes more tokens than a passage has.
        """
        return [Passage(chunk.text, len(chunk.ids)) for chunk in split(text.strip(), self._texts, self._passage)]

    def tokens(self, passage: Passage, kind: str) -> int:
        """Estimate of the most tokens that the LM reads and writes for a question on a passage and for its answer."""
        return 2 * passage.tokens + self._around[kind, False] + self._around[kind, True]

    def _length(self, conversation: Conversation) -> int:
        said = [conversation.instruction, *(part for pair in conversation.examples for part in pair)]
        return sum(len(self._texts.ids(text)) + 4 for text in [*said, conversation.request])

    @abstractmethod
    def write(self, conversations: Sequence[Conversation], most: Sequence[int]) -> list[str]:
        """The LM's reply to each conversation, greedy, in at most as many tokens as `most` says."""


class LocalWriter(Writer):
    """An LM on this machine, by its name as `base_lm.name` of a recipe takes it. Control tokens in documents stay text.

    It is asked by its chat template; one without a template continues a text.

    Raises:
        ModelLoadError: if it cannot be loaded.
    """

    def __init__(self, name: str) -> None:
        device = default_device(None)
        chat = bool(load_tokenizer(name).chat_template)
        config = BaseLMConfig(name=name, dtype=fastest_dtype(device))
        self._lm = BaseLM.load(config, PromptFormat(chat=chat), device)
        self._budget = _CPU_BATCH if device.type == "cpu" else _GPU_BATCH
        super().__init__(text_tokenizer(self._lm.tokenizer), self._lm.context_window)

    def write(self, conversations: Sequence[Conversation], most: Sequence[int]) -> list[str]:
        rows = [self._ids(conversation) for conversation in conversations]
        written = [""] * len(rows)
        stop = () if isinstance(self._lm.prompts, ChatPromptEncoder) else (_BASE_STOP,)
        for limit in sorted(set(most)):
            some = [row for row, tokens in enumerate(most) if tokens == limit]
            for bucket in length_buckets([len(rows[row]) + limit for row in some], self._budget):
                chosen = [some[place] for place in bucket]
                texts = self._lm.generate(
                    [rows[row] for row in chosen], None, max_new_tokens=limit, sampling=Sampling(stop=stop)
                )
                for row, text in zip(chosen, texts, strict=True):
                    written[row] = f"{conversations[row].opening} {text}".strip()
        return written

    def _ids(self, conversation: Conversation) -> list[int]:
        prompts = self._lm.prompts
        if isinstance(prompts, ChatPromptEncoder):
            ids = prompts.chat.ids(_messages(conversation, prompts.chat.takes_system))
            return [*ids, *prompts.texts.ids(conversation.opening)]
        shown = [f"{request}\n\n{answer}" for request, answer in conversation.examples]
        text = _BASE_STOP.join([conversation.instruction, *shown, conversation.request, conversation.opening])
        return [*prompts.start, *prompts.texts.ids(text)]


def _messages(conversation: Conversation, takes_system: bool) -> list[Message]:
    """The messages of a conversation; the instruction begins the first message if there is no system message."""
    turns: list[Message] = []
    for request, answer in conversation.examples:
        turns += [Message("user", request), Message("assistant", answer)]
    turns.append(Message("user", conversation.request))
    if takes_system:
        return [Message("system", conversation.instruction), *turns]
    return [Message("user", f"{conversation.instruction}\n\n{turns[0].text}"), *turns[1:]]


class LlamaIndexWriter(Writer):
    """A LlamaIndex LLM, asked by its `achat`, a few requests at a time.

    `spec` is the `module:attr` of an LLM, or of a function without arguments that makes one.
    """

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self._llm = _llama_index_llm(spec)
        window = self._llm.metadata.context_window
        # Its own tokenizer is not known; ours has tokens of about the same length.
        super().__init__(text_tokenizer(load_tokenizer(str(SHIPPED / "mac-small" / "base_lm"))), window)

    def write(self, conversations: Sequence[Conversation], most: Sequence[int]) -> list[str]:
        """As `Writer.write`; decoding and its limits are settings of the LLM."""
        try:
            return asyncio.run(self._write(conversations))
        except Exception as error:
            raise WorkerError(
                f"{self._spec} failed: {type(error).__name__}: {error}; the same command continues where it stopped"
            ) from error

    async def _write(self, conversations: Sequence[Conversation]) -> list[str]:
        from llama_index.core.async_utils import run_jobs
        from llama_index.core.llms import ChatMessage

        jobs = [
            self._llm.achat(
                [ChatMessage(role=message.role, content=message.text) for message in _messages(conversation, True)]
            )
            for conversation in conversations
        ]
        answers: list[Any] = await run_jobs(jobs, workers=_WORKERS)
        return [str(answer.message.content or "") for answer in answers]


def _llama_index_llm(spec: str) -> LLM:
    try:
        from llama_index.core.llms import LLM
    except ImportError:
        raise ConfigError(f"{spec} needs llama-index-core: install mac-rag[llama-index]") from None
    value = import_object(spec)
    llm = value if isinstance(value, LLM) or not callable(value) else value()
    if not isinstance(llm, LLM):
        raise ConfigError(f"{spec!r} is {type(llm).__name__}, and no LlamaIndex LLM")
    return llm


def make_writer(name: str) -> Writer:
    """The writer of a name: `module:attr` for a LlamaIndex LLM, anything else for a local LM.

    Raises:
        ConfigError, ModelLoadError: as `LlamaIndexWriter` and `LocalWriter`.
    """
    return LlamaIndexWriter(name) if ":" in name else LocalWriter(name)
