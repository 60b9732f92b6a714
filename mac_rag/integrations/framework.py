"""What of a framework's own shows in our messages: the name of its LLM, and how it is asked there."""

from __future__ import annotations

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
