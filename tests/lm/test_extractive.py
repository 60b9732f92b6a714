"""Extractive decoding against a search for spans, and in every way of decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mac_rag.config import ExtractiveConfig
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.decoding import ExtractiveDecoding, SpanSource, numeral_tokens
from mac_rag.lm.text_tokenizer import TextTokenizer
from mac_rag.model import MACModel
from mac_rag.nn.modulation import Modulation
from tests.nn.helpers import PROMPTS, modulated_lm

Folder = Callable[[str], Path]
VOCABULARY, END, NUMERAL = 6, 2, 3
WEIGHTS = [0.5, 0.2, 1.0]


def source(ids: Sequence[int]) -> SpanSource:
    """A text whose spans may begin and end with any of its tokens."""
    return SpanSource(tuple(ids), (True,) * len(ids), (True,) * len(ids))


def allowed_by_search(
    sources: Sequence[SpanSource], answer: Sequence[int], vocabulary: int, ends: Sequence[int], numerals: Sequence[int]
) -> set[int]:
    """Tokens that may follow, found by a look at every place of every source."""
    found: set[int] = set()
    matched = False
    for one in sources:
        for start in range(len(one.ids)):
            stop = start + len(answer)
            if not one.starts[start] or list(one.ids[start:stop]) != list(answer) or stop > len(one.ids):
                continue
            matched = True
            found |= set(one.ids[stop : stop + 1])
            if answer and one.stops[stop - 1]:
                found |= set(ends)
    if matched:
        return found
    pairs = {(first, second) for first, second in pairwise(answer)}
    repeated = {
        token for token in range(vocabulary) if answer and (token == answer[-1] or (answer[-1], token) in pairs)
    }
    return set(range(vocabulary)) - (repeated - {*ends, *numerals})


TOKENS = st.sampled_from([1, END, NUMERAL, 4, 5])
SOURCES = st.lists(
    st.lists(st.tuples(TOKENS, st.booleans(), st.booleans()), max_size=8).map(
        lambda tokens: SpanSource(*(tuple(part) for part in zip(*tokens))) if tokens else SpanSource((), (), ())
    ),
    max_size=3,
)


@given(
    st.lists(SOURCES, min_size=1, max_size=3), st.integers(0, 5), st.integers(1, 2), st.randoms(use_true_random=False)
)
def test_the_tokens_that_may_follow_are_those_that_a_search_finds(
    sources: list[list[SpanSource]], length: int, beams: int, random: object
) -> None:
    generator = torch.Generator().manual_seed(random.randint(0, 999))  # type: ignore[attr-defined]
    rows = len(sources) * beams
    answers = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
    for row in range(rows):  # half of the answers begin as a source does
        texts = [one for one in sources[row // beams] if len(one.ids) >= length]
        if texts and row % 2 == 0:
            answers[row] = torch.tensor(texts[0].ids[:length], dtype=torch.int64)
    scores = torch.randn(rows, VOCABULARY, generator=generator)
    decoding = ExtractiveDecoding(sources, prompt_length=2, end_tokens=[END], numerals=[NUMERAL])
    result = decoding(torch.cat([torch.zeros(rows, 2, dtype=torch.int64), answers], 1), scores)
    for row in range(rows):
        expected = allowed_by_search(sources[row // beams], answers[row].tolist(), VOCABULARY, [END], [NUMERAL])
        assert set(result[row].isfinite().nonzero()[:, 0].tolist()) == expected
        kept = result[row].isfinite()
        assert torch.equal(result[row][kept], scores[row][kept])


def test_an_lm_with_memory_is_free_and_the_one_without_is_bound() -> None:
    sources, prompt = [[source([4, 5])], [source([1, 5])]], torch.zeros(4, 3, dtype=torch.int64)
    halves = ExtractiveDecoding(sources, prompt_length=3, end_tokens=[END], numerals=[], halves=True)
    scores = torch.randn(4, VOCABULARY)
    result = halves(prompt, scores)
    assert torch.equal(result[:2], scores[:2])
    bound = ExtractiveDecoding(sources, prompt_length=3, end_tokens=[END], numerals=[])
    assert torch.equal(result[2:], bound(prompt[2:], scores[2:]))
    assert torch.equal(halves.of(torch.tensor([1]))(prompt[[1, 3]], scores[[1, 3]]), result[[1, 3]])


def said(
    lm: BaseLM, prompt: list[int], modulation: Modulation | None, weight: float, sources: list[SpanSource], new: int
) -> str:
    """Greedy, the whole sequence anew for each token; without memory for a modulation of None."""
    tokens: list[int] = []
    vocabulary, numerals = lm.model.config.vocab_size, numeral_tokens(lm.tokenizer)
    while len(tokens) < new and (not tokens or tokens[-1] not in lm.end_tokens):
        readings = []
        for reading, texts, share in ((modulation, [], weight), (None, sources, 1 - weight)):
            if share == 0 or (reading is None) == (modulation is not None and weight == 1):
                continue
            logits = lm.answer_logits([prompt], [[*tokens, 0]], reading)[-1]
            barred = torch.ones(vocabulary, dtype=torch.bool)
            barred[sorted(allowed_by_search(texts, tokens, vocabulary, lm.end_tokens, numerals))] = False
            readings.append(share * logits.masked_fill(barred, -torch.inf).softmax(-1))
        tokens.append(int(torch.stack(readings).amax(0).argmax()))
    text: str = lm.tokenizer.decode(tokens, skip_special_tokens=True)
    return text.strip()


SPANS = [
    [source([30, 31, 32, 33, 34, 35]), source([60, 61, 60, 61, 62])],
    [],
    [SpanSource((70, 71, 72, 73), (False, True, True, False), (True, False, False, True)), SpanSource.whole([80, 81])],
]


@pytest.mark.parametrize("with_memory", [False, True])
def test_generation_and_streaming_are_the_plain_loop(model_folder: Folder, with_memory: bool) -> None:
    lm, network, phi = modulated_lm(model_folder("llama"), "prefix")
    weights = WEIGHTS if with_memory else None
    with torch.no_grad():
        each = [network(phi[i : i + 1]) if with_memory else None for i in range(3)]
        expected = [said(lm, PROMPTS[i], each[i], WEIGHTS[i] if with_memory else 0.0, SPANS[i], 8) for i in range(3)]
        whole = network(phi) if with_memory else None
        assert lm.generate(PROMPTS, whole, max_new_tokens=8, weights=weights, sources=SPANS) == expected
        assert lm.generate(PROMPTS, whole, max_new_tokens=8, weights=weights) != expected
        for i in range(3):
            weight = None if weights is None else weights[i : i + 1]
            pieces = lm.stream(PROMPTS[i], each[i], max_new_tokens=8, weights=weight, sources=SPANS[i : i + 1])
            assert "".join(pieces) == expected[i]


def test_at_several_weights_each_is_what_one_alone_gives(model_folder: Folder) -> None:
    lm, network, phi = modulated_lm(model_folder("llama"), "prefix")
    with torch.no_grad():
        each = lm.generate_each(PROMPTS, network(phi), max_new_tokens=8, weights=[0.0, 0.5, 1.0], sources=SPANS)
        expected = [
            lm.generate(PROMPTS, None, max_new_tokens=8, sources=SPANS),
            lm.generate(PROMPTS, network(phi), max_new_tokens=8, weights=[0.5] * 3, sources=SPANS),
            lm.generate(PROMPTS, network(phi), max_new_tokens=8, sources=SPANS),
        ]
    assert each == expected
    assert expected[0] != expected[2]


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_with_beams_a_batch_is_its_rows(model_folder: Folder, weights: list[float] | None) -> None:
    lm, network, phi = modulated_lm(model_folder("llama"), "prefix")
    options = {"max_new_tokens": 6, "num_beams": 3}
    modulation = None if weights is None else network(phi)
    whole = lm.generate(PROMPTS, modulation, weights=weights, sources=SPANS, **options)
    for i, prompt in enumerate(PROMPTS):
        one = None if weights is None else network(phi[i : i + 1])
        weight = None if weights is None else weights[i : i + 1]
        assert lm.generate([prompt], one, weights=weight, sources=SPANS[i : i + 1], **options) == whole[i : i + 1]
    if weights is None:
        spans = [" ".join(map(str, ids)) for ids in ([71, 72, 73], [72, 73], [80, 81])]
        ids = lm.tokenizer(whole[2], add_special_tokens=False).input_ids
        assert lm.tokenizer.decode(ids).strip() in {
            lm.tokenizer.decode(list(map(int, span.split()))).strip() for span in spans
        }


def test_spans_are_whole_words(model_folder: Folder) -> None:
    lm, _, _ = modulated_lm(model_folder("llama"), "prefix")
    tokenizer = lm.prompts.texts
    text = "Zzyzx opened it, café-side, in 1,934 by O'Neil 東京."
    one = SpanSource.of_text(text, tokenizer)
    assert list(one.ids) == tokenizer.ids(text)
    assert len(one.ids) > len(text.split())  # words of several tokens
    words = {text[start:stop] for start in range(len(text)) for stop in range(start + 1, len(text) + 1)}
    for start in (place for place, may in enumerate(one.starts) if may):
        for stop in (place + 1 for place, may in enumerate(one.stops) if may and place >= start):
            span = lm.tokenizer.decode(one.ids[start:stop])
            assert "\N{REPLACEMENT CHARACTER}" not in span
            assert span.strip() in {word.strip() for word in words}
            place = text.index(span)
            for edge in (place, place + len(span)):
                inside = 0 < edge < len(text) and text[edge - 1].isalnum() and text[edge].isalnum()
                assert not inside or span not in text[place:], span


def test_numerals_are_tokens_of_digits(model_folder: Folder) -> None:
    lm, _, _ = modulated_lm(model_folder("llama"), "prefix")
    for token in numeral_tokens(lm.tokenizer):
        assert lm.tokenizer.decode([token]).strip().isdigit()
    [ids] = lm.tokenizer(["7"], add_special_tokens=False).input_ids
    assert set(ids) <= set(numeral_tokens(lm.tokenizer))


def test_a_model_answers_with_spans_of_its_documents_or_fixed_answers(tiny_model: MACModel) -> None:
    questions = ["Who opened the bridge?", "What closed the port?", "Who sings?"]
    contexts = [["The mayor of Lisbon opened a bridge.", "A strike hit."], ["It rained."], []]
    free = tiny_model.generate(questions, contexts)
    tiny_model.config = tiny_model.config.model_copy(update={"extractive": ExtractiveConfig(fixed_answers=("yes",))})
    answers = tiny_model.generate(questions, contexts)
    for answer, texts in zip(answers[:2], contexts[:2]):
        assert answer
        assert answer == "yes" or any(answer in text for text in texts)
    assert answers[:2] != free[:2]
    for i in range(3):
        assert "".join(tiny_model.stream(questions[i], contexts[i])) == answers[i]
    phi = torch.randn(3, tiny_model.config.tokens, tiny_model.base_lm.width)
    prompts = [tiny_model.fit_to_window(question, texts) for question, texts in zip(questions, contexts)]
    alone = tiny_model.generate_each(prompts[:2], phi[:2], [0.0])[0]
    assert alone == answers[:2]


def test_text_tokenizers_of_wordpiece_begin_no_span_within_a_word() -> None:
    model = MACModel.from_pretrained("mac-small")
    tokenizer: TextTokenizer = model.base_lm.prompts.texts
    one = SpanSource.of_text("Archaeopteryx and Jeholornis", tokenizer)
    tokens = model.base_lm.tokenizer.convert_ids_to_tokens(list(one.ids))
    assert [token.startswith("##") for token in tokens] == [not may for may in one.starts]
    assert one.stops == (*one.starts[1:], True)
