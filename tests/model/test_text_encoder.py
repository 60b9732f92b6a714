"""Splitting long texts, batching by length, and prompts that fit."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mac_rag.config import PromptFormat
from mac_rag.lm.batching import length_buckets, similar_lengths
from mac_rag.lm.prompt import PromptEncoder
from mac_rag.model import MACModel
from mac_rag.model.text_encoder import TextEncoder

WORDS = st.lists(
    st.sampled_from(["Velmont", "opened", "a", "mill.", "It", "cost", "$34", "million!", "Why?"]), min_size=1
)


@given(lengths=st.lists(st.integers(1, 50), max_size=40), budget=st.integers(1, 200))
def test_buckets_hold_every_index_once_within_the_budget(lengths: list[int], budget: int) -> None:
    buckets = length_buckets(lengths, budget)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(lengths)))
    for bucket in buckets:
        assert len(bucket) == 1 or len(bucket) * max(lengths[i] for i in bucket) <= budget


@pytest.fixture(scope="module")
def encoder(tiny_checkpoint: object) -> TextEncoder:
    return MACModel.from_pretrained(tiny_checkpoint, device="cpu").amortization  # type: ignore[arg-type]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=WORDS, limit=st.integers(20, 60), break_every=st.integers(1, 30))
def test_splitting_loses_nothing_and_keeps_the_limit(
    encoder: TextEncoder, monkeypatch: pytest.MonkeyPatch, words: list[str], limit: int, break_every: int
) -> None:
    monkeypatch.setattr(encoder, "max_tokens", limit)
    text = " ".join(word + ("\n" if number % break_every == 0 else "") for number, word in enumerate(words))
    chunks = encoder.split(text)
    assert " ".join(chunks).split() == text.split()
    assert all(len(encoder.ids(chunk)) <= limit for chunk in chunks)


def test_progress_within_a_text_adds_up_to_its_length(encoder: TextEncoder) -> None:
    text = "  " + "The mill in Velmont has opened. " * 2000
    steps: list[int] = []
    rows = encoder.plan(text, advance=steps.append)
    assert sum(steps) == len(text)
    assert len(steps) > len(rows) > 10
    assert max(steps) < len(text) / 10


def test_sentences_stay_whole_where_they_can(encoder: TextEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    sentences = ["The mill in Velmont has opened.", "It cost a lot of money.", "Nobody knows who paid for it."]
    longest = max(len(encoder.ids(sentence)) for sentence in sentences)
    monkeypatch.setattr(encoder, "max_tokens", longest + 4)
    assert encoder.split(" ".join(sentences)) == sentences


@settings(deadline=None, max_examples=60)
@given(
    texts=st.lists(st.integers(0, 60).map(lambda count: " ".join(["word"] * count)), max_size=5),
    spare=st.integers(-5, 150),
)
def test_shortened_prompts_fit_and_leave_the_question_whole(encoder: TextEncoder, texts: list[str], spare: int) -> None:
    prompts = PromptEncoder(encoder.tokenizer)
    question = "What did it cost?"
    room = len(prompts.prompt(question)) + max(0, spare)
    kept = prompts.fit_to_window(question, texts, room).contexts
    assert len(prompts.prompt(question, kept)) <= room
    whole = [text for text in texts if text]
    if len(prompts.prompt(question, whole)) <= room:
        assert list(kept) == whole
        return
    *before, last = [*kept, ""] if list(kept) == whole[: len(kept)] else kept
    assert before == whole[: len(before)]  # the best whole, then a beginning, of which no word more would have fitted
    assert whole[len(before)].startswith(last)
    more = whole[len(before)].split()[: len(last.split()) + 1]
    assert len(prompts.prompt(question, [*before, " ".join(more)])) > room


def test_a_prompt_starts_with_exactly_the_ids_of_its_documents(encoder: TextEncoder) -> None:
    prompts = PromptEncoder(encoder.tokenizer)
    ids = prompts.prompt("Who?", ["First.", " Second. "])
    assert ids == [*prompts.start, *prompts.document("First."), *prompts.document("Second."), *prompts.question("Who?")]
    assert prompts.answer("me")[-1] == encoder.tokenizer.eos_token_id


def test_braces_in_a_text_are_text(encoder: TextEncoder) -> None:
    prompts = PromptEncoder(encoder.tokenizer)
    assert "{question}" in encoder.tokenizer.decode(prompts.question("What is {question}?"))


@pytest.mark.parametrize("template", ["no slot", "{question} and {question}"])
def test_templates_hold_their_slot_once(template: str) -> None:
    with pytest.raises(ValueError, match="exactly once"):
        PromptFormat(question=template)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.sampled_from([1.0, 1.5, 2.0]))
def test_similar_lengths_hold_each_text_once_and_little_padding(lengths: list[int], ratio: float) -> None:
    groups = similar_lengths(lengths, ratio)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        assert max(lengths[i] for i in group) <= ratio * min(lengths[i] for i in group)
    for shorter, longer in itertools.pairwise(groups):  # no group could have taken in the next text
        assert lengths[longer[0]] > ratio * lengths[shorter[0]]
