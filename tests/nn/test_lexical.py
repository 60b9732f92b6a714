"""Lexical vectors: hashed BM25 and the years that texts name, against plain loops; and how years are fitted."""

from __future__ import annotations

import math
from itertools import pairwise
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

from mac_rag.bank import MemoryBank
from mac_rag.bank.reader import reader_of
from mac_rag.config import AttentionConfig, HashedBM25Config, YearsConfig
from mac_rag.data.types import Document, QADataset, Question
from mac_rag.errors import ConfigError, DataError
from mac_rag.model import MACModel
from mac_rag.model.amortized import fingerprint_fields
from mac_rag.model.factory import named_years
from mac_rag.nn.lexical import HashedBM25, NamedYears, Years
from pipelines.tasks.fit_recency import fit_years, prior_keys_of, with_fitted_years
from tests.helpers import copy_of, reloaded

VOCABULARY = 300
texts = st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30), min_size=1, max_size=5)


def module(vectors: int = 2, width: int = 8, corpus: list[list[int]] | None = None) -> HashedBM25:
    lexical = HashedBM25(VOCABULARY, vectors, width)
    generator = torch.Generator().manual_seed(0)
    lexical.count(corpus or torch.randint(0, VOCABULARY, (40, 25), generator=generator).tolist())
    return lexical


def hashed(lexical: HashedBM25, rows: list[list[int]]) -> torch.Tensor:
    """`[K, R, D]`, all rows in one padded batch."""
    length = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    found: torch.Tensor = lexical(ids, mask)
    return found


def fmix32(number: int) -> int:
    """MurmurHash3's finaliser."""
    number ^= number >> 16
    number = number * 0x85EBCA6B % 2**32
    number ^= number >> 13
    number = number * 0xC2B2AE35 % 2**32
    return number ^ number >> 16


@settings(max_examples=30, deadline=None)
@given(rows=texts)
def test_hashed_bm25_is_what_a_plain_loop_gives(rows: list[list[int]]) -> None:
    lexical = module()
    found = hashed(lexical, rows).flatten(1).double()
    typical = float(lexical.typical_length)
    for row, vector in zip(rows, found, strict=True):
        expected = [0.0] * 16
        for token in set(row):
            count = row.count(token)
            saturated = count * 2.5 / (count + 1.5 * (0.25 + 0.75 * len(row) / typical))
            number = fmix32(token * 0x9E3779B1 % 2**32)
            sign = 1 if number % 2 else -1
            expected[number // 2 % 16] += sign * math.sqrt(float(lexical.rarity[token])) * saturated
        torch.testing.assert_close(vector, torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=1e-5)


def test_rarity_is_bm25s_idf() -> None:
    lexical = module(corpus=[[1, 1, 2], [1, 3], [1, 4, 5, 6]])
    for token, held in {1: 3, 2: 1, 6: 1, 7: 0}.items():
        assert float(lexical.rarity[token]) == pytest.approx(math.log(1 + (3 - held + 0.5) / (held + 0.5)))
    assert float(lexical.typical_length) == 3.0
    with pytest.raises(DataError, match="no texts to count tokens in"):
        lexical.count([])


def test_products_are_bm25_scores_where_no_tokens_collide() -> None:
    generator = torch.Generator().manual_seed(1)
    documents = torch.randint(0, VOCABULARY, (50, 40), generator=generator).tolist()
    lexical = module(vectors=4096, width=64, corpus=documents)
    assert len(lexical.places.unique()) == VOCABULARY
    question = list(range(100, 112))  # distinct tokens, which all count alike
    products = hashed(lexical, documents).flatten(1) @ hashed(lexical, [question]).flatten()
    scores = []
    for document in documents:
        score = 0.0
        for token in question:
            holding = sum(token in other for other in documents)
            count = document.count(token)
            score += math.log(1 + (50 - holding + 0.5) / (holding + 0.5)) * count * 2.5 / (count + 1.5)
        scores.append(score)
    expected = torch.tensor(scores)
    assert len(expected[expected > 0]) > 10
    torch.testing.assert_close(products / products.norm(), expected / expected.norm(), atol=1e-5, rtol=1e-5)


def test_collisions_cancel_out_on_average() -> None:
    """Over many pairs of texts that share nothing, products are small beside those of texts that share half."""
    order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(2)).tolist()
    lexical = module(vectors=4, width=64)
    groups = [order[start : start + 20] for start in range(0, 280, 20)]
    halves = [[*group[:10], *other[:10]] for group, other in pairwise(groups)]
    apart = hashed(lexical, groups).flatten(1)
    products = apart @ apart.T
    among = products[~torch.eye(len(groups), dtype=torch.bool)]
    shared = (apart[:-1] * hashed(lexical, halves).flatten(1)).sum(1)
    assert among.abs().mean() < 0.25 * shared.mean()
    assert among.mean().abs() < 0.1 * shared.mean()


WEIGHT, DECAY, WIDTH = 0.3, 2.5, 24
# Tokens 10 to 29 are the years 1990 to 2009, 31 is 1995 once more, and 30 continues a number.
YEARS = Years({**{t: 1980 + t for t in range(10, 30)}, 31: 1995}, [30], 40, range(1990, 2010), WEIGHT, DECAY)
dated_texts = st.lists(st.lists(st.integers(1, 39), min_size=1, max_size=12), min_size=1, max_size=4)


