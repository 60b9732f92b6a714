"""What is known of an answer beside its text, in the form in which frameworks carry it."""

from __future__ import annotations

from typing import Any

from mac_rag.data.types import Answer
from mac_rag.model import MACModel
from mac_rag.sources import source_record

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
