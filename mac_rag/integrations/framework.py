"""What of a framework's own shows in our messages: the name of its LLM, and how it is asked there."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mac_rag.data.types import Answer
from mac_rag.errors import MACError
from mac_rag.lm.decoding import Sampling
from mac_rag.model import MACModel
from mac_rag.sources import source_record


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


@dataclass(frozen=True, slots=True)
class Options:
    """How one call is answered.

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
        options: the keyword arguments of the call; None stands for what the LLM does otherwise.
        sampling, max_new_tokens: what the LLM does otherwise.
        framework: the LLM, for errors.

    Raises:
        ConfigError: for a value outside of its range.
        MACError: for any other option, or a `max_tokens` below 1; names it.
    """
    given = {name: value for name, value in options.items() if value is not None}
    max_tokens = given.pop("max_tokens", max_new_tokens)
    refused = {name: value for name, value in given.items() if name not in ("temperature", "top_p", "seed", "stop")}
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        refused["max_tokens"] = max_tokens
    if refused:
        named = ", ".join(f"{name}={value!r}" for name, value in sorted(refused.items()))
        raise MACError(
            f"{framework.llm} does not support {named}: its options are {framework.options}; it calls no tools by "
            "itself"
        )
    if "stop" in given:
        given["stop"] = (given["stop"],) if isinstance(given["stop"], str) else tuple(given["stop"])
    return Options(replace(sampling, **given), max_tokens)


SOURCES = "mac_sources"  # the documents that an answer rests on
CONFIDENCE = "mac_confidence"  # the probability that the LM's answer is right
TRUNCATED = "mac_truncated"  # True if documents were cut or left out to fit the LM's window
ATTENTION = "mac_attention"  # of a document: the share of the question's attention on it
GUESS = "mac_guess"  # the LM's answer where the response says "I don't know"


def details_of(answer: Answer) -> dict[str, Any]:
    """Confidence, guess and sources of an answer, as far as they were asked for; JSON takes all of them."""
    details: dict[str, Any] = {}
    if answer.confidence is not None:
        details[CONFIDENCE] = answer.confidence
    if answer.guess is not None:
        details[GUESS] = answer.guess
    if answer.sources:
        details[SOURCES] = [source_record(source, answer.said) for source in answer.sources]
    return details


def name_of(model: MACModel) -> str:
    """A name for a model that is an object."""
    return f"{model.config.base_lm.name} with MAC {model.fingerprint[:12]}"
