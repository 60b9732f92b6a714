"""What goes wrong between a reader and its store: retried where that can help, else an error that says what to do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mac_rag.atomic_files import sealed, unsealed
from mac_rag.errors import BankError, DamageError
from mac_rag.memory import MemoryBank
from mac_rag.memory.storage.remote.examination import verify_url
from mac_rag.memory.storage.remote.object_store import ObjectStore, Range
from mac_rag.memory.storage.remote.upload import upload
from tests.memory.storage.remote.helpers import FlakyStore, fill, is_right

URL = "flaky://bank"


@pytest.fixture(autouse=True)
def flaky() -> Iterator[type[FlakyStore]]:
    FlakyStore.clear()
    yield FlakyStore
    FlakyStore.clear()


def failing(times: int, error: Exception | bytes) -> Callable[[str], bytes | None]:
    """A fault of the first reads of each file."""
    counts: dict[str, int] = {}

    def fault(name: str) -> bytes | None:
        counts[name] = counts.get(name, 0) + 1
        if counts[name] > times:
            return None
        if isinstance(error, bytes):
            return error
        raise error

    return fault


PASSING = [TimeoutError("too slow"), ConnectionResetError("in the middle"), OSError("503 Slow Down"), b"cut off"]


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
def test_what_passes_is_tried_again(error: Exception | bytes) -> None:
    store = ObjectStore(URL, waits=(0, 0))
    store.write("file", bytes(range(100)))
    FlakyStore.fault = failing(2, error)
    assert store.ranges([Range("file", 10, 20), Range("file", 50, 80)]) == [bytes(range(10, 20)), bytes(range(50, 80))]
    FlakyStore.fault = failing(3, error)
    with pytest.raises(BankError, match="flaky://bank/file"):
        store.ranges([Range("file", 10, 20)])


def test_only_the_ranges_that_failed_are_read_again() -> None:
    store = ObjectStore(URL, waits=(0, 0))
    for name in ("good", "bad"):
        store.write(name, bytes(10))
    once = failing(1, TimeoutError())
    FlakyStore.fault = lambda name: once(name) if name == "bad" else None
    store.ranges([Range("good", 0, 10), Range("bad", 0, 10)])
    assert [name for name, _, _ in FlakyStore.reads] == ["good", "bad", "bad"]


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (PermissionError("AccessDenied"), "check credentials and permissions"),
        (ConnectionResetError("by peer"), "check the connection and the endpoint, and try again"),
    ],
)
def test_what_lasts_is_an_error_with_url_and_remedy(
    error: Exception, remedy: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    fill(tmp_path / "bank", 4)
    upload(tmp_path / "bank", URL)
    bank = MemoryBank.open(URL)

    def fault(name: str) -> None:
        if name.endswith(".safetensors"):
            raise error

    FlakyStore.fault = fault
    with pytest.raises(BankError, match=rf"flaky://bank/segment-\w+.safetensors cannot be read.*{remedy}"):
        bank.read(0, 4)
    attempts = sum(name.endswith(".safetensors") for name, _, _ in FlakyStore.reads)
    assert attempts == (1 if isinstance(error, PermissionError) else 4)
    FlakyStore.fault = lambda name: None
    assert is_right(bank, [0, 1, 2, 3])  # the same object goes on


def test_an_object_that_changed_under_its_name_is_an_error_and_never_read(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    fill(tmp_path / "bank", 4)
    upload(tmp_path / "bank", URL)
    bank = MemoryBank.open(URL)
    assert is_right(bank, [0])
    [path] = [path for path in FlakyStore.store if path.endswith(".safetensors")]
    content = FlakyStore.store[path].getvalue()
    FlakyStore().pipe_file(path, content[:-40_000] + bytes(40_000))
    for _ in range(2):
        with pytest.raises(DamageError, match=rf"{path} is damaged.*remove that object.*mac-rag bank upload"):
            bank.read(3, 4)
    assert is_right(bank, [0])
    FlakyStore().pipe_file(path, content[:-1])
    with pytest.raises(DamageError, match="it is not the file that was uploaded"):
        MemoryBank.open(URL).read(3, 4)
    FlakyStore().pipe_file(path, content)
    assert is_right(bank, [3, 0, 1])


@pytest.mark.parametrize("ending", [".jsonl", "manifest.json"])
def test_files_that_are_fetched_whole_are_compared_with_their_digests(ending: str, cache: Path, tmp_path: Path) -> None:
    fill(tmp_path / "bank", 4)
    upload(tmp_path / "bank", URL)
    [path] = [path for path in FlakyStore.store if path.endswith(ending)]
    content = FlakyStore.store[path].getvalue()
    FlakyStore().pipe_file(path, content.replace(b"2", b"3", 1))
    with pytest.raises(DamageError, match=path):
        MemoryBank.open(URL)
    FlakyStore().rm_file(path)
    with pytest.raises(BankError, match=r"mac-rag bank upload"):
        MemoryBank.open(URL)
    upload(tmp_path / "bank", URL)
    assert is_right(MemoryBank.open(URL), [2])


def test_a_manifest_that_names_rows_beyond_all_bounds_is_refused(cache: Path, tmp_path: Path) -> None:
    """Nothing as large is made in the cache, or asked of the store."""
    fill(tmp_path / "bank", 4)
    upload(tmp_path / "bank", URL)
    [path] = [path for path in FlakyStore.store if path.endswith("/manifest.json")]
    content = unsealed(FlakyStore.store[path].getvalue())
    content["segments"][0]["shape"] = [4, 1, 1 << 42]
    FlakyStore().pipe_file(path, sealed(content))
    with pytest.raises(DamageError, match=r"safetensors has 70,368,744,177,\d+ bytes by its manifest"):
        MemoryBank.open(URL).read(0, 4)


def test_an_upload_that_is_interrupted_goes_on(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After whatever write all fail, the bank there is the former one or the new one; the next call goes on."""
    fill(tmp_path / "bank", 4)
    upload(tmp_path / "bank", URL)
    with MemoryBank.open(tmp_path / "bank", write=True) as bank:
        bank.delete("1")
        bank.compact()
    write, put = ObjectStore.write, ObjectStore.put
    states: list[int] = []
    for allowed in (0, *[1] * 99):
        left = iter([True] * allowed)

        def step(left: Iterator[bool] = left) -> None:
            if not next(left, False):
                raise BankError("the connection is gone")

        monkeypatch.setattr(ObjectStore, "write", lambda self, *rest, step=step: (step(), write(self, *rest)))
        monkeypatch.setattr(ObjectStore, "put", lambda self, *rest, step=step: (step(), put(self, *rest)))
        try:
            upload(tmp_path / "bank", URL)
        except BankError:
            states.append(len(MemoryBank.open(URL)))
            continue
        break
    assert states == sorted(states, reverse=True)
    assert set(states) == {4, 3}
    assert is_right(MemoryBank.open(URL), [0])
    assert MemoryBank.open(URL).document_ids == ["0", "2", "3"]


def test_an_upload_follows_a_writer_that_removes_files_meanwhile(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "bank", 4)
    put = ObjectStore.put
    with MemoryBank.open(tmp_path / "bank", write=True) as bank:

        def put_after_a_change(store: ObjectStore, name: str, path: Path) -> None:
            with turn:
                if "1" in bank:
                    bank.delete("1")
                    bank.compact()
            put(store, name, path)

        turn = threading.Lock()
        monkeypatch.setattr(ObjectStore, "put", put_after_a_change)
        assert upload(tmp_path / "bank", URL).documents == 3
    assert MemoryBank.open(URL).document_ids == ["0", "2", "3"]
    assert verify_url(URL).clean
