"""A bank in shards gives what one bank with all documents gives, and says what it cannot."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import NonCallableMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mac_rag.bank import MemoryBank
from mac_rag.bank.directory import id_hashes
from mac_rag.bank.overview import layout_for
from mac_rag.bank.projection import ProjectedBank
from mac_rag.bank.reader import reader_of
from mac_rag.config import AttentionConfig, BoundConfig
from mac_rag.data.types import Document
from mac_rag.distributed import shard
from mac_rag.distributed.shard import Shard
from mac_rag.distributed.shard_files import shard_folder, shard_of, shards_of
from mac_rag.distributed.sharded_bank import ShardedBank
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, ConfigError, ShardLostError
from mac_rag.model import AmortizedModel, MACModel
from mac_rag.model.calibration import Calibration
from mac_rag.nn.attention import direct_attention
from mac_rag.nn.memory_tokens import MemoryTokens
from tests.bank.helpers import fast_folder, random_rows, rounded, rows_read
from tests.distributed.local_shards import assert_read_alike, documents, local, made, opened, reader
from tests.nn.helpers import TOKENS, WIDTH, network, random, random_texts

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
QUESTIONS = ["Who opened the bridge?", "Where is the museum?", "What was sold?"]


def one_bank(model: MACModel, bank: ShardedBank) -> MemoryBank:
    """One bank with all entries of a bank in shards."""
    one = MemoryBank(model.fingerprint)
    one.keep_rows_as(layout_for(model.aggregation))  # as shards do
    for entry in bank:
        one.put([Document(entry.document_id, "", entry.metadata)], entry.phi, [len(entry.phi)])
    return one


def test_the_shard_of_a_document_never_changes() -> None:
    names = ("bridge", "museum", "día", "\ud800")
    assert [shard_of(name, 4) for name in names] == [2, 1, 0, 0]
    for shards in (1, 3, 4, 4096):
        assert shards_of(id_hashes(names), shards).tolist() == [shard_of(name, shards) for name in names]


@settings(max_examples=12, deadline=None)
@given(
    shards=st.integers(1, 4),
    rows=st.lists(st.integers(1, 3), min_size=1, max_size=9),
    deleted=st.sets(st.integers(0, 8)),
    allowed=st.none() | st.sets(st.integers(0, 9)),
    read_before=st.booleans(),
    cached=st.booleans(),
    use_prior=st.booleans(),
)
def test_shards_are_read_as_one_bank(
    loaded_tiny_model: MACModel,
    shards: int,
    rows: list[int],
    deleted: set[int],
    allowed: set[int] | None,
    read_before: bool,
    cached: bool,
    use_prior: bool,
) -> None:
    model, names = loaded_tiny_model, None if allowed is None else {f"text {number}" for number in allowed}
    phi = random_rows(model, sum(rows), 0)
    one = MemoryBank(model.fingerprint)
    one.keep_rows_as(layout_for(model.aggregation))  # as shards do
    with fast_folder() as place, made(place / "bank", model, shards) as bank:
        for each in (one, bank):
            each.put(documents(len(rows)), phi, rows)
            each.commit()
        config = {"cache_bytes": 2 << 20 if cached else 0}
        found = reader(model, bank, **config)
        model.aggregation.use_prior = use_prior
        try:
            if read_before:
                found.aggregate(QUESTIONS)
            for number in deleted & set(range(len(rows))):
                assert bank.delete(f"text {number}") == one.delete(f"text {number}") == (f"text {number}",)
            assert sorted(bank.document_ids) == sorted(one.document_ids)
            assert len(bank) == len(one)
            found.follow(bank.snapshot())
            if not any(names is None or name in names for name in one.document_ids):
                with pytest.raises(BankError, match=r"none of the documents|is empty"):
                    found.aggregate(QUESTIONS, names)
                return
            assert_read_alike(found, reader(model, one, **config), QUESTIONS, names)
        finally:
            model.aggregation.use_prior = True


@pytest.mark.parametrize("prior_width", [0, 8])
def test_in_double_precision_shards_agree_with_direct_attention(
    folder: Path, prior_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubled = partial(ProjectedBank, dtype=torch.float64)
    monkeypatch.setattr(shard, "ProjectedBank", doubled)  # cached keys and values
    built, question = network(prior_width), random_texts(3)
    texts = rounded(layout_for(built), random(20, TOKENS, WIDTH, seed=1).float())
    encoder = lambda ids, read: question  # noqa: E731
    encoder.ids = lambda text: [1]  # type: ignore[attr-defined]
    encoder.network = SimpleNamespace(years=None)  # type: ignore[attr-defined]
    model: Any = NonCallableMock(
        spec=AmortizedModel,
        aggregation=built,
        fingerprint="f00d",
        input_encoder=encoder,
        device="cpu",
        asked=lambda questions: None,
        look=lambda questions: None,
    )
    with made(folder, model, 4) as bank:
        bank.put(documents(20), texts)
        order = [int(name[5:]) for name in bank.document_ids]
        with torch.no_grad():
            rows = built.project(MemoryTokens(texts[order].double()))
            expected = built(question, rows, attention=direct_attention, mass=True)
        found = reader(model, bank)
        close = {"rtol": 1e-5, "atol": 1e-6} if prior_width else CLOSE  # prior keys are kept in single precision
        torch.testing.assert_close(found.aggregate(QUESTIONS).phi, expected[0], **close)
        torch.testing.assert_close(found.attention_mass(QUESTIONS), expected[1], **close)


def test_a_shard_learns_from_the_others_how_few_rows_matter(
    tiny_model: MACModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bound of its own best document alone, it reads more; the result is the same."""
    assert tiny_model.aggregation.prior is not None
    with torch.no_grad():
        tiny_model.aggregation.prior.log_scale.fill_(5.0)
    read = rows_read(monkeypatch)

    def asked() -> tuple[int, Tensor]:
        with fast_folder() as place, made(place / "bank", tiny_model, 3) as bank:
            bank.put(documents(60), random_rows(tiny_model, 60, 0))
            read.clear()
            phi = reader(tiny_model, bank).aggregate(QUESTIONS).phi
            return sum(read), phi

    rows, phi = asked()
    floor = Shard.floor
    monkeypatch.setattr(Shard, "floor", lambda *args, **kwargs: [floor(*args, **kwargs), None][1])
    more_rows, same_phi = asked()
    assert rows < more_rows
    torch.testing.assert_close(phi, same_phi)


