"""A model with a recency term: the same answers wherever a bank lies, and none of what is hidden or undone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mac_rag.bank import MemoryBank
from mac_rag.bank.overview import layout_for
from mac_rag.bank.reader import reader_of
from mac_rag.config import AggregationConfig, AttentionConfig
from mac_rag.data.dates import ALWAYS, named_in, written
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError
from mac_rag.model import MACModel
from mac_rag.nn.attended_bank import AttendedBank
from mac_rag.nn.memory_tokens import MemoryTokens
from pipelines.corpora.qa_data import DataConfig
from pipelines.objective import Batch, LossWeights, mac_loss
from pipelines.tasks.fit_recency import FitRecencyConfig, fit_recency, prior_keys_of, with_recency_term, write_fitted
from pipelines.tasks.train import moment
from tests.bank.helpers import fast_folder, random_rows
from tests.distributed.local_shards import assert_read_alike, made, reader
from tests.helpers import copy_of

STREAM = generate("val", 10)
QUESTIONS = ["Who opened the bridge?", "In 2003: who opened it?", "Now: what was sold?"]
# A document a year from 2001 on, the last ones first.
DATED = [Document(one.id, one.text, {"date": 2001 + year}) for year, one in enumerate(STREAM.documents)][::-1]


@pytest.fixture(scope="module")
def recent(loaded_tiny_model: MACModel) -> MACModel:
    """A model whose term takes much from all but the newest documents that a question can mean."""
    model = with_recency_term(copy_of(loaded_tiny_model))
    with torch.no_grad():
        model.aggregation.recency.bias.fill_(9.0)
    return model


def dated_bank(model: MACModel, phi: torch.Tensor) -> MemoryBank:
    bank = MemoryBank(model.fingerprint)
    bank.keep_rows_as(layout_for(model.aggregation))  # as shards do
    bank.put(DATED[: len(phi)], phi)
    return bank


@pytest.mark.parametrize(
    ("question", "moment"),
    [
        ("In 2003: who leads it?", "2004-01-01"),
        ("Who led it from 1998 to 2004?", "2005-01-01"),
        ("What happened in 1999?", "2000-01-01"),
        ("Now: who leads it?", None),
        ("Who sold 2003-b for $1999 and 1,987 or 2001.5?", None),
        ("Did 12003 people come?", None),
        ("Was it 2150?", None),
    ],
)
def test_the_time_that_a_question_names(question: str, moment: str | None) -> None:
    named = named_in(question)
    assert (None if named is None else written(named + 1)) == moment


def test_readers_of_all_kinds_agree(recent: MACModel) -> None:
    phi = random_rows(recent, 8, 0)
    bank = dated_bank(recent, phi)
    expected = reader_of(recent, bank, AttentionConfig()).aggregate(QUESTIONS).phi
    with recent.without_recency():
        off = reader_of(recent, bank, AttentionConfig()).aggregate(QUESTIONS).phi
    assert (expected - off).abs().max() > 1e-3
    kinds = [
        AttentionConfig(cache_bytes=0),
        AttentionConfig(strategy="preselect", preselected=8),
        AttentionConfig(strategy="hierarchical", subgroup=8),
    ]
    for config in kinds:
        found = reader_of(recent, bank, config).aggregate(QUESTIONS).phi
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    moments = bank.directory.row_dates
    found = recent.aggregate(QUESTIONS, recent.project(bank.phi, dates=moments))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shards", [1, 3])
def test_shards_are_read_as_one_bank(recent: MACModel, shards: int) -> None:
    phi = random_rows(recent, 8, 0)
    one = dated_bank(recent, phi)
    with fast_folder() as place, made(place / "bank", recent, shards) as bank:
        bank.put(DATED[:8], phi, [1] * 8)
        bank.commit()
        for allowed in (None, {document.id for document in DATED[2:7]}):
            assert_read_alike(reader(recent, bank), reader(recent, one), QUESTIONS, allowed)


def test_later_documents_change_no_bit(recent: MACModel) -> None:
    found, other = MACEngine(recent), MACEngine(recent)
    for one in (found, other):  # amortized apart from the others, with whom they would share batches
        one.adapt(DATED[5:])
    found.adapt(DATED[:5])
    other.adapt([Document(one.id, DATED[-1].text, one.metadata) for one in DATED[:5]])
    assert torch.equal(found.aggregate(QUESTIONS, as_of="2005"), other.aggregate(QUESTIONS, as_of="2005"))


def test_a_new_date_takes_effect_without_amortizing(recent: MACModel) -> None:
    engine, wanted = MACEngine(recent), MACEngine(recent)
    redated = [Document(one.id, one.text, {"date": 2030 - year}) for year, one in enumerate(DATED)]
    engine.adapt(DATED)
    before = engine.aggregate(QUESTIONS)
    rows = engine.adapt(redated).rows
    wanted.adapt(redated)
    assert rows == 0
    assert torch.equal(engine.aggregate(QUESTIONS), wanted.aggregate(QUESTIONS))
    assert not torch.equal(engine.aggregate(QUESTIONS), before)


def test_merged_documents_are_as_new_as_the_newest() -> None:
    bank = MemoryBank("f00d")
    dates = ["2003-01-01", "2001-01-01", "2002-01-01"]
    bank.put([Document(date, "", {"date": date}) for date in dates], torch.zeros(4, 2, 4), [1, 1, 2])
    bank.merge([dates[0], dates[1]], torch.zeros(1, 2, 4))
    assert sorted(map(written, bank.directory.row_dates.tolist())) == ["2002-01-01", "2002-01-01", "2003-01-01"]


def test_a_checkpoint_keeps_the_term(recent: MACModel, tmp_path: Path) -> None:
    recent.save_pretrained(tmp_path / "model")
    again = MACModel.from_pretrained(tmp_path / "model", device="cpu")
    assert again.answer_digest == recent.answer_digest
    assert again.aggregation.recency.bias.item() == 9.0


def test_it_reads_the_banks_of_the_model_without_it(loaded_tiny_model: MACModel, recent: MACModel) -> None:
    assert recent.fingerprint == loaded_tiny_model.fingerprint
    assert recent.answer_digest != loaded_tiny_model.answer_digest
    before, after = MACEngine(loaded_tiny_model), MACEngine(recent)
    before.adapt(DATED)
    after.bank = before.bank
    wanted = before.aggregate(QUESTIONS)
    assert (after.aggregate(QUESTIONS) - wanted).abs().max() > 1e-3
    with recent.without_recency():
        assert torch.equal(after.aggregate(QUESTIONS), wanted)


def test_without_a_prior_there_is_no_term(loaded_tiny_model: MACModel) -> None:
    with pytest.raises(ValueError, match="recency is true, but it is a term of the document prior; set prior_width"):
        AggregationConfig(recency=True)
    model = copy_of(loaded_tiny_model)
    model.aggregation.prior = None
    with pytest.raises(ConfigError, match="no document prior"):
        with_recency_term(model)


def test_training_learns_the_term_from_the_dates_of_a_batch(loaded_tiny_model: MACModel) -> None:
    """The losses are those over a bank with these dates; further negatives are older than all of it."""
    model = with_recency_term(copy_of(loaded_tiny_model))
    term = model.aggregation.recency
    documents, questions = STREAM.documents[:4], STREAM.questions[:4]
    batch = Batch(
        documents=[document.text for document in documents],
        questions=[question.question for question in questions],
        answers=[question.answers[0] for question in questions],
        gold=[0, 1, 2, 3],
        dates=[moment(document) for document in documents],
    )
    others = MemoryTokens(model.amortize([document.text for document in STREAM.documents[4:]]))
    weights = LossWeights(answer=1, contrastive=1)
    terms, phi = mac_loss(model, batch, weights, negatives=others, distractors=9)
    terms["loss"].backward()
    assert all(parameter.grad is not None and parameter.grad != 0 for parameter in term.parameters())
    model.eval()
    known = torch.cat([phi.stacked(), others.stacked()])
    bank = model.project(known, dates=torch.tensor([*batch.dates, *[ALWAYS] * len(others)]))
    with torch.no_grad():
        encoded = model.input_encoder([model.input_encoder.ids(question) for question in batch.questions])
        queries = model.aggregation.prior_queries(encoded)
        asked = model.asked(batch.questions)
        scores = AttendedBank(model.aggregation, bank, queries, asked=asked, dtype=torch.float32).scores
        expected = torch.nn.functional.cross_entropy(scores, torch.arange(4))
    torch.testing.assert_close(terms["contrastive"], expected)
    undated, _ = mac_loss(model, replace(batch, dates=()), weights, negatives=others, distractors=9)
    assert all(not torch.allclose(undated[name], terms[name]) for name in ("answer", "contrastive"))


def test_fitting_changes_nothing_else_and_lowers_the_loss(
    loaded_tiny_model: MACModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_recency_term(copy_of(loaded_tiny_model))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stories = generate("train", 40, update_rate=1.0)
    keys = prior_keys_of(model, stories)
    monkeypatch.setattr("pipelines.tasks.fit_recency._STEPS", 1)
    first = fit_recency(model, stories, keys)  # the loss before its one step
    monkeypatch.setattr("pipelines.tasks.fit_recency._STEPS", 60)
    assert fit_recency(model, stories, keys) < first - 0.01
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {f"aggregation.recency.{name}" for name in ("strength", "alike", "about", "bias")}
    undated = [Document(one.id, one.text) for one in stories.documents]
    with pytest.raises(ConfigError, match="no document of newswire has a date"):
        fit_recency(model, type(stories)(stories.name, stories.split, tuple(undated), stories.questions), keys)


def test_it_is_fitted_to_documents_longer_than_the_model_reads(loaded_tiny_model: MACModel, tmp_path: Path) -> None:
    short, longest = tmp_path / "short", 40
    loaded_tiny_model.save_pretrained(short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_document_tokens": longest}))
    stories = FitRecencyConfig(start_from=str(short), data=DataConfig(documents=6), store_dtype="int8")
    assert (
        max(len(loaded_tiny_model.amortization.ids(one.text)) for one in stories.data.training_set().documents)
        > longest
    )
    write_fitted(stories, tmp_path)
    assert MACModel.from_pretrained(tmp_path / "last").aggregation.recency is not None
