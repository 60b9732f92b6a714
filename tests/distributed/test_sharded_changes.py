"""A change of several shards that fails or is interrupted is finished when it is repeated."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from mac_rag.data.types import Document
from mac_rag.distributed.reader import _ShardsAttention
from mac_rag.distributed.shard_files import shard_of
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, MACError, ShardLostError
from mac_rag.model import MACModel
from mac_rag.retrieval.bm25 import BM25Retriever
from mac_rag.sync import difference
from tests.bank.helpers import random_rows
from tests.distributed.local_shards import assert_read_alike, documents, local, made, opened, reader

QUESTIONS = ["Who opened the bridge?", "Where is the museum?"]
BEFORE = [Document(f"text {n}", f"Ada Voss has opened bridge number {n} of the town.") for n in range(6)]
# Some are new, some replace others, in all of three shards.
AFTER = [Document(f"text {n}", f"The museum of bridge number {n} was closed.") for n in range(3, 12)]


def engine_of_one_bank(model: MACModel) -> MACEngine:
    engine = MACEngine(model, retriever=BM25Retriever())
    engine.adapt(BEFORE)
    engine.adapt(AFTER)
    return engine


@pytest.mark.parametrize(
    ("method", "when", "with_retriever"),
    [
        ("put", "after", False),
        ("commit", "before", False),
        ("commit", "after", False),
        ("put", "before", True),
        ("check", "after", True),
        ("commit", "before", True),
        ("commit", "after", True),
    ],
)
@pytest.mark.parametrize("number", [0, 2])  # the first and the last of three shards that commit
def test_a_shard_that_dies_during_adapt_is_caught_up_by_the_next(
    loaded_tiny_model: MACModel, folder: Path, number: int, method: str, when: str, with_retriever: bool
) -> None:
    model = loaded_tiny_model
    one = engine_of_one_bank(model)
    with made(folder, model, 3) as bank:
        engine = MACEngine(model, bank, BM25Retriever() if with_retriever else None)
        engine.adapt(BEFORE)
        local(bank).dies = (number, method, when)
        with pytest.raises(ShardLostError, match=f"shard {number} of 3"):
            engine.adapt(AFTER)
        assert local(bank).dies is None
        engine.adapt(AFTER)
        assert not bank.intent
        one.answer(QUESTIONS)
        engine.answer(QUESTIONS)
        assert_read_alike(reader(engine.model, engine.bank), reader(one.model, one.bank), QUESTIONS)
        if engine.retriever is not None:
            assert not difference(bank, engine.retriever)
    with opened(folder, model) as bank:
        assert {entry.document_id: entry.content_hash for entry in bank} == {
            entry.members[0].document_id: entry.members[0].content_hash for entry in one.bank
        }


def test_after_an_error_in_one_shard_the_bank_follows_the_retriever_back(
    loaded_tiny_model: MACModel, folder: Path
) -> None:
    """Some shards have committed when another refuses, and the retriever goes back."""
    retriever = BM25Retriever()
    with made(folder, loaded_tiny_model, 3) as bank:
        engine = MACEngine(loaded_tiny_model, bank, retriever)
        engine.adapt(BEFORE)
        local(bank).dies = (2, "commit", "before")
        with pytest.raises(ShardLostError):
            engine.adapt(AFTER)
        assert retriever.documents([BEFORE[4].id])[0].text == BEFORE[4].text
        assert len(retriever) == len(BEFORE)
        ahead = [one.id for one in AFTER if one.id in bank and one.id not in retriever]
        assert ahead  # shards 0 and 1 have them
        assert bank.intent
        if_reopened = [*bank.intent.puts]
    # The next engine that opens both finishes the change, although nobody repeats it.
    with opened(folder, loaded_tiny_model) as bank:
        assert [*bank.intent.puts] == if_reopened
        engine = MACEngine(loaded_tiny_model, bank, retriever)
        assert not bank.intent
        assert not difference(bank, retriever)
        assert sorted(bank.document_ids) == sorted(one.id for one in BEFORE)


@pytest.mark.parametrize("committed", [0, 1, 2])
def test_a_change_is_finished_after_the_whole_process_has_died(
    loaded_tiny_model: MACModel, folder: Path, committed: int
) -> None:
    retriever = BM25Retriever()
    bank = made(folder, loaded_tiny_model, 3)
    engine = MACEngine(loaded_tiny_model, bank, retriever)
    engine.adapt(BEFORE)
    shards = local(bank)
    answer, commits = shards._answer, 0

    def dying(number: int, request: object) -> object:
        nonlocal commits
        if getattr(request, "method", "") == "commit":
            shards.is_gone = commits == committed
            commits += 1
        return answer(number, request)  # type: ignore[arg-type]

    shards._answer = dying  # type: ignore[assignment, method-assign]
    puts = retriever.put
    with pytest.MonkeyPatch.context() as patch:
        # The retriever has taken the documents, and nobody is left to take them back.
        patch.setattr(retriever, "put", lambda some: (puts(some), patch.setattr(retriever, "put", None)))
        patch.setattr(retriever, "delete", None)
        with pytest.raises(SystemExit):
            engine.adapt(AFTER)
    shards.close()
    with opened(folder, loaded_tiny_model) as again:
        assert set(again.intent.puts) == {document.id for document in AFTER}
        one = engine_of_one_bank(loaded_tiny_model)
        engine = MACEngine(loaded_tiny_model, again, retriever)
        assert not again.intent
        assert not difference(again, retriever)
        one.answer(QUESTIONS)
        engine.answer(QUESTIONS)
        assert_read_alike(reader(engine.model, engine.bank), reader(one.model, one.bank), QUESTIONS)


def test_a_forgotten_document_is_forgotten_by_its_shard(loaded_tiny_model: MACModel, folder: Path) -> None:
    retriever = BM25Retriever()
    with made(folder, loaded_tiny_model, 3) as bank:
        engine = MACEngine(loaded_tiny_model, bank, retriever)
        engine.adapt(BEFORE)
        name = BEFORE[4].id
        local(bank).dies = (shard_of(name, 3), "commit", "before")
        with pytest.raises(ShardLostError):
            engine.forget(name)
        assert name in retriever
        assert engine.forget(name) == (name,)
        assert name not in retriever
        assert name not in bank
    with opened(folder, loaded_tiny_model, write=False) as bank:
        assert sorted(bank.document_ids) == sorted(one.id for one in BEFORE if one.id != name)


def test_a_change_that_failed_must_be_rolled_back(loaded_tiny_model: MACModel, folder: Path) -> None:
    with made(folder, loaded_tiny_model, 3) as bank:
        bank.put(documents(6), random_rows(loaded_tiny_model, 6, 0))
        bank.commit()
        before = bank.document_ids
        local(bank).dies = (1, "put", "before")
        with pytest.raises(ShardLostError):
            bank.put(documents(9), random_rows(loaded_tiny_model, 9, 1))
        for change in (bank.commit, lambda: bank.delete("text 1"), bank.compact):
            with pytest.raises(BankError, match=r"rollback\(\)"):
                change()
        bank.rollback()
        assert bank.document_ids == before
        bank.put(documents(9), random_rows(loaded_tiny_model, 9, 1))
        bank.commit()
        assert len(bank) == 9


def test_the_loss_of_changes_is_noticed_at_the_next(loaded_tiny_model: MACModel, folder: Path) -> None:
    """A shard restarts between `put` and `commit`; half of the change must not be committed."""
    with made(folder, loaded_tiny_model, 3) as bank:
        bank.put(documents(9), random_rows(loaded_tiny_model, 9, 0))
        local(bank).kill(1)
        with pytest.raises(MACError):
            bank.commit()
        with pytest.raises(BankError, match=r"failed in shard 1; call rollback\(\)"):
            bank.commit()
        bank.rollback()
        assert len(bank) == 0


def test_questions_of_another_thread_see_a_change_as_a_whole(loaded_tiny_model: MACModel, folder: Path) -> None:
    model = loaded_tiny_model
    with made(folder, model, 3) as bank:
        engine = MACEngine(model, bank)
        engine.adapt(BEFORE)
        before = engine.aggregate(QUESTIONS)
        changer = threading.Thread(target=engine.adapt, args=(AFTER,))
        changer.start()
        seen = [engine.aggregate([*QUESTIONS, f"Question {number}?"])[:2] for number in range(30)]
        changer.join()
        after = engine.aggregate(QUESTIONS)
        assert not torch.allclose(before, after)
        for phi in seen:
            assert torch.allclose(phi, before, atol=1e-5) or torch.allclose(phi, after, atol=1e-5)


def test_questions_of_several_engines_do_not_mix(loaded_tiny_model: MACModel, folder: Path) -> None:
    """Each block of one is followed by a block of the other."""
    with made(folder, loaded_tiny_model, 2) as bank:
        engines = [MACEngine(loaded_tiny_model, bank) for _ in range(2)]
        engines[0].adapt(BEFORE)
        questions = [[f"Who opened bridge {number}?"] for number in range(8)]
        expected = [MACEngine(loaded_tiny_model, bank).aggregate(one) for one in questions]
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda place: engines[place % 2].aggregate(questions[place]), range(8)))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        # One that began with other rows is told to ask again.
        encoded = loaded_tiny_model.input_encoder([[5, 6]])
        attention = _ShardsAttention(engines[0]._reader, encoded, {0: None, 1: None}, None)
        query = torch.zeros(1, 2, 4, 8)
        attention(0, False, query)
        engines[1].adapt(AFTER)
        engines[1].aggregate(QUESTIONS)
        with pytest.raises(ShardLostError, match="changed during the question; ask again"):
            attention(1, False, query)