def batch(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(map(len, rows))
    ids = torch.tensor([[*row, *[15] * (length - len(row))] for row in rows])  # a year as padding, which is masked
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    return ids, mask


def years_in(row: list[int]) -> list[int]:
    return [
        YEARS.of_tokens[token]
        for token, after in zip(row, [*row[1:], 0], strict=True)
        if token in YEARS.of_tokens and after != 30
    ]


@settings(max_examples=60, deadline=None)
@given(documents=dated_texts, questions=dated_texts)
def test_products_of_years_are_what_a_plain_loop_gives(documents: list[list[int]], questions: list[list[int]]) -> None:
    years = NamedYears(YEARS, WIDTH)
    held, asked = years(*batch(documents), of_questions=False), years(*batch(questions), of_questions=True)
    assert held.shape == (len(documents), WIDTH)
    for question, products in zip(questions, asked.double() @ held.double().T, strict=True):
        for document, product in zip(documents, products, strict=True):
            first = min(years_in(question), default=None)
            before = [year for year in years_in(document) if first is not None and year <= first]
            expected = 0.0 if first is None or not before else math.exp(-(first - max(before)) / DECAY)
            assert float(product) == pytest.approx(WEIGHT * expected if expected >= 1 / 32 else 0.0, abs=1e-6)


def test_switched_off_no_question_asks_for_a_year_and_documents_stay() -> None:
    years, dated_texts = NamedYears(YEARS, WIDTH), batch([[1, 20, 3], [4, 5]])
    asked, held = years(*dated_texts, of_questions=True), years(*dated_texts, of_questions=False)
    assert asked[0].count_nonzero() == 1
    assert not asked[1].any()
    years.use_years = False
    assert not years(*dated_texts, of_questions=True).any()
    assert torch.equal(years(*dated_texts, of_questions=False), held)


def tokenizer_of(model: Any, pre_tokenizer: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


@pytest.mark.parametrize(
    ("vocabulary", "pre_tokenizer", "years", "continuing"),
    [
        (["[UNK]", "1998", "##9", "9", "in", "14", "##53"], Whitespace(), {1: 1998}, [2, 6]),
        (
            ["[UNK]", "\u01201998", "1998", "9", "\u0120in"],
            ByteLevel(add_prefix_space=False),
            {1: 1998, 2: 1998},
            [2, 3],
        ),
    ],
)
def test_the_years_of_a_vocabulary(
    vocabulary: list[str], pre_tokenizer: Any, years: dict[int, int], continuing: list[int]
) -> None:
    ids = {name: number for number, name in enumerate(vocabulary)}
    pieces = any(name.startswith("##") for name in vocabulary)
    model = WordPiece(ids, unk_token="[UNK]") if pieces else WordLevel(ids, unk_token="[UNK]")
    found = named_years(YearsConfig(weight=0.1, decay=4), tokenizer_of(model, pre_tokenizer), 384).years
    assert (found.of_tokens, sorted(found.continuing), found.calendar) == (years, continuing, range(1716, 2100))


def test_a_vocabulary_without_years_is_refused() -> None:
    words = tokenizer_of(WordPiece({"[UNK]": 0, "in": 1, "1700": 2}, unk_token="[UNK]"), Whitespace())
    with pytest.raises(ConfigError, match="vocabulary has none from 1716 to 2099; leave it out"):
        named_years(YearsConfig(weight=0.1, decay=4), words, 384)


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


def first_documents(model: MACModel, keys: torch.Tensor) -> list[str]:
    encoded = model.input_encoder([model.input_encoder.ids(question.question) for question in ASKED])
    prior = model.aggregation.prior
    return [CLUBS[number] for number in prior.score(prior.queries(encoded), keys).argmax(1).tolist()]


def test_questions_find_what_was_last_known_before_their_year(mac_small: MACModel, tmp_path: Path) -> None:
    gold = [question.gold for question in ASKED]
    keys = prior_keys_of(mac_small, STREAM)
    again, keys = with_fitted_years(copy_of(mac_small), STREAM, keys)
    assert again.config.hashed_bm25 is not None
    fitted = again.config.hashed_bm25.years
    assert 0 < fitted.decay < 10
    with torch.no_grad(), again.without_times():
        alone = first_documents(again, keys)
    with torch.no_grad():
        found = first_documents(again, keys)
    assert sum(map(str.__eq__, found, gold)) > 10 > sum(map(str.__eq__, alone, gold))
    loaded = reloaded(again, tmp_path / "fitted")
    assert loaded.config.hashed_bm25 == HashedBM25Config(vectors=8, weight=0.07, years=fitted)
    torch.testing.assert_close(prior_keys_of(loaded, STREAM), keys)


def test_banks_belong_to_a_decay_of_years_and_not_to_their_weight(mac_small: MACModel) -> None:
    def fields(years: YearsConfig | None) -> str:
        assert mac_small.config.hashed_bm25 is not None
        changed = mac_small.config.hashed_bm25.model_copy(update={"years": years})
        return fingerprint_fields(mac_small.config.model_copy(update={"hashed_bm25": changed}))

    assert fields(None) != fields(YearsConfig(weight=1, decay=2)) != fields(YearsConfig(weight=1, decay=3))
    assert fields(YearsConfig(weight=1, decay=2)) == fields(YearsConfig(weight=2, decay=2))


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
