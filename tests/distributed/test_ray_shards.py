"""Shards as Ray actors: real processes, one of which is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mac_rag.data.types import Document
from mac_rag.distributed import ShardedBank
from mac_rag.distributed.transport import RayShards
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, ShardLostError
from mac_rag.model import MACModel
from tests.distributed.local_shards import assert_read_alike, reader
from tests.helpers import wait_until

TEXTS = [Document(f"text {n}", f"Ada Voss has opened bridge number {n} of the town.", {"n": n}) for n in range(12)]
QUESTIONS = ["Who opened the bridge?", "Where is the museum?"]


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    import ray

    yield
    ray.shutdown()


def process_of(bank: ShardedBank, number: int) -> int:
    import ray

    shards = bank.shards.transport
    assert isinstance(shards, RayShards)
    process: int = ray.get(shards._actors[number].__ray_call__.remote(lambda shard: os.getpid()))
    return process


def engine_of_one_bank(model: MACModel) -> MACEngine:
    engine = MACEngine(model)
    engine.adapt(TEXTS)
    return engine


@pytest.mark.slow
@pytest.mark.long
def test_shards_in_processes_agree_with_one_bank_and_survive_a_kill(
    loaded_tiny_model: MACModel, tmp_path: Path
) -> None:
    one = engine_of_one_bank(loaded_tiny_model)
    with ShardedBank.create(tmp_path / "bank", loaded_tiny_model, shards=2) as bank:
        engine = MACEngine(loaded_tiny_model, bank)
        assert engine.adapt(TEXTS[:8]).added == 8
        killed = process_of(bank, 1)
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(ShardLostError, match=r"shard 1 of 2 .*shard-1\) was lost.*try again"):
            engine.answer(QUESTIONS)
        report = engine.adapt(TEXTS)  # waits for the restart
        assert (report.added, report.unchanged) == (4, 8)
        assert process_of(bank, 1) != killed
        assert [each.text for each in engine.answer(QUESTIONS)] == [each.text for each in one.answer(QUESTIONS)]
        for allowed in (None, {"text 3", "text 4", "text 9"}):
            assert_read_alike(reader(engine.model, engine.bank), reader(one.model, one.bank), QUESTIONS, allowed)
    with pytest.raises(BankError, match="was closed"):
        engine.answer(["Another question?"])


@pytest.mark.slow
@pytest.mark.long
def test_four_processes_answer_again_once_a_lost_one_has_restarted(loaded_tiny_model: MACModel, tmp_path: Path) -> None:
    one = engine_of_one_bank(loaded_tiny_model)
    one.answer(QUESTIONS)
    with ShardedBank.create(tmp_path / "bank", loaded_tiny_model, shards=4) as bank:
        MACEngine(loaded_tiny_model, bank).adapt(TEXTS)
    with ShardedBank.open(tmp_path / "bank", loaded_tiny_model) as bank:
        engine = MACEngine(loaded_tiny_model, bank)
        os.kill(process_of(bank, 0), signal.SIGKILL)
        with pytest.raises(ShardLostError, match="shard 0 of 4"):
            engine.answer(QUESTIONS)
        wait_until(lambda: bank.snapshot() is not None and not bank.shards.lost)
        assert_read_alike(reader(engine.model, engine.bank), reader(one.model, one.bank), QUESTIONS)
