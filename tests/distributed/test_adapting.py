"""Amortization on Ray gives the bank that one process gives: whatever dies meanwhile, and whatever is wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from mac_rag import adapting as plain
from mac_rag.adapting import GROUP
from mac_rag.bank.bank import MemoryBank
from mac_rag.data.types import AdaptReport, Document
from mac_rag.distributed import adapting
from mac_rag.distributed.adapting import Amortizer, RayWorkers
from mac_rag.distributed.cluster import connected_ray
from mac_rag.engine import MACEngine
from mac_rag.errors import FingerprintError, MACError, WorkerError
from mac_rag.model import MACModel
from mac_rag.retrieval.bm25 import BM25Retriever
from tests.cli.helpers import run
from tests.distributed.helpers import Doomed, Dying, Failing

COUNT = GROUP + 100  # two groups
DOCUMENTS = [
    Document(f"d{number}", f"Person {number} was appointed." * (1 + number % 7), {"n": number})
    for number in range(COUNT)
]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray on this machine."""
    ray = connected_ray()
    yield ray
    ray.shutdown()


@pytest.mark.long  # beside the other test that starts Ray, so that one process starts it
def test_ray_listens_on_the_loopback_address_and_reports_nothing(ray: Any) -> None:
    from ray._common.usage.usage_lib import usage_stats_enabled

    assert [node["NodeManagerAddress"] for node in ray.nodes()] == ["127.0.0.1"]
    assert ray.get_runtime_context().gcs_address.startswith("127.0.0.1:")
    assert not usage_stats_enabled()
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert listeners(processes(os.getpid())) <= {"0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF00000100007F"}


def processes(parent: int) -> list[int]:
    """Ids of the processes below one."""
    found: list[int] = []
    for place in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if int((place / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found += [int(place.name), *processes(int(place.name))]
    return found


def listeners(identifiers: list[int]) -> set[str]:
    """The addresses that processes listen on, as /proc writes them."""
    sockets: set[str] = set()
    for process in identifiers:
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                sockets.add(os.readlink(descriptor))
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1].partition(":")[0])
    assert found
    return found


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several windows in each group."""
    monkeypatch.setattr(plain, "WINDOW", 2000)


@pytest.fixture
def one_process(loaded_tiny_model: MACModel) -> MemoryBank:
    """The bank that one process makes of the documents."""
    bank = MemoryBank(loaded_tiny_model.fingerprint)
    MACEngine(loaded_tiny_model, bank).adapt(DOCUMENTS)
    return bank


def assert_equal(bank: MemoryBank, expected: MemoryBank) -> None:
    assert torch.equal(bank.phi, expected.phi)
    for ours, theirs in zip(bank, expected, strict=True):
        assert [(m.document_id, m.content_hash, m.metadata) for m in ours.members] == [
            (m.document_id, m.content_hash, m.metadata) for m in theirs.members
        ]


@pytest.mark.long
@pytest.mark.parametrize("actors", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_actors_make_the_bank_of_one_process(
    ray: Any,
    actors: int,
    loaded_tiny_model: MACModel,
    tiny_checkpoint: Path,
    one_process: MemoryBank,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loaded_tiny_model, "amortize_rows", None)  # the calling process encodes nothing
    retriever, workers = BM25Retriever(), RayWorkers(loaded_tiny_model, str(tiny_checkpoint), actors)
    engine = MACEngine(loaded_tiny_model, MemoryBank(loaded_tiny_model.fingerprint), retriever, workers=workers)
    report = engine.adapt(DOCUMENTS)
    assert report == AdaptReport(added=COUNT, updated=0, unchanged=0, rows=COUNT, filed=COUNT)
    assert_equal(engine.bank, one_process)
    assert len(retriever) == COUNT
    later = [Document("d0", "Person 0 was appointed.", {"n": -1}), Document("new", "Ada Voss was appointed.")]
    report = engine.adapt([*later, *DOCUMENTS[1:]])
    assert (report.added, report.updated, report.unchanged, report.rows) == (1, 1, COUNT - 1, 1)


@pytest.mark.slow
def test_the_command_makes_the_bank_of_one_process(
    ray: Any, tiny_checkpoint: Path, one_process: MemoryBank, tmp_path: Path
) -> None:
    rows = [{"id": each.id, "text": each.text, **each.metadata} for each in DOCUMENTS]
    (tmp_path / "rows.jsonl").write_text("\n".join([*map(json.dumps, rows), '{"id": "bad"}']) + "\n")
    options = ["--bank", tmp_path / "bank", "--model", tiny_checkpoint, "--ray", "--actors", 1, "--skip-bad"]
    result = run("adapt", tmp_path / "rows.jsonl", *options)
    assert f"{COUNT} added, 0 updated, 0 unchanged" in result.stdout, result.output
    assert "1 left out" in result.stderr
    assert_equal(MemoryBank.open(tmp_path / "bank"), one_process)


@pytest.mark.slow
def test_an_actor_that_dies_changes_nothing(
    ray: Any,
    loaded_tiny_model: MACModel,
    tiny_checkpoint: Path,
    one_process: MemoryBank,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    monkeypatch.setattr(adapting, "Amortizer", Dying)
    engine = MACEngine(loaded_tiny_model, workers=RayWorkers(loaded_tiny_model, str(checkpoint), 2))
    engine.adapt(DOCUMENTS)
    assert (tmp_path / "died").exists()
    assert_equal(engine.bank, one_process)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("actor", "kind", "message"),
    [
        (Failing, WorkerError, "a worker failed: RuntimeError: the disk is on fire"),
        (Doomed, WorkerError, r"workers have died repeatedly over 1 rows of documents; .*fewer actors"),
        (Amortizer, FingerprintError, "mac-tiny is another model here than where the command was called"),
    ],
)
def test_workers_that_always_fail_are_an_error_that_says_so(
    ray: Any,
    loaded_tiny_model: MACModel,
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    actor: type,
    kind: type[MACError],
    message: str,
) -> None:
    monkeypatch.setattr(adapting, "Amortizer", actor)
    name = "mac-tiny" if actor is Amortizer else str(tiny_checkpoint)
    engine = MACEngine(loaded_tiny_model, workers=RayWorkers(loaded_tiny_model, name, 1))
    with pytest.raises(kind, match=message):
        engine.adapt([Document("may", "Ada Voss was appointed.")])
    assert not len(engine.bank)
