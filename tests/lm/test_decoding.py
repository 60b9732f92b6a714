"""Decoding: sampling, stop strings, abstention, spans, the max-rule ensemble, a growing cache, against plain loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from mac_rag.config import BaseLMConfig, PromptFormat
from mac_rag.data.types import Decoded, Token
from mac_rag.errors import ConfigError, MACError, ModelLoadError
from mac_rag.lm.base_lm import BaseLM, Pieces
from mac_rag.lm.continuous_batch import ContinuousBatch
from mac_rag.lm.decoding import (
    AbstainByMajority,
    ExtractiveDecoding,
    MaxRuleEnsemble,
    Sampling,
    SpanSource,
    TokenChoice,
    abstention_beginning,
    numeral_tokens,
)
from mac_rag.lm.loading import load_causal_lm
from mac_rag.lm.text_tokenizer import TextTokenizer
from mac_rag.model import MACModel
from mac_rag.nn.growing_cache import GrowingLayer, growing
from mac_rag.nn.modulation import Modulation
from tests.helpers import Folder, mac_config, strong
from tests.nn.helpers import EACH, PROMPTS, modulated_lm

CPU = torch.device("cpu")
QUESTIONS = ["Who opened the museum?", "When?", "What did Ada Voss open in Orsena in the month of May?"]
WARM = Sampling(temperature=1.5, top_p=0.95, seed=3)


@pytest.fixture(scope="module")
def lm(model_folder: Folder) -> BaseLM:
    loaded = BaseLM.load(BaseLMConfig(name=str(model_folder("llama"))), PromptFormat(), CPU)
    with torch.no_grad():
        for parameter in loaded.model.parameters():  # far from uniform, so that what is drawn depends on the prompt
            parameter.mul_(6)
    return loaded


def test_a_seeded_answer_does_not_depend_on_its_batch(lm: BaseLM) -> None:
    prompts = [lm.prompts.prompt(question) for question in QUESTIONS]
    together = lm.generate(prompts, None, max_new_tokens=12, sampling=WARM)
    assert together == [lm.generate([p], None, max_new_tokens=12, sampling=WARM)[0] for p in prompts]
    assert together == lm.generate(prompts[::-1], None, max_new_tokens=12, sampling=WARM)[::-1]
    assert together == ["".join(lm.stream(p, None, max_new_tokens=12, sampling=WARM)) for p in prompts]
    others = {
        lm.generate(prompts[:1], None, max_new_tokens=12, sampling=Sampling(1.5, 0.95, seed))[0] for seed in range(6)
    }
    assert len(others) > 1


def test_an_answer_without_a_seed_follows_torchs_generator(lm: BaseLM) -> None:
    prompts = [lm.prompts.prompt(QUESTIONS[0])] * 3

    def answers() -> list[str]:
        return lm.generate(prompts, None, max_new_tokens=12, sampling=Sampling(temperature=2.0))

    torch.manual_seed(1)
    first, second = answers(), answers()
    torch.manual_seed(1)
    assert answers() == first != second
    assert len(set(first)) > 1  # equal prompts in one batch are drawn apart


def test_sampling_with_memory_weight_streams_what_it_generates(tiny_model: MACModel) -> None:
    phi = tiny_model.amortize(["Ada Voss opened the museum."])
    context = ["The museum is in Orsena."]
    answer = tiny_model.generate(QUESTIONS[:1], [context], modulation=phi, memory_weight=0.5, sampling=WARM)
    pieces = tiny_model.stream(QUESTIONS[0], context, modulation=phi, memory_weight=0.5, sampling=WARM)
    assert "".join(pieces) == answer[0]


@settings(deadline=None, max_examples=30)
@given(
    logits=st.lists(st.floats(-3, 3), min_size=2, max_size=6),
    temperature=st.floats(0.3, 3),
    top_p=st.floats(0.05, 1),
    top_k=st.integers(0, 4),
    min_p=st.sampled_from([0.0, 0.3]),
)
def test_draws_follow_the_probabilities_of_the_nucleus(
    logits: list[float], temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    draws = 2000
    sampling = Sampling(temperature, top_p, top_k=top_k, min_p=min_p)
    torch.manual_seed(0)
    drawn = TokenChoice(sampling, draws)(torch.tensor(logits).expand(draws, -1), torch.zeros(draws, 0).long())
    weights = (torch.tensor(logits).double() / temperature).softmax(0).tolist()
    nucleus: dict[int, float] = {}
    for place, token in enumerate(sorted(range(len(weights)), key=lambda i: -weights[i])):
        is_likely = weights[token] >= min_p * max(weights) and place < (top_k or len(weights))
        if is_likely and sum(nucleus.values()) < top_p - 1e-6:
            nucleus[token] = weights[token]
    counts = Counter(drawn.tolist())
    close = [abs(sum(sorted(weights, reverse=True)[:count]) - top_p) < 1e-6 for count in range(1, len(weights) + 1)]
    close += [abs(weight - min_p * max(weights)) < 1e-6 for weight in weights]
    close += [abs(one - other) < 1e-6 for one, other in pairwise(sorted(weights))]  # which of equals is left out
    assert counts.keys() <= nucleus.keys() or any(close)
    for token, weight in nucleus.items():
        share = weight / sum(nucleus.values())
        assert abs(counts[token] / draws - share) < 5 * (share * (1 - share) / draws) ** 0.5 + 1e-3


def test_bias_and_penalties_change_the_logits() -> None:
    logits, answers = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)), [[0, 0, 1], [4, 4, 4], [2, 3, 1]]
    sampling = Sampling(presence_penalty=0.7, frequency_penalty=-0.4, bias=((1, 0.5), (4, -2.0), (1, 0.25)))
    expected = logits.tolist()
    for row, said in zip(expected, answers, strict=True):
        for token in range(5):
            row[token] += {1: 0.75, 4: -2.0}.get(token, 0.0) - 0.7 * (token in said) + 0.4 * said.count(token)
    choice = TokenChoice(sampling, 3)
    torch.testing.assert_close(choice._changed(logits, torch.tensor(answers)), torch.tensor(expected))
    assert choice(logits, torch.tensor(answers)).tolist() == torch.tensor(expected).argmax(-1).tolist()


def test_tokens_come_with_their_log_probabilities(lm: BaseLM) -> None:
    prompts = [lm.prompts.prompt(question) for question in QUESTIONS]
    sampling = Sampling(log_probabilities=3, bias=((lm.end_tokens[0], 3.0),))  # so that they end one after the other
    plain = lm.generate(prompts, None, max_new_tokens=12, sampling=Sampling(bias=sampling.bias))
    answers = lm.generate(prompts, None, max_new_tokens=12, sampling=sampling)
    assert answers == plain
    for prompt, answer, other in zip(prompts, answers, plain, strict=True):
        ids = [token.id for token in answer.tokens]
        assert ids == [token.id for token in other.tokens]
        assert answer.ended == (len(ids) < 12)
        pieces = list(lm.stream(prompt, None, max_new_tokens=12, sampling=sampling))
        streamed = [token for piece in pieces for token in piece.tokens]
        assert [token.id for token in streamed] == ids
        if not ids:
            continue
        logits = lm.answer_logits([prompt], [ids], None).log_softmax(-1)
        expected = logits.gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
        for tokens in (answer.tokens, streamed):
            assert [token.log_probability for token in tokens] == pytest.approx(expected, abs=1e-3)
            for token, row in zip(tokens, logits, strict=True):
                values, best = row.topk(3)
                assert [one for one, _ in token.alternatives] == best.tolist()
                assert [value for _, value in token.alternatives] == pytest.approx(values.tolist(), abs=1e-3)


def test_a_stop_string_ends_an_answer_and_is_no_part_of_it(lm: BaseLM) -> None:
    prompts = [lm.prompts.prompt(question) for question in QUESTIONS]
    whole = lm.generate(prompts, None, max_new_tokens=24)
    for place, length in ((3, 1), (5, 3), (len(whole[0]) - 2, 2)):
        stop = whole[0][place : place + length]
        sampling = Sampling(stop=("never said", stop))
        expected = [answer.split(stop)[0].strip() for answer in whole]
        assert lm.generate(prompts, None, max_new_tokens=24, sampling=sampling) == expected
        streamed = ["".join(lm.stream(p, None, max_new_tokens=24, sampling=sampling)) for p in prompts]
        assert streamed == expected


def test_an_answer_is_told_once_it_has_ended(tiny_model: MACModel) -> None:
    """The row that ends first is told before the others have all their tokens; the texts are those of the whole."""
    lm = tiny_model.base_lm
    prompts = [lm.prompts.prompt(question) for question in QUESTIONS]
    whole = lm.generate(prompts, None, max_new_tokens=12, sampling=WARM)
    place = next(place for place in range(1, 12) if len({answer.tokens[place].id for answer in whole}) > 1)
    last = whole[0].tokens[place].id
    lm.end_tokens = sorted({*lm.end_tokens, last})
    passes, told, batch = 0, dict[int, tuple[int, Decoded]](), ContinuousBatch()
    answers = lm.begin(
        batch, prompts, None, max_new_tokens=12, sampling=WARM,
        tell=lambda row, answer: told.__setitem__(row, (passes, answer)),
    )  # fmt: skip
    while batch:
        passes += 1
        batch.step()
    found = [answers.ended[row] for row in range(len(prompts))]
    assert found == lm.generate(prompts, None, max_new_tokens=12, sampling=WARM)
    assert [told[row][1] for row in range(len(prompts))] == found
    assert [told[row][0] for row in range(len(prompts))] == [len(answer.tokens) + answer.ended for answer in found]
    assert len({passed for passed, _ in told.values()}) > 1


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_what_is_settled_is_never_taken_back(text: str, stop: list[str]) -> None:
    sampling = Sampling(stop=tuple(stop))
    final, stopped = sampling.until_stop(text)
    assert stopped == any(string in text for string in stop)
    assert not any(string in final for string in stop)
    for length in range(len(text) + 1):
        begun = text[:length]
        if any(string in begun for string in stop):
            break
        assert final.startswith(sampling.settled(begun))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; give a number of at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0; give a number above 0"),
        ({"stop": "end"}, "stop is 'end'; give a tuple of strings"),
        ({"stop": ("",)}, "strings that are not empty"),
        ({"top_k": -1}, "top_k is -1; give a number of tokens"),
        ({"min_p": 1.5}, "min_p is 1.5; give a number from 0 to 1"),
    ],
)
def test_settings_out_of_range_are_errors(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**values)  # type: ignore[arg-type]


def test_every_end_token_of_the_generation_config_ends_an_answer(tiny_model: MACModel) -> None:
    lm = tiny_model.base_lm
    prompt = lm.prompts.prompt(QUESTIONS[0])
    modulation = tiny_model.modulation(tiny_model.amortize(["Ada Voss opened it."]))
    tokens = [token.id for token in lm.generate([prompt], modulation, max_new_tokens=8, sampling=WARM)[0].tokens]
    place = next(i for i in range(2, 8) if tokens[i] not in tokens[:i])
    expected = lm.tokenizer.decode(tokens[:place], skip_special_tokens=True).strip()
    lm.model.generation_config.eos_token_id = [lm.tokenizer.eos_token_id, tokens[place]]
    ending = BaseLM(lm.model, lm.tokenizer, lm.prompts.format)
    assert ending.end_tokens == sorted({lm.tokenizer.eos_token_id, tokens[place]})
    assert ending.generate([prompt], modulation, max_new_tokens=8, sampling=WARM) == [expected]
    assert "".join(ending.stream(prompt, modulation, max_new_tokens=8, sampling=WARM)) == expected

    lm.model.generation_config.eos_token_id = list(range(len(lm.tokenizer)))
    silent = BaseLM(lm.model, lm.tokenizer, lm.prompts.format)
    assert lm.generate([prompt], modulation, max_new_tokens=8) != [""]
    assert silent.generate([prompt], modulation, max_new_tokens=8) == [""]


def test_a_tokenizer_without_padding_is_padded_by_its_end_token(model_folder: Folder, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(model_folder("llama")).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model_folder("llama"))
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token_id is None
    lm = BaseLM.load(BaseLMConfig(name=str(tmp_path)), PromptFormat(), CPU)
    assert lm.tokenizer.pad_token_id == lm.tokenizer.eos_token_id
    prompts = [lm.prompts.prompt(question) for question in QUESTIONS]
    assert lm.generate(prompts, None, max_new_tokens=4) == [
        lm.generate([p], None, max_new_tokens=4)[0] for p in prompts
    ]


def test_a_vocabulary_beyond_the_embeddings_is_an_error_at_load(model_folder: Folder, tmp_path: Path) -> None:
    for folder in ("lm", "encoder"):
        AutoModelForCausalLM.from_pretrained(model_folder("llama")).save_pretrained(tmp_path / folder)
        tokenizer = AutoTokenizer.from_pretrained(model_folder("llama"))
        tokenizer.add_tokens([AddedToken("<|im_end|>", special=True)])
        tokenizer.save_pretrained(tmp_path / folder)
    message = "token ids up to 400, but the model has embeddings for 400 tokens"
    with pytest.raises(ModelLoadError, match=message):
        load_causal_lm(BaseLMConfig(name=str(tmp_path / "lm")), CPU)
    with pytest.raises(ModelLoadError, match=message):
        MACModel.from_config(mac_config(model_folder("llama"), tmp_path / "encoder"), device="cpu")


def test_a_tokenizer_without_an_end_token_is_an_error(model_folder: Folder) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder("llama"))
    tokenizer.eos_token = None
    with pytest.raises(ModelLoadError, match="no eos_token, so answers could not end"):
        BaseLM(AutoModelForCausalLM.from_pretrained(model_folder("llama")), tokenizer, PromptFormat())


ABSTENTION = "unknown to the town"
ASKED = ["Who opened the museum?", "When did Ada Voss leave the town of Orsena?"]


@given(
    scores=st.lists(st.floats(-20, 20), min_size=2, max_size=6),
    token=st.integers(0, 5),
    common=st.lists(st.integers(0, 1), max_size=2),
    said=st.lists(st.integers(0, 1), max_size=3),
)
def test_abstaining_needs_half_of_the_probability(
    scores: list[float], token: int, common: list[int], said: list[int]
) -> None:
    token, logits = token % len(scores), torch.tensor([scores])
    before = logits.clone()
    found = AbstainByMajority([*common, token])(torch.tensor([said], dtype=torch.int64), logits)
    assert torch.equal(logits, before)
    if said != common or logits.softmax(-1)[0, token] >= 0.5:
        assert torch.equal(found, logits)
    else:
        others = [i for i in range(len(scores)) if i != token]
        assert torch.equal(found[:, others], logits[:, others])
        assert int(found.argmax()) != token


def test_abstaining_remains_where_nothing_else_may_be_said() -> None:
    scores = AbstainByMajority([1])(torch.zeros(1, 0, dtype=torch.long), torch.tensor([[0.0, -9.0, 0.0]]))
    assert int(scores.masked_fill(torch.tensor([[True, False, True]]), -torch.inf).argmax()) == 1


def load(folder: Path, **values: Any) -> BaseLM:
    return BaseLM.load(BaseLMConfig(name=str(folder)), PromptFormat(**values), torch.device("cpu"))


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("share", [0.3, 0.49, 0.51, 0.9])
def test_abstention_in_every_way_of_answering(model_folder: Folder, share: float, chat: bool) -> None:
    """The abstention's first token gets a share of the probability: it is the most probable token each time."""
    ways: dict[str, Any] = {"chat": True} if chat else {"answer": "{answer}"}
    lm = load(model_folder("instruct" if chat else "llama"), abstention=ABSTENTION, **ways)
    first, *rest = abstention_beginning(lm.prompts) or ()
    assert bool(rest) == chat

    def with_share(_: object, __: object, logits: Tensor) -> Tensor:
        others = logits.clone()
        others[..., first] = -torch.inf
        level = others.logsumexp(-1) + torch.tensor(share / (1 - share)).log()
        return logits.index_copy(-1, torch.tensor([first]), level[..., None])

    handle = lm.model.get_output_embeddings().register_forward_hook(with_share)
    prompts = [lm.prompts.prompt(question) for question in ASKED]
    word = lm.tokenizer.decode([first])
    answers = lm.generate(prompts, None, max_new_tokens=1)
    assert [answer == word for answer in answers] == [share > 0.5] * 2
    assert answers == ["".join(lm.stream(prompt, None, max_new_tokens=1)) for prompt in prompts]
    longer = lm.generate(prompts, None, max_new_tokens=3)
    assert all(answer.endswith(2 * word) for answer in longer)  # after the first token nothing is changed
    handle.remove()


