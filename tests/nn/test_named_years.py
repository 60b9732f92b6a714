"""The vectors of years that texts name, against a plain loop; a vocabulary's years; and how they are fitted."""

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

from mac_rag.bank import MemoryBank
from mac_rag.bank.reader import reader_of
from mac_rag.config import AttentionConfig, HashedBM25Config, YearsConfig
from mac_rag.data.types import Document, QADataset, Question
from mac_rag.errors import ConfigError
from mac_rag.model import MACModel
from mac_rag.model.factory import named_years
from mac_rag.model.mac import fingerprint_fields
from mac_rag.nn.lexical import NamedYears, Years
from pipelines.tasks.fit_recency import fit_years, prior_keys_of, with_fitted_years
from tests.helpers import copy_of

WEIGHT, DECAY, WIDTH = 0.3, 2.5, 24
# Tokens 10 to 29 are the years 1990 to 2009, 31 is 1995 once more, and 30 continues a number.
YEARS = Years({**{t: 1980 + t for t in range(10, 30)}, 31: 1995}, [30], 40, range(1990, 2010), WEIGHT, DECAY)
texts = st.lists(st.lists(st.integers(1, 39), min_size=1, max_size=12), min_size=1, max_size=4)


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
@given(documents=texts, questions=texts)
def test_products_are_what_a_plain_loop_gives(documents: list[list[int]], questions: list[list[int]]) -> None:
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
    years, texts = NamedYears(YEARS, WIDTH), batch([[1, 20, 3], [4, 5]])
    asked, held = years(*texts, of_questions=True), years(*texts, of_questions=False)
    assert asked[0].count_nonzero() == 1
    assert not asked[1].any()
    years.use_years = False
    assert not years(*texts, of_questions=True).any()
    assert torch.equal(years(*texts, of_questions=False), held)


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


@pytest.fixture(scope="module")
def mac_small() -> MACModel:
    return MACModel.from_pretrained("mac-small", device="cpu")


def first_documents(model: MACModel, keys: torch.Tensor) -> list[str]:
    encoded = model.input_encoder([model.input_encoder.ids(question.question) for question in ASKED])
    prior = model.aggregation.prior
    assert prior is not None
    return [CLUBS[number] for number in prior.score(prior.queries(encoded), keys).argmax(1).tolist()]


def test_questions_find_what_was_last_known_before_their_year(mac_small: MACModel, tmp_path: Path) -> None:
    gold = [question.gold for question in ASKED]
    keys = prior_keys_of(mac_small, STREAM)
    again, keys = with_fitted_years(copy_of(mac_small), STREAM, keys, steps=100, batch_size=32)
    assert again.config.hashed_bm25 is not None
    fitted = again.config.hashed_bm25.years
    assert fitted is not None
    assert 0 < fitted.decay < 10
    with torch.no_grad(), again.without_times():
        alone = first_documents(again, keys)
    with torch.no_grad():
        found = first_documents(again, keys)
    assert sum(map(str.__eq__, found, gold)) > 10 > sum(map(str.__eq__, alone, gold))
    again.save_pretrained(tmp_path / "fitted")
    loaded = MACModel.from_pretrained(tmp_path / "fitted", device="cpu")
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
