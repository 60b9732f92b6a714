"""What a framework's messages say: a conversation for a checkpoint that follows instructions, else one question.

A checkpoint that reads question and context only follows no instructions. Asked to choose, judge, extract or rewrite,
it would answer some question from memory, and the framework would take that for a choice, a verdict or a new question.
So such requests are refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from mac_rag.errors import InstructionError, MACError
from mac_rag.integrations.framework import Framework, first_time
from mac_rag.lm.chat import Message

logger = logging.getLogger(__name__)

_LABEL = re.compile(r"\s*[^\s:][^\n:]{0,40}:(?:\s|$)")


@dataclass(frozen=True, slots=True)
class Said:
    """A message of a framework.

    Attributes:
        role: `system`, `user`, `assistant`, or the framework's name of any other role, such as a tool.
        text: its text.
        others: kinds of content in it that are no text, such as images.
    """

    role: str
    text: str
    others: tuple[str, ...] = ()


def read_conversation(said: Sequence[Said], framework: Framework) -> tuple[Message, ...]:
    """The messages as a checkpoint that follows instructions reads them.

    Raises:
        MACError: for results of tools, and for anything but text.
    """
    messages = []
    for one in said:
        if one.role not in ("system", "user", "assistant"):
            raise MACError(
                f"{framework.llm} reads messages of the system, the user and the assistant, not of the role "
                f"{one.role!r}; it calls no functions{framework.behind_tools}"
            )
        if one.others:
            raise MACError(
                f"{framework.llm} reads text only, but a message of the {one.role} holds {', '.join(one.others)}"
            )
        messages.append(Message(one.role, one.text))  # type: ignore[arg-type]
    return tuple(messages)


def last_question(said: Sequence[Said], framework: Framework) -> str:
    """The last user message, which is the question; warns once if there is an earlier conversation.

    Raises:
        InstructionError: for system messages, calls of tools, or a prompt in place of a question.
        MACError: when there is no user message, or it holds more than text.
    """
    for one in said:
        if one.role == "system" and one.text.strip():
            refuse_system_message(one.text, framework)
        if one.role not in ("system", "user", "assistant"):
            refuse("the chat holds the result of a tool", framework)
    users = [one for one in said if one.role == "user"]
    if not users:
        raise MACError(f"{framework.llm} answers the last user message, and there is none among the messages")
    if users[-1].others:
        raise MACError(
            f"{framework.llm} reads text only, but the last user message holds: {', '.join(users[-1].others)}"
        )
    check_question(users[-1].text, framework)
    if len(said) > 1:
        warn_of_history()
    return users[-1].text


def check_question(text: str, framework: Framework) -> None:
    """Checks that a text handed over as a whole is a question, and not a prompt to complete.

    A prompt has several paragraphs, lines that begin with a label ("Query: ..."), or an open label at its end
    ("Answer:"). A question has none of these, though it may have several lines.

    Raises:
        InstructionError: for a prompt.
    """
    body = text.strip()
    lines = body.splitlines()
    if body.endswith(":") or "" in (line.strip() for line in lines) or any(_LABEL.match(line) for line in lines[1:]):
        refuse(f"it is a prompt to complete, not a question ({_beginning(body)!r})", framework, framework.behind_prompt)


def refuse(reason: str, framework: Framework, remedy: str = "") -> NoReturn:
    """Raises the error for a request that only an LM which follows instructions can serve.

    Args:
        reason: what the request asks for; it ends the sentence "MACLLM cannot serve this request: ...".
        framework: the LLM.
        remedy: a remedy of this request beside the general one.
    """
    raise InstructionError(
        f"{framework.llm} cannot serve this request: {reason}. The checkpoint reads a question and its context, and "
        f"follows no instructions. {framework.other_llm}, one that follows instructions, or give "
        f"{framework.llm} a checkpoint whose prompt format is chat{remedy}"
    )


def refuse_system_message(text: str, framework: Framework) -> NoReturn:
    """Raises the error for a system message."""
    refuse(f"the chat has a system message or system prompt ({_beginning(text)!r})", framework, framework.behind_system)


def warn_of_history() -> None:
    """Warns once that earlier messages are not read."""
    if first_time("history"):
        logger.warning(
            "the checkpoint does not read the earlier messages of a chat: each question has to be complete by itself "
            "(this is said once)"
        )


def _beginning(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."