def test_what_all_answers_begin_with_is_no_abstention(model_folder: Folder) -> None:
    prompts = load(model_folder("llama"), abstention=ABSTENTION).prompts
    beginning = abstention_beginning(prompts)
    assert beginning == prompts.answer(ABSTENTION)[:2]  # this tokenizer has a token for the space in front of answers
    assert beginning[:1] in [prompts.answer(letter)[:1] for letter in "iklo"]
    assert abstention_beginning(load(model_folder("llama")).prompts) is None  # which has not learned to abstain


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
    repeated = {t for t in range(vocabulary) if answer and (t == answer[-1] or (answer[-1], t) in pairs)}
    return set(range(vocabulary)) - (repeated - {*ends, *numerals})


TOKENS = st.sampled_from([1, END, NUMERAL, 4, 5])
SOURCES = st.lists(
    st.lists(st.tuples(TOKENS, st.booleans(), st.booleans()), max_size=8).map(
        lambda tokens: SpanSource(*(tuple(part) for part in zip(*tokens))) if tokens else SpanSource((), (), ())
    ),
    max_size=3,
)


@given(st.lists(SOURCES, min_size=1, max_size=3), st.integers(0, 5), st.randoms(use_true_random=False))
def test_the_tokens_that_may_follow_are_those_that_a_search_finds(
    sources: list[list[SpanSource]], length: int, random: object
) -> None:
    generator = torch.Generator().manual_seed(random.randint(0, 999))  # type: ignore[attr-defined]
    rows = len(sources)
    answers = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
    for row in range(rows):  # half of the answers begin as a source does
        texts = [one for one in sources[row] if len(one.ids) >= length]
        if texts and row % 2 == 0:
            answers[row] = torch.tensor(texts[0].ids[:length], dtype=torch.int64)
    scores = torch.randn(rows, VOCABULARY, generator=generator)
    decoding = ExtractiveDecoding(sources, prompt_length=2, end_tokens=[END], numerals=[NUMERAL])
    result = decoding(torch.cat([torch.zeros(rows, 2, dtype=torch.int64), answers], 1), scores)
    for row in range(rows):
        expected = allowed_by_search(sources[row], answers[row].tolist(), VOCABULARY, [END], [NUMERAL])
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


