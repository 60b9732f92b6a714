"""What of a framework's own shows in our messages: the name of its LLM, and how it is asked there."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Framework:
    """The LLM of one framework, in words for errors and warnings.

    Attributes:
        llm: the name of the class.
        options: the options of a call, as a list in a sentence.
        other_llm: how to take another LLM for a request; a sentence.
        behind_prompt: the remedy for a prompt in place of a question; it goes on behind that sentence.
        behind_system: the same for a system message.
        behind_tools: the same for the result of a tool, in a conversation that a checkpoint reads as a whole.
    """

    llm: str
    options: str
    other_llm: str
    behind_prompt: str
    behind_system: str
    behind_tools: str


_lock = threading.Lock()
_given: set[str] = set()


def first_time(topic: str) -> bool:
    """True at the first call of this process with this topic.

    Examples:
        >>> first_time("an example"), first_time("an example")
        (True, False)
    """
    with _lock:
        is_first = topic not in _given
        _given.add(topic)
        return is_first


def forget_warnings() -> None:
    """Lets every warning be given once more."""
    with _lock:
        _given.clear()
