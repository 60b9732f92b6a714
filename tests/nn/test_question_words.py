"""What a question asks for beside its own words, against a plain loop; and a vocabulary's years."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel, WordPiece
from tokenizers.pre_tokenizers import ByteLevel, Whitespace
from transformers import PreTrainedTokenizerFast

from mac_rag.config import AttentionConfig, HashedBM25Config, YearsConfig
from mac_rag.data.types import Document, QADataset, Question
from mac_rag.memory import MemoryBank
from mac_rag.memory.views.reader import reader_of
from mac_rag.model import MACModel
from mac_rag.model.years import years_of
from mac_rag.nn.hashed_bm25 import HashedBM25
from mac_rag.nn.question_words import QuestionWords, Years
from pipelines.tasks.fit_recency import prior_keys_of
from pipelines.tasks.fit_years import fit_years

WEIGHT, DECAY = 0.3, 2.5
# Tokens 10 to 29 are the years 1990 to 2009, 30 continues a number.
YEARS = Years({1980 + token: token for token in range(10, 30)}, [30], 40, WEIGHT, DECAY)
questions = st.lists(st.lists(st.integers(1, 39), min_size=1, max_size=12), min_size=1, max_size=4)


def module() -> HashedBM25:
    lexical = HashedBM25(40, 4, 16)
    lexical.count(torch.randint(0, 40, (30, 20), generator=torch.Generator().manual_seed(0)).tolist())
    return lexical


def batch(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(map(len, rows))
    ids = torch.tensor([[*row, *[15] * (length - len(row))] for row in rows])  # a year as padding, which is masked
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    return ids, mask


@settings(max_examples=60, deadline=None)
@given(rows=questions)
def test_it_is_what_a_plain_loop_gives(rows: list[list[int]]) -> None:
    lexical, words = module(), QuestionWords(YEARS)
    ids, mask = batch(rows)
    found = words(lexical(ids, mask), ids, mask, lexical).flatten(1)
    for row, vector in zip(rows, found, strict=True):
        own = lexical(torch.tensor([row]), torch.ones(1, len(row))).flatten().double()
        expected = own / own.norm()
        named = [
            1980 + token for token, after in zip(row, [*row[1:], 0], strict=True) if 10 <= token < 30 and after != 30
        ]
        for year in range(1990, max(named, default=0) + 1):
            token = year - 1980
            weight = WEIGHT * math.exp(-max(min(named) - year, 0) / DECAY)
            sign = float(lexical.signs[token]) * math.sqrt(float(lexical.rarity[token]))
            expected[lexical.places[token]] += weight * sign
        torch.testing.assert_close(vector.double(), expected, atol=1e-5, rtol=1e-5)


def test_switched_off_or_without_years_it_is_the_question_alone() -> None:
    lexical, words = module(), QuestionWords(YEARS)
    ids, mask = batch([[1, 20, 3], [4, 5]])
    vectors = lexical(ids, mask)
    alone = QuestionWords()(vectors, ids, mask, lexical)
    torch.testing.assert_close(alone.flatten(1).norm(dim=1), torch.ones(2))
    expanded = words(vectors, ids, mask, lexical)
    assert not torch.allclose(expanded[0], alone[0])
    assert torch.equal(expanded[1], alone[1])
    words.use_years = False
    assert torch.equal(words(vectors, ids, mask, lexical), alone)


def tokenizer_of(model: Any, pre_tokenizer: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


@pytest.mark.parametrize(
    ("vocabulary", "pre_tokenizer", "years", "continuing"),
    [
        (["[UNK]", "1998", "##9", "9", "in", "14", "##53"], Whitespace(), {1998: 1}, [2, 6]),
        (["[UNK]", "Ġ1998", "1998", "9", "Ġin"], ByteLevel(add_prefix_space=False), {1998: 1}, [2, 3]),
        (["[UNK]", "in"], Whitespace(), {}, []),
    ],
)
def test_the_years_of_a_vocabulary(
    vocabulary: list[str], pre_tokenizer: Any, years: dict[int, int], continuing: list[int]
) -> None:
    ids = {name: number for number, name in enumerate(vocabulary)}
    pieces = any(name.startswith("##") for name in vocabulary)
    model = WordPiece(ids, unk_token="[UNK]") if pieces else WordLevel(ids, unk_token="[UNK]")
    found = years_of(YearsConfig(weight=0.1, decay=4), tokenizer_of(model, pre_tokenizer))
    assert found is not None
    known = {year: token for year, token in found.tokens.items() if token}  # the others are unknown words here
    assert (known, sorted(found.continuing)) == (years, continuing)
    assert years_of(None, None) is None


# A club of each third year; each question names a year between them.
CLUBS = ["Porto", "Turin", "Lyon", "Ghent", "Leeds", "Basel"]
DOCUMENTS = tuple(
    Document(club, f"In {1985 + 3 * number} Berg moved to {club}, where he stayed.", {"date": 1985 + 3 * number})
    for number, club in enumerate(CLUBS)
)
ASKED = tuple(
    Question(f"{club}-{later}", f"Where did Berg play in {1985 + 3 * number + later}?", (club,), club)
    for number, club in enumerate(CLUBS)
    for later in (1, 2)
)
STREAM = QADataset("own", "train", DOCUMENTS, ASKED)


@pytest.fixture(scope="module")
def mac_small() -> MACModel:
    return MACModel.from_pretrained("mac-small", device="cpu")


def first_documents(model: MACModel, keys: torch.Tensor) -> list[str]:
    encoded = model.input_encoder([model.input_encoder.ids(question.question) for question in ASKED])
    prior = model.aggregation.prior
    assert prior is not None
    return [CLUBS[number] for number in prior.score(prior.queries(encoded), keys).argmax(1).tolist()]


def test_questions_find_what_was_last_known_before_their_year_and_banks_stay_as_they_are(
    mac_small: MACModel, tmp_path: Path
) -> None:
    gold, fingerprint = [question.gold for question in ASKED], mac_small.fingerprint
    keys = prior_keys_of(mac_small, STREAM)
    fitted = fit_years(mac_small, STREAM, keys, steps=100, batch_size=32)
    assert fitted is not None
    assert 0 < fitted.decay < 10
    with torch.no_grad(), mac_small.without_times():
        alone = first_documents(mac_small, keys)
    with torch.no_grad():
        found = first_documents(mac_small, keys)
    assert sum(map(str.__eq__, found, gold)) > 10 > sum(map(str.__eq__, alone, gold))
    mac_small.save_pretrained(tmp_path / "fitted")
    again = MACModel.from_pretrained(tmp_path / "fitted", device="cpu")
    assert again.config.hashed_bm25 == HashedBM25Config(vectors=8, weight=0.07, years=fitted)
    assert again.fingerprint == fingerprint
    with torch.no_grad():
        assert first_documents(again, keys) == found


def test_a_reader_tells_answers_with_years_from_those_without(mac_small: MACModel) -> None:
    bank = MemoryBank(mac_small.fingerprint)
    bank.put(list(DOCUMENTS), mac_small.amortize([document.text for document in DOCUMENTS]))
    reader = reader_of(mac_small, bank, AttentionConfig())
    asked = [question.question for question in ASKED[:3]]
    expected = reader.aggregate(asked).phi
    with mac_small.without_times():
        assert not torch.allclose(reader.aggregate(asked).phi, expected)
    assert torch.equal(reader.aggregate(asked).phi, expected)


def test_without_lexical_vectors_nothing_is_fitted(loaded_tiny_model: MACModel) -> None:
    assert fit_years(loaded_tiny_model, STREAM, prior_keys_of(loaded_tiny_model, STREAM)) is None