def in_spans(
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
def test_extractive_generation_and_streaming_are_the_plain_loop(model_folder: Folder, with_memory: bool) -> None:
    lm, network, phi = modulated_lm(model_folder("llama"), "prefix")
    weights = WEIGHTS if with_memory else None
    with torch.no_grad():
        each = [network(phi[i : i + 1]) if with_memory else None for i in range(3)]
        expected = [in_spans(lm, PROMPTS[i], each[i], with_memory * WEIGHTS[i], SPANS[i], 8) for i in range(3)]
        whole = network(phi) if with_memory else None
        assert lm.generate(PROMPTS, whole, max_new_tokens=8, weights=weights, sources=SPANS) == expected
        assert lm.generate(PROMPTS, whole, max_new_tokens=8, weights=weights) != expected
        for i in range(3):
            weight = None if weights is None else weights[i : i + 1]
            pieces = lm.stream(PROMPTS[i], each[i], max_new_tokens=8, weights=weight, sources=SPANS[i : i + 1])
            assert "".join(pieces) == expected[i]


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
    tiny_model.config = tiny_model.config.model_copy(update={"extractive": ("yes",)})
    answers = tiny_model.generate(questions, contexts)
    for answer, texts in zip(answers[:2], contexts[:2]):
        assert answer
        assert answer == "yes" or any(answer in text for text in texts)
    assert answers[:2] != free[:2]
    for i in range(3):
        assert "".join(tiny_model.stream(questions[i], contexts[i])) == answers[i]
    phi = torch.randn(3, tiny_model.config.tokens, tiny_model.base_lm.width)
    assert tiny_model.generate(questions[:2], contexts[:2], modulation=phi[:2], memory_weight=1e-6) == answers[:2]


def test_text_tokenizers_of_wordpiece_begin_no_span_within_a_word() -> None:
    model = MACModel.from_pretrained("mac-small")
    tokenizer: TextTokenizer = model.base_lm.prompts.texts
    one = SpanSource.of_text("Archaeopteryx and Jeholornis", tokenizer)
    tokens = model.base_lm.tokenizer.convert_ids_to_tokens(list(one.ids))
    assert [token.startswith("##") for token in tokens] == [not may for may in one.starts]
    assert one.stops == (*one.starts[1:], True)


def by_max_rule(lm: BaseLM, prompt: list[int], modulation: Modulation, weight: float, length: int) -> str:
    """Greedy, the whole sequence anew for each token, in probabilities."""
    tokens: list[int] = []
    while len(tokens) < length and (not tokens or tokens[-1] != lm.tokenizer.eos_token_id):
        readings = [lm.answer_logits([prompt], [[*tokens, 0]], each)[-1].softmax(-1) for each in (modulation, None)]
        tokens.append(int(torch.maximum(weight * readings[0], (1 - weight) * readings[1]).argmax()))
    text: str = lm.tokenizer.decode(tokens, skip_special_tokens=True)
    return text.strip()


@pytest.mark.parametrize(("name", "kind"), EACH)
def test_ensembles_generate_and_stream_what_the_plain_loop_says(model_folder: Folder, name: str, kind: str) -> None:
    lm, network, phi = modulated_lm(model_folder(name), kind)
    with torch.no_grad():
        expected = [
            by_max_rule(lm, prompt, network(phi[i : i + 1]), weight, 8)
            for i, (prompt, weight) in enumerate(zip(PROMPTS, WEIGHTS, strict=True))
        ]
    assert lm.generate(PROMPTS, network(phi), max_new_tokens=8, weights=WEIGHTS) == expected
    assert expected != lm.generate(PROMPTS, network(phi), max_new_tokens=8)
    for i, prompt in enumerate(PROMPTS):
        pieces = lm.stream(prompt, network(phi[i : i + 1]), max_new_tokens=8, weights=WEIGHTS[i : i + 1])
        assert "".join(pieces) == expected[i]


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=3), st.integers(0, 9))
def test_the_two_halves_get_the_same_distribution(weights: list[float], seed: int) -> None:
    rows = len(weights)
    scores = torch.randn(2 * rows, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mixed = MaxRuleEnsemble(weights)(torch.zeros(2 * rows, 1), scores)
    assert torch.equal(mixed[:rows], mixed[rows:])
    for row in range(rows):
        weight = weights[row]
        readings = weight * scores[row].softmax(-1), (1 - weight) * scores[rows + row].softmax(-1)
        expected = torch.maximum(*readings)
        assert torch.allclose(mixed[row].exp().double(), expected / expected.sum(), atol=1e-6)


def test_only_questions_behind_documents_are_decoded_by_the_ensemble(tiny_model: MACModel) -> None:
    questions = ["Who opened the bridge?", "What closed the port?"]
    contexts = [["The mayor of Lisbon opened a bridge."], []]
    strong(tiny_model)
    phi = torch.randn(2, tiny_model.config.tokens, tiny_model.base_lm.width)
    plain = tiny_model.generate(questions, contexts, modulation=phi)
    alone = tiny_model.generate(questions, contexts)
    assert plain[0] != alone[0]
    tiny_model.config = tiny_model.config.model_copy(update={"memory_weight": 1e-6})
    assert tiny_model.generate(questions, contexts, modulation=phi) == [alone[0], plain[1]]
    for i in range(2):
        pieces = tiny_model.stream(questions[i], contexts[i], modulation=phi[i : i + 1])
        assert "".join(pieces) == [alone[0], plain[1]][i]


def states(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = torch.randn(2, rows, 2, length, 4).unbind()
    return keys, values


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("update"), st.integers(1, 40)),
            st.tuples(st.just("reorder"), st.lists(st.integers(0, 1), min_size=2, max_size=5)),
            st.tuples(st.just("crop"), st.integers(-3, -1)),
        ),
        max_size=8,
    )
)
def test_a_growing_cache_is_transformers_cache_whatever_happens(steps: list[tuple[str, int | list[int]]]) -> None:
    prefix = states(2, 5)
    plain, ours = DynamicCache([prefix]), growing(DynamicCache([prefix]))
    assert isinstance(ours.layers[0], GrowingLayer)
    for name, value in [*steps, ("update", 1)]:
        if name == "update":
            new = states(len(plain.layers[0].keys), int(value))  # type: ignore[arg-type]
            expected, found = plain.update(*new, 0), ours.update(*new, 0)
        else:
            for cache in (plain, ours):
                getattr(cache, "reorder_cache" if name == "reorder" else "crop")(
                    torch.tensor(value) if name == "reorder" else value
                )
            expected, found = ((cache.layers[0].keys, cache.layers[0].values) for cache in (plain, ours))
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert ours.get_seq_length() == plain.get_seq_length()


