"""Bulk adaptation on Ray gives the bank that one process gives: whatever dies meanwhile, and whatever is wrong."""

from __future__ import annotations

import csv
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from mac_rag.adapting import GROUP, DocumentWriter
from mac_rag.bank.bank import MemoryBank
from mac_rag.data.readers import read_documents
from mac_rag.data.types import AdaptReport
from mac_rag.distributed import adapting
from mac_rag.distributed.adapting import BulkAdapter
from mac_rag.distributed.cluster import connected_ray
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, ConfigError, DataError, DocumentError, MACError, WorkerError
from mac_rag.model import MACModel
from mac_rag.retrieval.bm25 import BM25Retriever
from tests.cli.helpers import run
from tests.distributed.helpers import Counting, Doomed, Dying, Failing, Stalling

COUNT = 2 * GROUP + 100  # three groups
ROWS = GROUP + 50  # so that a group begins in one file and ends in another


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


def text(number: int) -> str:
    return f"Person {number} was appointed." * (1 + number % 7)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Documents in four kinds of files."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("documents")
    rows = [{"id": f"d{number}", "text": text(number), "n": number} for number in range(COUNT)]
    (folder / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows[:ROWS])) + "\n")
    with (folder / "b.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "text", "n"])
        writer.writeheader()
        writer.writerows({**row, "text": f"{row['text']}\n\nMore."} for row in rows[ROWS:-10])
    table = pyarrow.Table.from_pylist(rows[-10:-1])
    pyarrow.parquet.write_table(table, folder / "c.parquet", row_group_size=4)
    (folder / "d.md").write_text("Ada Voss was appointed.")
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def one_process(loaded_tiny_model: MACModel, files: list[Path]) -> MemoryBank:
    """The bank that one process makes of the files."""
    bank = MemoryBank(loaded_tiny_model.fingerprint, keep_texts=True)
    MACEngine(loaded_tiny_model, bank).adapt(read_documents(files))
    return bank


def bulk_adapt(
    model: MACModel,
    checkpoint: Path,
    folder: Path,
    files: list[Path],
    retriever: Any = None,
    actors: int = 2,
    on_long: Any = "chunk",
) -> tuple[AdaptReport, MemoryBank]:
    """Adapts the bank in a folder, which is made if it does not exist."""
    exists = MemoryBank.exists(folder)
    opened = (
        MemoryBank.open(folder, write=True)
        if exists
        else MemoryBank.create_on_commit(folder, model.fingerprint, keep_texts=True)
    )
    with opened as bank:
        bulk = BulkAdapter(model, str(checkpoint), bank, folder, retriever, actors=actors)
        report = bulk.adapt(files, on_long=on_long)
    return report, MemoryBank.open(folder) if MemoryBank.exists(folder) else bank


Adapt = Callable[..., tuple[AdaptReport, MemoryBank]]


@pytest.fixture
def adapt(ray: Any, loaded_tiny_model: MACModel, tiny_checkpoint: Path, tmp_path: Path) -> Adapt:
    """Adapts the bank `bank` in the test's folder on Ray."""
    return partial(bulk_adapt, loaded_tiny_model, tiny_checkpoint, tmp_path / "bank")


def assert_equal(bank: MemoryBank, expected: MemoryBank) -> None:
    assert torch.equal(bank.phi, expected.phi)
    assert torch.equal(bank.row_keys, expected.row_keys)
    for ours, theirs in zip(bank, expected, strict=True):
        assert ours.texts == theirs.texts
        assert [(m.document_id, m.content_hash, m.metadata) for m in ours.members] == [
            (m.document_id, m.content_hash, m.metadata) for m in theirs.members
        ]


def amortized(folder: Path) -> int:
    """How many groups `Counting` has amortized beside this folder."""
    return len(list(folder.glob("amortized-*")))


@pytest.mark.long
@pytest.mark.parametrize("actors", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_actors_make_the_bank_of_one_process(
    adapt: Adapt,
    actors: int,
    files: list[Path],
    one_process: MemoryBank,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapting, "Amortizer", Counting)
    retriever = BM25Retriever()
    write, calls = DocumentWriter.write_encoded, []

    def write_two(self: DocumentWriter, *values: Any) -> Any:
        calls.append(values)
        if len(calls) > 2:
            raise BankError("the disk is full")
        return write(self, *values)

    with monkeypatch.context() as patch:
        patch.setattr(DocumentWriter, "write_encoded", write_two)
        with pytest.raises(BankError, match="the disk is full"):
            adapt(files, retriever, actors)
    assert amortized(tmp_path) == 3
    assert len(retriever) == len(MemoryBank.open(tmp_path / "bank")) == 2 * GROUP

    report, bank = adapt(files, retriever, actors)
    rest = COUNT - 2 * GROUP
    assert report == AdaptReport(added=rest, updated=0, unchanged=2 * GROUP, rows=rest, filed=rest)
    assert amortized(tmp_path) == 3  # the third group, too, by the first call
    assert_equal(bank, one_process)
    assert retriever.content_hashes() == {m.document_id: m.content_hash for entry in bank for m in entry.members}
    assert not list(tmp_path.glob("*staging*"))


@pytest.mark.slow
def test_the_command_does_nothing_again_for_a_bank_that_holds_all(
    ray: Any,
    tiny_checkpoint: Path,
    files: list[Path],
    one_process: MemoryBank,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapting, "Amortizer", Counting)
    bank = tmp_path / "bank"
    one_process.save(bank)
    result = run("adapt", files[0].parent, "--bank", bank, "--model", tiny_checkpoint, "--ray", "--actors", 1)
    assert result.stdout == f"0 added, 0 updated, {COUNT} unchanged; {bank} holds {COUNT} documents\n"
    assert [path.name for path in tmp_path.iterdir()] == ["bank"]
    assert_equal(MemoryBank.open(bank), one_process)


BAD = {
    "row": ('{"id": "x", "text": 1}', DataError, r"bad\.jsonl, row 602: 'text' must be a text, got 1"),
    "empty": ('{"id": "x", "text": " "}', DataError, r"bad\.jsonl, row 602: 'text' is empty"),
    "twice": ('{"id": "d0", "text": "once more"}', BankError, "document id 'd0' occurs twice"),
    "lone surrogate": ('{"id": "x", "text": "\\ud83d"}', DocumentError, "document 'x': .*half of a surrogate pair"),
    "date": ('{"id": "x", "text": "A text.", "date": "03/04/2004"}', BankError, "document 'x': .*in several ways"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("row", "kind", "message"), BAD.values(), ids=list(BAD))
def test_a_bad_document_is_named_and_nothing_is_done(
    adapt: Adapt, tmp_path: Path, row: str, kind: type[MACError], message: str
) -> None:
    rows = [json.dumps({"id": f"d{number}", "text": text(number)}) for number in range(601)]
    (tmp_path / "bad.jsonl").write_text("\n".join([*rows, row]) + "\n")
    with pytest.raises(kind, match=message):
        adapt([tmp_path / "bad.jsonl"])
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


@pytest.mark.slow
def test_a_circle_of_documents_that_supersede_each_other_is_refused(adapt: Adapt, tmp_path: Path) -> None:
    rows = [{"id": name, "text": f"Text {name}.", "supersedes": other} for name, other in (("a", "b"), ("b", "a"))]
    (tmp_path / "circle.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    with pytest.raises(BankError, match="in a circle: 'a' -> 'b' -> 'a'"):
        adapt([tmp_path / "circle.jsonl"])
    assert not MemoryBank.exists(tmp_path / "bank")


@pytest.mark.slow
def test_what_only_an_actor_notices_is_named_and_nothing_is_committed(adapt: Adapt, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("A long text. " * 1000)
    with pytest.raises(DocumentError, match=r"document '.*long\.txt': a text of 13,000 characters is longer"):
        adapt([tmp_path / "long.txt"], actors=1, on_long="error")
    assert [path.name for path in tmp_path.iterdir()] == ["long.txt"]


@pytest.mark.slow
def test_an_actor_that_dies_changes_nothing(
    adapt: Adapt, files: list[Path], one_process: MemoryBank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapting, "Amortizer", Dying)
    _, bank = adapt(files)
    assert (tmp_path / "died").exists()
    assert_equal(bank, one_process)


def stalled_driver(checkpoint: Path, folder: Path, files: list[Path]) -> None:
    """Runs in a process of its own, until it is killed."""
    adapting.Amortizer = Stalling  # type: ignore[misc]
    bulk_adapt(MACModel.from_pretrained(checkpoint, device="cpu"), checkpoint, folder, files)


@pytest.mark.slow
def test_after_a_killed_driver_the_finished_groups_are_not_amortized_again(
    tiny_checkpoint: Path,
    files: list[Path],
    one_process: MemoryBank,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    driver = get_context("spawn").Process(target=stalled_driver, args=(tiny_checkpoint, tmp_path / "bank", files))
    driver.start()
    until = time.monotonic() + 240
    while not list(tmp_path.glob("bank.staging/block-*.safetensors")):
        assert driver.is_alive()
        assert time.monotonic() < until
        time.sleep(0.1)
    assert driver.pid is not None
    os.kill(driver.pid, signal.SIGKILL)
    driver.join()
    assert not MemoryBank.exists(tmp_path / "bank")

    monkeypatch.setattr(adapting, "Amortizer", Counting)
    report, bank = request.getfixturevalue("adapt")(files)
    assert report.added == COUNT
    assert amortized(tmp_path) == 3  # the first in the killed call, two in this one
    assert_equal(bank, one_process)
    assert not (tmp_path / "bank.staging").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("actor", "message"),
    [
        (Failing, "a worker on .* failed: RuntimeError: the disk is on fire"),
        (Doomed, r"4 workers have died over the 1 documents from '.*may\.txt' on"),
    ],
)
def test_workers_that_always_fail_are_an_error_that_says_so(
    adapt: Adapt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, actor: type, message: str
) -> None:
    (tmp_path / "may.txt").write_text("Ada Voss was appointed.")
    monkeypatch.setattr(adapting, "Amortizer", actor)
    with pytest.raises(WorkerError, match=message):
        adapt([tmp_path / "may.txt"])
    assert [path.name for path in tmp_path.iterdir()] == ["may.txt"]


@pytest.mark.slow
def test_changed_and_new_documents_make_the_bank_of_one_process(
    adapt: Adapt, loaded_tiny_model: MACModel, one_process: MemoryBank, tmp_path: Path
) -> None:
    for name in ("here", "bank"):
        one_process.save(tmp_path / name)
    changed = [number for number in range(COUNT + 700) if number % 3]
    rows = [{"id": f"d{number}", "text": text(number + number % 2), "n": number} for number in changed]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    with MemoryBank.open(tmp_path / "here", write=True) as here:
        expected = MACEngine(loaded_tiny_model, here).adapt(read_documents([tmp_path / "rows.jsonl"]))
    report, there = adapt([tmp_path / "rows.jsonl"])
    assert report == expected
    assert min(report.added, report.updated, report.unchanged) > 100
    assert_equal(there, MemoryBank.open(tmp_path / "here"))


def test_standard_input_is_refused(loaded_tiny_model: MACModel, tmp_path: Path) -> None:
    bank = MemoryBank.create_on_commit(tmp_path / "bank", loaded_tiny_model.fingerprint)
    with pytest.raises(ConfigError, match=r"standard input \(-\) .* write it to a file first"):
        BulkAdapter(loaded_tiny_model, "mac-tiny", bank, tmp_path / "bank").adapt([Path("-")])
