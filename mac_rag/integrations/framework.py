"""Code shared by the LlamaIndex and LangChain integrations: messages, conversations, options, details, threads."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary

from mac_rag.bank.entries import Entry
from mac_rag.bank.interface import Bank, BankContents
from mac_rag.bank.known_documents import KnownDocuments
from mac_rag.data.dates import AsOf, moment_of_question
from mac_rag.data.types import Answer
from mac_rag.engine import MACEngine
from mac_rag.errors import InstructionError, MACError
from mac_rag.lm.chat import Message
from mac_rag.lm.decoding import Sampling
from mac_rag.model import MACModel
from mac_rag.sources import source_record

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Framework:
    """Wording about the LLM of one framework, for errors and warnings.

    Attributes:
        llm: the name of the class.
        options: the options of a call, as a list in a sentence.
        other_llm: how to use another LLM for a request; a sentence.
        prompt_remedy: the remedy for a prompt in place of a question; it continues the sentence `other_llm`.
        system_remedy: the same for a system message.
        tool_remedy: the remedy for the result of a tool, for a checkpoint that reads whole conversations.
    """

    llm: str
    options: str
    other_llm: str
    prompt_remedy: str
    system_remedy: str
    tool_remedy: str


_lock = threading.Lock()
_topics: set[str] = set()


def first_time(topic: str) -> bool:
    """True for the first call with this topic in this process.

    Examples:
        >>> first_time("an example"), first_time("an example")
        (True, False)
    """
    with _lock:
        is_first = topic not in _topics
        _topics.add(topic)
        return is_first


def warn_of_empty_bank(what: str, bank: BankContents) -> None:
    """Warns, once for each bank, that the bank is empty although there are documents.

    Args:
        what: the consequence, which begins the message.
        bank: the bank.
    """
    place = "in this process's memory" if bank.path is None else f"{bank.path}"
    if first_time(f"empty bank {place}"):
        logger.warning(
            "%s: the memory bank %s is empty: it is not filled yet, or lost; open the bank that was filled, or fill "
            "this one from an index, docstore or vector store: MemoryWriter.from_index(index, engine) (shown once)",
            what,
            place,
        )


@dataclass(frozen=True, slots=True)
class Options:
    """Decoding options of one call.

    Attributes:
        sampling: how tokens are chosen, and what ends the answer.
        max_new_tokens: longest answer; None for the model's configured length.
    """

    sampling: Sampling
    max_new_tokens: int | None


def read_options(
    options: Mapping[str, Any], sampling: Sampling, max_new_tokens: int | None, framework: Framework
) -> Options:
    """The options of a call: `temperature`, `top_p`, `seed`, `stop` (a string or several) and `max_tokens`.

    Args:
        options: the keyword arguments of the call; None as a value means the LLM's default.
        sampling, max_new_tokens: the LLM's defaults.
        framework: wording for errors.

    Raises:
        ConfigError: for a value outside of its range.
        MACError: for any other option, or a `max_tokens` below 1; names it.
    """
    values = {name: value for name, value in options.items() if value is not None}
    max_tokens = values.pop("max_tokens", max_new_tokens)
    refused = {name: value for name, value in values.items() if name not in ("temperature", "top_p", "seed", "stop")}
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        refused["max_tokens"] = max_tokens
    if refused:
        named = ", ".join(f"{name}={value!r}" for name, value in sorted(refused.items()))
        raise MACError(
            f"{framework.llm} does not support {named}: its options are {framework.options}; it calls no tools by "
            "itself"
        )
    if "stop" in values:
        values["stop"] = (values["stop"],) if isinstance(values["stop"], str) else tuple(values["stop"])
    return Options(replace(sampling, **values), max_tokens)


SOURCES = "mac_sources"  # the documents that an answer rests on
CONFIDENCE = "mac_confidence"  # the probability that the LM's answer is right
TRUNCATED = "mac_truncated"  # True if documents were cut or left out to fit the LM's window
ATTENTION = "mac_attention"  # a document's share of the question's attention
GUESS = "mac_guess"  # the LM's answer if the response says "I don't know" instead


def details_of(answer: Answer) -> dict[str, Any]:
    """Confidence, guess and sources of an answer, as far as they were requested, in values that JSON can hold."""
    details: dict[str, Any] = {}
    if answer.confidence is not None:
        details[CONFIDENCE] = answer.confidence
    if answer.guess is not None:
        details[GUESS] = answer.guess
    if answer.sources:
        details[SOURCES] = [source_record(source, answer.said) for source in answer.sources]
    return details


def name_of(model: MACModel) -> str:
    """A name for a model that was given as an object."""
    return f"{model.config.base_lm.name} with MAC {model.fingerprint[:12]}"


# A framework's messages are a conversation for a checkpoint that follows instructions, and one question for any other.
#
# A checkpoint that reads only question and context follows no instructions. If a component told it to choose, judge,
# extract or rewrite, it would answer some question from memory, and the framework would take that for a choice, a
# verdict or a new question. So such requests are refused.
_LABEL = re.compile(r"\s*[^\s:][^\n:]{0,40}:(?:\s|$)")


@dataclass(frozen=True, slots=True)
class PlainMessage:
    """A message of either framework.

    Attributes:
        role: `system`, `user`, `assistant`, or the framework's name of any other role, such as a tool.
        text: its text.
        others: kinds of its content other than text, such as images.
    """

    role: str
    text: str
    others: tuple[str, ...] = ()


def read_conversation(messages: Sequence[PlainMessage], framework: Framework) -> tuple[Message, ...]:
    """The messages as a checkpoint that follows instructions reads them.

    Raises:
        MACError: for results of tools, and for content other than text.
    """
    conversation = []
    for one in messages:
        if one.role not in ("system", "user", "assistant"):
            raise MACError(
                f"{framework.llm} reads messages of the system, the user and the assistant, not of the role "
                f"{one.role!r}; it calls no functions{framework.tool_remedy}"
            )
        if one.others:
            raise MACError(
                f"{framework.llm} reads text only, but a message of the {one.role} holds {', '.join(one.others)}; "
                "leave that out"
            )
        conversation.append(Message(one.role, one.text))  # type: ignore[arg-type]
    return tuple(conversation)


def last_question(messages: Sequence[PlainMessage], framework: Framework) -> str:
    """The last user message, which is the question; warns once if there is an earlier conversation.

    Raises:
        InstructionError: for system messages, results of tools, or a prompt in place of a question.
        MACError: if there is no user message, or it holds more than text.
    """
    for one in messages:
        if one.role == "system" and one.text.strip():
            refuse_system_message(one.text, framework)
        if one.role not in ("system", "user", "assistant"):
            refuse("the chat holds the result of a tool", framework)
    users = [one for one in messages if one.role == "user"]
    if not users:
        raise MACError(f"{framework.llm} answers the last user message, but the chat has none; add one")
    if users[-1].others:
        raise MACError(
            f"{framework.llm} reads text only, but the last user message holds: {', '.join(users[-1].others)}; "
            "leave that out"
        )
    check_question(users[-1].text, framework)
    if len(messages) > 1:
        warn_of_history()
    return users[-1].text


def check_question(text: str, framework: Framework) -> None:
    """Checks that a text without a template is a question, and not a prompt to complete.

    A prompt has several paragraphs, lines that begin with a label ("Query: ..."), or an open label at its end
    ("Answer:"). A question has none of these, though it may have several lines.

    Raises:
        InstructionError: for a prompt.
    """
    body = text.strip()
    lines = body.splitlines()
    if body.endswith(":") or "" in (line.strip() for line in lines) or any(_LABEL.match(line) for line in lines[1:]):
        refuse(f"it is a prompt to complete, not a question ({_beginning(body)!r})", framework, framework.prompt_remedy)


def refuse(reason: str, framework: Framework, remedy: str = "") -> NoReturn:
    """Raises the error for a request that only an LM which follows instructions can serve.

    Args:
        reason: what the request asks for; it ends the sentence "MACLLM cannot serve this request: ...".
        framework: wording for the error.
        remedy: a remedy for this request, in addition to the general one.
    """
    raise InstructionError(
        f"{framework.llm} cannot serve this request: {reason}. The checkpoint reads a question and its context, and "
        f"follows no instructions. {framework.other_llm}, one that follows instructions, or give "
        f"{framework.llm} a checkpoint whose prompt format is chat{remedy}"
    )


def refuse_system_message(text: str, framework: Framework) -> NoReturn:
    """Raises the error for a system message."""
    refuse(f"the chat has a system message or system prompt ({_beginning(text)!r})", framework, framework.system_remedy)


def warn_of_history() -> None:
    """Warns once that earlier messages are not read."""
    if first_time("history"):
        logger.warning(
            "the checkpoint does not read the earlier messages of a chat: each question has to be complete by itself "
            "(shown once)"
        )


def _beginning(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

# Two full batches of the engine: one that it answers, and one that waits. With asyncio's own threads, six on two cores,
# no batch could be larger than six.
_THREADS = 64


async def in_thread(
    function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> _Result:
    """As `asyncio.to_thread`, but with `_THREADS` threads."""
    call = partial(contextvars.copy_context().run, function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_pool(), call)


async def each_in_thread(items: Iterator[_Result]) -> AsyncIterator[_Result]:
    """The items of an iterator, none of which is None; each is made in a thread."""
    while (item := await in_thread(next, items, None)) is not None:
        yield item


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="mac_rag")


if hasattr(os, "register_at_fork"):  # a forked process inherits the pool without its threads
    os.register_at_fork(after_in_child=_pool.cache_clear)


_Filters = TypeVar("_Filters")


class PassingDocuments(Container[str], ABC, Generic[_Filters]):
    """The ids of the documents in an engine's bank that pass filters. Follows changes of the bank.

    A document that the bank does not hold never passes.

    Args:
        engine: the engine of the bank.
        filters: the filters; objects with equal filters are equal.
    """

    def __init__(self, engine: MACEngine, filters: _Filters) -> None:
        self._engine = engine
        self.filters = filters
        self._passing: tuple[BankContents, frozenset[str]] | None = None

    @property
    def key(self) -> object:
        """A key that is equal for filters that let the same documents pass."""
        return self.filters

    @abstractmethod
    def passes(self, document_id: str, metadata: Mapping[str, Any]) -> bool:
        """True if a document passes."""

    def __contains__(self, document_id: object) -> bool:
        return document_id in self._current()

    def __len__(self) -> int:
        return len(self._current())

    # Equality lets requests with equal filters share a batch, although each has an object of its own.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PassingDocuments):
            return NotImplemented
        return type(self) is type(other) and self._engine is other._engine and self.key == other.key

    def __hash__(self) -> int:
        return hash(id(self._engine))

    def _current(self) -> frozenset[str]:
        snapshot = self._engine.snapshot
        passing = self._passing
        if passing is None or passing[0] is not snapshot:
            names = (name for entry in snapshot for name in self._passing_members(entry))
            self._passing = passing = (snapshot, frozenset(names))
        return passing[1]

    def _passing_members(self, entry: Entry) -> Iterator[str]:
        return (member.document_id for member in entry.members if self.passes(member.document_id, member.metadata))


def remembers(engine: MACEngine, allowed: PassingDocuments[Any] | None, as_of: AsOf) -> bool:
    """True if a bank holds a document that may have influence.

    Args:
        engine: the engine of the bank.
        allowed: the documents that may have influence; None for all.
        as_of: the moment of the question, as `MACEngine.answer` takes it.

    Raises:
        DataError: for an `as_of` that is not a date.
    """
    snapshot, moment = engine.snapshot, moment_of_question(as_of)
    if moment is None and not snapshot.supersedes:
        return bool(len(snapshot) if allowed is None else len(allowed))
    return bool(KnownDocuments(snapshot, moment, allowed).rows_of(snapshot).any())


# Bank -> a name that is unique across processes.
_names: WeakKeyDictionary[Bank, str] = WeakKeyDictionary()


def bank_state(bank: Bank) -> str:
    """Name and version of a bank: equal for equal contents of one bank object, and unique across processes."""
    return f"{_names.setdefault(bank, uuid4().hex)}/{bank.version}"
