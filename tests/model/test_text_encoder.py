"""Long texts are split as by the plain algorithm; batches by length; prompts that fit."""

from __future__ import annotations

import itertools
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator

import pytest
import regex
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mac_rag.config import PromptFormat
from mac_rag.data.newswire.generate import generate
from mac_rag.errors import DocumentError
from mac_rag.lm.batching import length_buckets, similar_lengths
from mac_rag.lm.prompt import PromptEncoder
from mac_rag.lm.text_tokenizer import TextTokenizer
from mac_rag.model import MACModel
from mac_rag.model.text_encoder import TextEncoder, split

_SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
_AROUND = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
_WORDS_AND_DIGITS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _wordpiece() -> Tokenizer:
    """As of BERT."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _learned(tokenizer, trainers.WordPieceTrainer(vocab_size=600, special_tokens=_SPECIAL, show_progress=False))


def _byte_level(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """As of GPT-2 and Llama 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe = trainers.BpeTrainer(vocab_size=600, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False)
    return _learned(tokenizer, bpe)


def _sentencepiece_bpe() -> Tokenizer:
    """As of Llama 2: a text is one long word."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    learned = _learned(tokenizer, trainers.BpeTrainer(vocab_size=600, special_tokens=_SPECIAL, show_progress=False))
    learned.pre_tokenizer = None  # type: ignore[assignment]
    learned.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return learned


def _unigram() -> Tokenizer:
    """As of T5."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=600, special_tokens=_SPECIAL, unk_token="<unk>", show_progress=False)
    return _learned(tokenizer, trainer)


def _learned(tokenizer: Tokenizer, trainer: trainers.Trainer) -> Tokenizer:
    tokenizer.train_from_iterator((document.text for document in generate("train", 200).documents), trainer)
    tokenizer.post_processor = _AROUND
    return tokenizer


_KINDS: dict[str, Callable[[], Tokenizer]] = {
    "wordpiece": _wordpiece,
    "gpt2": lambda: _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama3": lambda: _byte_level(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(_WORDS_AND_DIGITS, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    ),
    "llama2": _sentencepiece_bpe,
    "t5": _unigram,
}


@pytest.fixture(scope="module", params=list(_KINDS))
def tokenizer(request: pytest.FixtureRequest) -> TextTokenizer:
    """Around a text it puts two tokens."""
    return TextTokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=_KINDS[request.param](), pad_token="<pad>", bos_token="<s>", eos_token="</s>"
        )
    )


class _TooLongWordError(Exception):
    """The plain algorithm does not cut within words."""


def plain_chunks(text: str, tokenizer: TextTokenizer, limit: int) -> Iterator[str]:
    """The chunks by the tokens of the whole text, as they always were; for texts without very long words."""
    whole, spans = tokenizer.ids_and_spans(text, special=True)
    if len(whole) <= limit:
        yield text
        return
    ends = [end for _, end in spans if end]
    special = len(whole) - len(ends)
    start = 0
    while start < len(text):
        budget = limit - special
        while True:
            stop = _plain_cut(text, start, ends, budget)
            chunk = text[start:stop].strip()
            ids = tokenizer.ids(chunk, special=True)
            if len(ids) <= limit:
                break
            budget -= len(ids) - limit
        yield chunk
        start = stop + len(text[stop:]) - len(text[stop:].lstrip())


def _plain_cut(text: str, start: int, ends: list[int], budget: int) -> int:
    first = bisect_right(ends, start)
    if len(ends) - first <= budget:
        return len(text)
    window = text[start : ends[first + budget - 1]] if budget > 0 else ""
    cut = max(window.rfind(mark) + 1 for mark in (". ", "! ", "? ", "\n"))
    if cut < len(window) // 2:
        cut = window.rfind(" ")
    if cut <= 0:
        raise _TooLongWordError
    return start + cut


def _ordinary_text(seed: int, words: int) -> str:
    """Prose with paragraphs, tables, indented code, numbers, foreign words and names of a few dozen letters."""
    draw = random.Random(seed)
    vocabulary = [
        word for document in generate("train", 20, seed=seed % 1000).documents for word in document.text.split()
    ] + ["naïve", "Zürich", "Ελλάδα", "Привет,", "مرحبا", "3,141.59", "C++;", "(see", "a" * 40, "don't", "…", "🙂", "—"]
    spaces = [" "] * 40 + ["  ", "\n", "\n\n", "\t", " \n", "\n    ", "\N{NO-BREAK SPACE}", " \u3000 ", "\r\n"]
    return "".join(draw.choice(vocabulary) + draw.choice(spaces) for _ in range(words)).strip()


def _chunks(text: str, tokenizer: TextTokenizer, limit: int) -> list[str]:
    return [chunk.text for chunk in split(text, tokenizer, limit)]


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**32), words=st.integers(1, 1500), limit=st.integers(48, 100), window=st.integers(4, 32))
def test_chunks_are_those_of_the_whole_text(
    tokenizer: TextTokenizer, seed: int, words: int, limit: int, window: int
) -> None:
    text = _ordinary_text(seed, words)
    try:
        expected = list(plain_chunks(text, tokenizer, limit))
    except _TooLongWordError:  # a row of words with tabs alone between them
        reject()
    assert [chunk.text for chunk in split(text, tokenizer, limit, window=window)] == expected


