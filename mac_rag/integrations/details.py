"""What is known of an answer beside its text, in the form in which frameworks carry it."""

from __future__ import annotations

from typing import Any

from mac_rag.data.types import Answer
from mac_rag.sources import source_record

SOURCES = "mac_sources"  # the documents that an answer rests on
CONFIDENCE = "mac_confidence"  # the probability that the LM's answer is right
GUESS = "mac_guess"  # the LM's answer where the response says "I don't know"


def details_of(answer: Answer) -> dict[str, Any]:
    """Confidence, guess and sources of an answer, as far as they were asked for; JSON takes all of them."""
    details: dict[str, Any] = {}
    if answer.confidence is not None:
        details[CONFIDENCE] = answer.confidence
    if answer.guess is not None:
        details[GUESS] = answer.guess
    if answer.sources:
        details[SOURCES] = [source_record(source) for source in answer.sources]
    return details