def test_documents_are_in_the_order_of_shards_and_then_of_arrival(loaded_tiny_model: MACModel, folder: Path) -> None:
    names = [f"text {number}" for number in range(9)]
    with made(folder, loaded_tiny_model, 3) as bank:
        bank.put(documents(9), random_rows(loaded_tiny_model, 9, 0))
        bank.put([Document("text 4", "again")], random_rows(loaded_tiny_model, 1, 1))
        arrived = [*names[:4], *names[5:], "text 4"]
        assert bank.document_ids == sorted(arrived, key=lambda name: shard_of(name, 3))
        assert [entry.document_id for entry in bank] == bank.document_ids
        assert [members for (members,) in bank.row_members] == bank.document_ids
        bank.commit()
    with opened(folder, loaded_tiny_model, write=False) as again:
        assert again.document_ids == sorted(arrived, key=lambda name: shard_of(name, 3))
        assert again["text 4"].metadata == {}
        assert again["text 5"].metadata == {"number": 5}
        kept = rounded(layout_for(loaded_tiny_model.aggregation), random_rows(loaded_tiny_model, 1, 1))
        assert again["text 4"].phi.equal(kept)
        torch.testing.assert_close(again.phi, torch.cat([entry.phi for entry in again]))
        with pytest.raises(BankError, match="write=True"):
            again.delete("text 4")


def test_a_shard_of_which_nothing_is_allowed_is_not_asked(loaded_tiny_model: MACModel, folder: Path) -> None:
    with made(folder, loaded_tiny_model, 4) as bank:
        bank.put(documents(12), random_rows(loaded_tiny_model, 12, 0))
        allowed = {name for name in bank.document_ids if shard_of(name, 4) in (0, 2)}
        expected = reader(loaded_tiny_model, one_bank(loaded_tiny_model, bank))
        local(bank).asked.clear()
        assert_read_alike(reader(loaded_tiny_model, bank), expected, QUESTIONS, allowed)
        assert {number for number, request in local(bank).asked if request.method == "attend"} == {0, 2}


