"""Salient spans and the token weights they give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eval.baselines.spans import RULES, rule_spans, salient_spans, spacy_spans
from eval.baselines.weighting import Passage, SalientSpanWeights, UniformWeights, passages, weighted_loss
from mac_rag.model import MACModel

TEXT = (
    "On May 3, 1999 the Lund Bank paid $1,200.50 to Ada Voss. Rain fell. It was her 2nd prize from University of Kell."
)


def test_rules_find_names_dates_and_numbers() -> None:
    found = {TEXT[first:end] for first, end in rule_spans(TEXT)}
    assert {"May 3, 1999", "Lund Bank", "$1,200.50", "Ada Voss", "2nd", "University of Kell"} <= found
    covered = {TEXT[place] for first, end in rule_spans(TEXT) for place in range(first, end)}
    assert covered
    for ordinary in ("Rain", "It ", "paid", "prize"):
        at = TEXT.index(ordinary)
        assert not any(first <= at < end for first, end in rule_spans(TEXT)), ordinary


@given(st.text(alphabet=st.sampled_from("aB é.Ü1,\n$-'\"(May 3")) | st.text())
def test_spans_lie_inside_the_text(text: str) -> None:
    assert all(0 <= first < end <= len(text) for first, end in rule_spans(text))


def test_the_result_names_what_found_the_spans() -> None:
    name = salient_spans().settings["spans"]
    assert name == RULES or str(name).startswith("spaCy en_")


def test_entities_of_a_pipeline_are_spans_of_characters() -> None:
    class Entity:
        start_char, end_char = 3, 7

    class Parsed:
        ents = (Entity(),)

    assert spacy_spans(lambda text: Parsed())("It Kells") == [(3, 7)]


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(1, 6)), max_size=4), st.lists(st.integers(1, 3), max_size=8))
def test_a_token_counts_where_it_overlaps_a_span(drawn: list[tuple[int, int]], lengths: list[int]) -> None:
    spans = [(first, min(12, first + length)) for first, length in drawn]
    tokens, at = [(0, 0)], 0
    for length in lengths:
        tokens.append((at, min(12, at + length)))
        at = min(12, at + length)
    passage = Passage(torch.zeros(len(tokens), dtype=torch.long), "x" * 12, tuple(tokens))
    weights = SalientSpanWeights(lambda _: spans, "given").weights(passage)
    expected = [float(any(max(a, first) < min(b, end) for first, end in spans)) for a, b in tokens]
    assert weights.tolist() == expected
    assert UniformWeights().weights(passage).tolist() == [1.0] * len(tokens)


@pytest.mark.parametrize("window", [1024, 20])
def test_passages_hold_all_tokens_of_the_document_as_the_prompt_writes_it(tiny_model: MACModel, window: int) -> None:
    prompts = tiny_model.base_lm.prompts
    parts = list(passages(prompts, TEXT, window))
    assert all(len(part.ids) <= window for part in parts)
    joined = [token for part in parts for token in part.ids.tolist()[len(prompts.start) :]]
    assert prompts.start + joined == prompts.prompt_start([TEXT])
    assert "".join(part.text[first:end] for part in parts for first, end in part.spans) == TEXT + "\n"


def test_the_loss_is_a_weighted_mean_over_predicted_tokens() -> None:
    torch.manual_seed(0)
    logits, ids, weights = torch.randn(5, 7), torch.randint(7, (5,)), torch.rand(5)
    expected = sum(-weights[i] * logits[i - 1].log_softmax(-1)[ids[i]] for i in range(1, 5)) / 4
    torch.testing.assert_close(weighted_loss(logits, ids, weights), expected)
