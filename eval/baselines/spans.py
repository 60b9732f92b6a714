"""Salient spans of a text: named entities by spaCy, or names, dates and numbers by rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from eval.baselines.weighting import SalientSpanWeights
from mac_rag.lm.text_tokenizer import Span
from pipelines.corpora.salient_spans import rule_spans

if TYPE_CHECKING:
    from spacy.language import Language

RULES = "rules for names, dates and numbers"


def spacy_spans(pipeline: Language) -> Callable[[str], Sequence[Span]]:
    """A function that finds the named entities of a text by a spaCy pipeline."""
    return lambda text: [(entity.start_char, entity.end_char) for entity in pipeline(text).ents]


def salient_spans() -> SalientSpanWeights:
    """Weights by an installed English spaCy pipeline, or else by the rules; the setting `spans` names the finder."""
    name = _pipeline()
    if name is None:
        return SalientSpanWeights(rule_spans, RULES)
    import spacy

    return SalientSpanWeights(spacy_spans(spacy.load(name)), f"spaCy {name}")


def _pipeline() -> str | None:
    """The name of an installed English pipeline: the published small one if it is there; None without any."""
    english = sorted(point.name for point in entry_points(group="spacy_models") if point.name.startswith("en_"))
    return "en_core_web_sm" if "en_core_web_sm" in english else next(iter(english), None)