def test_a_token_is_written_behind_the_others_in_place() -> None:
    layer = GrowingLayer(*states(2, 100))
    first, _ = layer.update(*states(2, 1))
    second, _ = layer.update(*states(2, 1))
    assert second.data_ptr() == first.data_ptr()
    assert torch.equal(second[:, :, :101], first)


def test_other_kinds_of_layers_of_a_cache_stay() -> None:
    cache = DynamicCache()
    cache.layers.append(DynamicSlidingWindowLayer(sliding_window=4))
    assert type(growing(cache).layers[0]) is DynamicSlidingWindowLayer


def test_pieces_of_an_answer_that_begins_again_are_of_one_answer(tiny_model: MACModel) -> None:
    tokenizer = tiny_model.base_lm.tokenizer
    said = [Token(one) for one in tokenizer.encode("Ada Voss opened the museum", add_special_tokens=False)]
    other = [Token(one) for one in tokenizer.encode("A storm closed the port for days", add_special_tokens=False)]
    pieces = Pieces(tokenizer, Sampling())
    [begun] = pieces.after(said[:3])
    assert not [*pieces.after(said[:1]), *pieces.after(other)]
    whole = Decoded(tokenizer.decode([token.id for token in said]), said)
    with pytest.raises(MACError, match="began it again in other words"):
        list(pieces.last(Decoded(tokenizer.decode([token.id for token in other]), other)))
    assert begun + "".join(pieces.last(whole)) == whole