# Characters of one to seven code points that must not be cut.
_CHARACTERS = [
    *"漢字。aQ7+/=각", "e\N{COMBINING ACUTE ACCENT}", "a" + "\N{COMBINING TILDE}" * 5, "क्षि", "\u0644\u0651\u064e",
    "👩‍👩‍👧‍👦", "👍🏽", "🇫🇷", "✈\N{VARIATION SELECTOR-16}",
]  # fmt: skip


@settings(deadline=None, max_examples=20)
@given(
    parts=st.lists(st.tuples(st.sampled_from([*_CHARACTERS, "\t", " "]), st.integers(1, 60)), min_size=1, max_size=60),
    limit=st.integers(40, 80),
)
def test_texts_without_spaces_are_cut_between_characters(
    tokenizer: TextTokenizer, parts: list[tuple[str, int]], limit: int
) -> None:
    text = "".join(character * count for character, count in parts).strip()
    chunks = _chunks(text, tokenizer, limit)
    assert "".join("".join(chunks).split()) == "".join(text.split())
    assert all(len(tokenizer.ids(chunk, special=True)) <= limit for chunk in chunks)
    characters = {match.end() for match in regex.finditer(r"\X", text)}
    end = 0
    for chunk in chunks[:-1]:
        end = text.index(chunk, end) + len(chunk)
        assert end in characters


def test_cuts_within_a_word_are_at_tokens(tokenizer: TextTokenizer) -> None:
    text = "".join(document.text for document in generate("train", 20).documents)
    text = "".join(character for character in text if character.isalpha()).lower()[:5000]
    _, spans = tokenizer.ids_and_spans(text)
    if len(spans) == 1:
        return  # WordPiece reads such a word as one unknown token
    ends = {end for _, end in spans}
    chunks = _chunks(text, tokenizer, 64)
    assert "".join(chunks) == text
    places = [sum(map(len, chunks[: count + 1])) for count in range(len(chunks) - 1)]
    # The tokens of a chunk begin anew at each cut, so that few cuts are not at tokens of the whole.
    assert sum(place in ends for place in places) > 0.8 * len(places) > 0


def test_a_character_of_endless_accents_is_cut_between_two_of_them(tokenizer: TextTokenizer) -> None:
    text = "a" + "\N{COMBINING TILDE}" * 3000
    chunks = _chunks(text, tokenizer, 64)
    assert "".join(chunks) == text
    assert all(len(tokenizer.ids(chunk, special=True)) <= 64 for chunk in chunks)


def test_a_character_beyond_the_limit_is_refused_with_its_place() -> None:
    tokenizer = TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=_KINDS["gpt2"](), eos_token="</s>"))
    with pytest.raises(DocumentError, match=r"more than the 4 tokens .*'🙂' at index 2"):
        _chunks("a 🙂", tokenizer, 4)


class _Counting:
    """A tokenizer that counts the characters that it reads."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self.read = 0
        self.longest = 0

    def __getattr__(self, name: str) -> Callable[..., object]:
        def counted(texts: list[str], *, special: bool) -> object:
            self.read += sum(map(len, texts))
            self.longest = max([self.longest, *map(len, texts)])
            return getattr(self._tokenizer, name)(texts, special=special)

        return counted


@pytest.mark.parametrize("kind", ["prose", "no spaces", "only tabs", "spaces", "one long word"])
def test_work_grows_with_the_length_of_the_text(tokenizer: TextTokenizer, kind: str) -> None:
    long = {
        "prose": _ordinary_text(5, 4_000),
        "no spaces": "漢字かな" * 5_000,
        "only tabs": "cell\t" * 4_000,
        "spaces": ("word" + " " * 5_000) * 4,
        "one long word": "The " + "Ab3/" * 5_000 + " end.",
    }[kind]
    counting = _Counting(tokenizer)
    chunks = _chunks(long, counting, 64)  # type: ignore[arg-type]
    assert "".join("".join(chunks).split()) == "".join(long.split())
    assert counting.read < 6 * len(long)
    if kind in ("prose", "only tabs"):
        assert counting.longest < 10_000  # never the text as a whole


@given(lengths=st.lists(st.integers(1, 50), max_size=40), budget=st.integers(1, 200))
def test_buckets_hold_every_index_once_within_the_budget(lengths: list[int], budget: int) -> None:
    buckets = length_buckets(lengths, budget)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(lengths)))
    for bucket in buckets:
        assert len(bucket) == 1 or len(bucket) * max(lengths[i] for i in bucket) <= budget


@pytest.fixture(scope="module")
def encoder(tiny_checkpoint: object) -> TextEncoder:
    return MACModel.from_pretrained(tiny_checkpoint, device="cpu").amortization  # type: ignore[arg-type]


def test_progress_within_a_text_adds_up_to_its_length(encoder: TextEncoder) -> None:
    text = "  " + "The mill in Velmont has opened. " * 2000
    steps: list[int] = []
    rows = encoder.plan(text, advance=steps.append)
    assert sum(steps) == len(text)
    assert len(steps) > len(rows) > 10
    assert max(steps) < len(text) / 10


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