def test_errors_of_a_put_change_no_shard(loaded_tiny_model: MACModel, folder: Path) -> None:
    phi = random_rows(loaded_tiny_model, 4, 0)
    with made(folder, loaded_tiny_model, 3) as bank:
        bank.put(documents(4), phi)
        before = bank.snapshot()
        for wrong, tokens in (
            ([*documents(3), Document("text 0", "twice")], phi),
            ([*documents(3), Document("text 3", "", {"a": float("nan")})], phi),
            (documents(4), phi[:3]),
            (documents(4), phi[:, :1]),
            (documents(4), phi.where(phi > 0, torch.inf)),
        ):
            with pytest.raises(BankError):
                bank.put(wrong, tokens)
        with pytest.raises(BankError, match="holds no document 'nobody'"):
            bank.delete("nobody")
        assert bank.snapshot() is before


def test_an_engine_answers_from_shards_as_from_one_bank(loaded_tiny_model: MACModel, folder: Path) -> None:
    texts = [Document(f"text {n}", f"Ada Voss has opened bridge number {n} of the town.", {"n": n}) for n in range(10)]
    one = MACEngine(loaded_tiny_model)
    with made(folder, loaded_tiny_model, 3) as bank:
        engine = MACEngine(loaded_tiny_model, bank)
        for each in (one, engine):
            report = each.adapt(texts)
            assert (report.added, report.updated, report.unchanged) == (10, 0, 0)
            report = each.adapt([Document("text 3", "It was closed."), *texts[:3]])
            assert (report.added, report.updated, report.unchanged) == (0, 1, 3)
            assert each.forget("text 5") == ("text 5",)
        found, expected = engine.answer(QUESTIONS), one.answer(QUESTIONS)
        assert [each.text for each in found] == [each.text for each in expected]
        allowed = {"text 1", "text 2", "text 8"}
        assert_read_alike(reader(engine.model, engine.bank), reader(one.model, one.bank), QUESTIONS, allowed)
        engine.compact()
        assert_read_alike(reader(engine.model, engine.bank), reader(one.model, one.bank), QUESTIONS)
        with pytest.raises(ConfigError, match="'preselect'"):
            MACEngine(loaded_tiny_model, bank, attention=AttentionConfig(strategy="preselect"))
        with pytest.raises(ConfigError, match="cannot be bounded"):
            MACEngine(loaded_tiny_model, bank, bound=BoundConfig(maximum=3))


def test_a_question_sees_its_snapshot_while_the_shards_change(loaded_tiny_model: MACModel, folder: Path) -> None:
    model = loaded_tiny_model
    with made(folder, model, 2) as bank:
        bank.put(documents(6), random_rows(model, 6, 0))
        bank.commit()
        before, expected = bank.committed, reader(model, one_bank(model, bank))
        bank.put([*documents(2), Document("new", "")], random_rows(model, 3, 1))
        bank.delete("text 5")
        assert bank.committed is before
        assert_read_alike(reader_of(model, before, AttentionConfig()), expected, QUESTIONS)
        bank.commit()
        assert bank.committed is bank.snapshot()
        assert bank.committed.version > before.version
        assert_read_alike(reader_of(model, before, AttentionConfig()), expected, QUESTIONS)
        assert_read_alike(reader(model, bank), reader(model, one_bank(model, bank)), QUESTIONS)
        bank.delete("new")
        bank.rollback()
        assert "new" in bank
        assert_read_alike(reader(model, bank), reader(model, one_bank(model, bank)), QUESTIONS)
        del before
        bank.delete("new")
        assert all(len(shard._snapshots) <= 2 for shard in local(bank).shards.values())


def test_a_reader_follows_the_writer(loaded_tiny_model: MACModel, folder: Path) -> None:
    model = loaded_tiny_model
    with made(folder, model, 2) as bank, opened(folder, model, write=False) as reading:
        bank.put(documents(6), random_rows(model, 6, 0))
        assert not reading.refresh()
        bank.commit()
        assert len(reading) == 0
        assert reading.refresh()
        assert_read_alike(reader(model, reading), reader(model, one_bank(model, bank)), QUESTIONS)
        with pytest.raises(BankError, match="is open for writing"):
            opened(folder, model)


def test_a_lost_shard_is_named_and_restarts(loaded_tiny_model: MACModel, folder: Path) -> None:
    model = loaded_tiny_model
    with made(folder, model, 3) as bank:
        bank.put(documents(9), random_rows(model, 9, 0))
        bank.commit()
        engine, expected = MACEngine(model, bank), reader(model, one_bank(model, bank))
        local(bank).dies = (1, "attend", "before")
        local(bank).held = {1}
        for _ in range(2):
            with pytest.raises(ShardLostError, match=rf"shard 1 of 3 \({shard_folder(folder, 1)}\).*try again"):
                engine.answer(QUESTIONS)
        local(bank).held = set()
        engine.answer(QUESTIONS)
        assert_read_alike(engine._reader, expected, QUESTIONS)
        # The folder is gone: the shard cannot restart until it is back.
        folder_of_shard = shard_folder(folder, 2)
        folder_of_shard.rename(folder / "elsewhere")
        local(bank).dies = (2, "mass", "before")
        with pytest.raises(ShardLostError, match="shard 2 of 3"):
            engine.document_attention(QUESTIONS)
        with pytest.raises(ShardLostError, match=r"cannot restart.*holds no shard.*backup"):
            engine.document_attention(QUESTIONS)
        (folder / "elsewhere").rename(folder_of_shard)
        with pytest.raises(ShardLostError, match="shard 2 of 3"):
            engine.document_attention(QUESTIONS)
        engine.document_attention(QUESTIONS)
        assert_read_alike(engine._reader, expected, QUESTIONS)


def test_shards_answer_as_of_a_date_and_take_other_metadata(loaded_tiny_model: MACModel, folder: Path) -> None:
    def dated(number: int, year: int, **more: str) -> Document:
        return Document(f"text {number}", f"Text {number}.", {"date": str(year), **more})

    stream = [dated(number, 2000 + number) for number in range(9)] + [dated(9, 2020, supersedes="text 1")]
    with made(folder, loaded_tiny_model, 3) as bank:
        sharded, one = MACEngine(loaded_tiny_model, bank), MACEngine(loaded_tiny_model)
        for engine in (sharded, one):
            engine.adapt(stream)

        def assert_alike() -> None:
            for as_of in ("2003", "2019", None):
                (names, mass), (names_of_one, mass_of_one) = (
                    engine.document_attention(QUESTIONS, as_of=as_of) for engine in (sharded, one)
                )
                order = [names.index(name) for name in names_of_one]
                torch.testing.assert_close(mass[:, order], mass_of_one, rtol=1e-4, atol=1e-5)
                assert len(names) == len(names_of_one) == {"2003": 4, "2019": 9, None: 9}[as_of]
                phi, expected = (engine.aggregate(QUESTIONS, as_of=as_of) for engine in (sharded, one))
                torch.testing.assert_close(phi, expected, rtol=1e-4, atol=1e-5)

        assert_alike()
        before = {name: sharded.bank[name].phi for name in bank.document_ids}
        moved = [dated(2, 2008), dated(8, 2002)]
        for engine in (sharded, one):
            assert engine.adapt(moved).rows == 0
        assert all(torch.equal(sharded.bank[name].phi, phi) for name, phi in before.items())
        assert_alike()
        with pytest.raises(BankError, match="another text"):
            bank.describe([Document("text 2", "Something else.")])
    with opened(folder, loaded_tiny_model) as bank:
        assert bank["text 8"].metadata == {"date": "2002"}


def test_sources_and_confidence_are_those_of_one_bank(
    loaded_tiny_model: MACModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded_tiny_model
    weights = {"prior": 3.0, "prior_odds": 2.0, "first_log_probability": 0.1}
    fit = {"weights": weights, "bias": 0.0, "questions": 10, "data": "made up"}
    calibration = Calibration.model_validate({"fingerprint": model.fingerprint, "modes": {"memory": fit}})
    monkeypatch.setattr(model, "calibration", calibration)
    with made(folder, model, 3) as bank:
        bank.put(documents(9), random_rows(model, 9, 0))
        bank.commit()
        engine, whole = MACEngine(model, bank), MACEngine(model, one_bank(model, bank))
        found, expected = engine.sources(QUESTIONS[0], most=4), whole.sources(QUESTIONS[0], most=4)
        assert [source.document_id for source in found] == [source.document_id for source in expected]
        assert [source.share for source in found] == pytest.approx([source.share for source in expected], abs=1e-4)
        assert [source.metadata for source in found] == [source.metadata for source in expected]
        answers, same = (one.answer(QUESTIONS, min_confidence=0) for one in (engine, whole))
        assert [answer.text for answer in answers] == [answer.text for answer in same]
        expected_confidence = [answer.confidence for answer in same]
        assert len(set(expected_confidence)) == len(QUESTIONS)
        assert [answer.confidence for answer in answers] == pytest.approx(expected_confidence, abs=1e-4)
        withheld = engine.answer(QUESTIONS, min_confidence=1.0)
        assert {answer.text for answer in withheld} == {"I don't know"}
