"""The cache: it saves requests, stays within its bound, and nothing wrong in it is ever read."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_rag.cache import LIMIT_VARIABLE
from mac_rag.errors import BankError, ConfigError
from mac_rag.memory import MemoryBank
from mac_rag.memory.storage.remote import range_file
from mac_rag.memory.storage.remote.range_file import BLOCK
from mac_rag.memory.storage.remote.upload import upload
from tests.helpers import run_in_processes
from tests.memory.storage.remote.helpers import FlakyStore, allocated, fill, is_right

URL = "flaky://bank"
DOCUMENTS = 24


@pytest.fixture(autouse=True)
def uploaded(tmp_path: Path, cache: Path) -> Iterator[Path]:
    """A bank of three segments behind the URL."""
    FlakyStore.clear()
    fill(tmp_path / "bank", DOCUMENTS, 3)
    upload(tmp_path / "bank", URL)
    FlakyStore.reads.clear()
    yield tmp_path / "bank"
    FlakyStore.clear()


def read_bytes(ending: str = "safetensors") -> int:
    return sum((stop or 0) - (start or 0) for name, start, stop in FlakyStore.reads if name.endswith(ending))


def test_only_the_blocks_of_the_rows_that_are_read_are_fetched_and_only_once(cache: Path) -> None:
    bank = MemoryBank.open(URL)
    assert read_bytes() == 0
    assert is_right(bank, [3])
    assert 0 < read_bytes() <= 2 * BLOCK
    FlakyStore.reads.clear()
    assert is_right(bank, [3])
    again = MemoryBank.open(URL)
    assert is_right(again, [3])
    assert {name for name, _, _ in FlakyStore.reads} == {"manifest.json"}
    assert is_right(again, [2, 3, 4, 5])
    assert 0 < read_bytes() <= 3 * BLOCK


def test_neighbours_are_one_request() -> None:
    bank = MemoryBank.open(URL)
    FlakyStore.reads.clear()
    bank.read(0, DOCUMENTS)
    assert len(FlakyStore.reads) == len({name for name, _, _ in FlakyStore.reads})


def test_segments_are_fetched_from_at_the_same_time() -> None:
    bank, both = MemoryBank.open(URL), threading.Barrier(2, timeout=10)

    def fault(name: str) -> None:
        both.wait()  # for ever, if the second segment waited for the first

    FlakyStore.fault = fault
    assert is_right(bank, [0, DOCUMENTS - 1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def holes_with_marks(path: Path) -> None:
    """What a loss of power can leave."""
    size = path.stat().st_size
    blocks = -(-size // (BLOCK + 1))
    path.write_bytes(bytes(size - blocks) + b"\1" * blocks)


def link(path: Path) -> None:
    other = path.with_name("other")
    path.rename(other)
    flip(other)
    path.symlink_to(other)


FAULTS: list[Callable[[Path], object]] = [
    flip, link, holes_with_marks,
    lambda path: path.write_bytes(path.read_bytes()[:-1]),
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(b"\1" * path.stat().st_size),
    Path.unlink,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("ending", ["rows", ".jsonl"])
def test_a_damaged_file_of_the_cache_is_fetched_again(
    ending: str, fault: Callable[[Path], object], cache: Path
) -> None:
    is_right(MemoryBank.open(URL), list(range(DOCUMENTS)))
    files = [path for path in cache.rglob(f"*{ending}") if path.is_file()]
    assert files
    for path in files:
        fault(path)
    bank = MemoryBank.open(URL)
    assert is_right(bank, list(range(DOCUMENTS)))
    FlakyStore.reads.clear()
    assert is_right(MemoryBank.open(URL), list(range(DOCUMENTS)))  # mended
    assert {name for name, _, _ in FlakyStore.reads} == {"manifest.json"}


def test_who_has_verified_rows_keeps_them_when_the_file_begins_anew(cache: Path) -> None:
    first = MemoryBank.open(URL)
    assert is_right(first, [0, 9, 17])
    for path in cache.rglob("rows"):
        content = bytearray(path.read_bytes())
        content[-1000:-900] = bytes(100)  # rows that nobody has read yet are damaged, and marked as there
        blocks = -(-len(content) // (BLOCK + 1))
        content[-blocks:] = b"\1" * blocks
        path.write_bytes(content)
    assert is_right(MemoryBank.open(URL), list(range(DOCUMENTS)))
    assert is_right(first, [0, 9, 17])
    assert is_right(first, list(range(DOCUMENTS)))


@pytest.mark.parametrize("written", [0, 1, 2, 3])
def test_a_reader_that_is_killed_while_it_writes_leaves_nothing_wrong(
    written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    count, write_all = 0, range_file._write_all

    def write(file: int, data: memoryview, place: int) -> None:
        nonlocal count
        count += 1
        if count > written:
            write_all(file, data[: len(data) // 2], place)
            raise Killed
        write_all(file, data, place)

    monkeypatch.setattr(range_file, "_write_all", write)
    with pytest.raises(Killed):
        MemoryBank.open(URL).read(0, DOCUMENTS)
    monkeypatch.setattr(range_file, "_write_all", write_all)
    assert is_right(MemoryBank.open(URL), list(range(DOCUMENTS)))


def test_the_cache_stays_within_its_bound(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 6 * BLOCK
    monkeypatch.setenv(LIMIT_VARIABLE, str(limit / 2**30))
    bank = MemoryBank.open(URL)
    choice = random.Random(0)
    for _ in range(60):
        assert is_right(bank, choice.sample(range(DOCUMENTS), 2))
        # Two segments are fetched from at once, each of which is not dropped for the other; and there are marks.
        assert allocated(cache) <= limit + 4 * BLOCK + 4 * 4096
    # What one call needs may be more than the bound.
    assert torch.equal(bank.read(0, DOCUMENTS), MemoryBank.open(URL).read(0, DOCUMENTS))
    assert is_right(bank, [1])


@pytest.mark.parametrize("text", ["0", "-1", "many", "inf", "nan"])
def test_a_bound_that_is_no_size_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, text)
    with pytest.raises(ConfigError, match=f"{LIMIT_VARIABLE} is '{text}'"):
        MemoryBank.open(URL)


def test_a_cache_that_cannot_be_used_is_an_error_that_names_it(cache: Path) -> None:
    cache.parent.write_text("a file")
    with pytest.raises(BankError, match=r"the cache of flaky://bank, cannot be used.*MAC_RAG_CACHE"):
        MemoryBank.open(URL)


@pytest.mark.parametrize("banks", [1, 4])
def test_threads_read_right_while_files_make_room_for_each_other(
    banks: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With banks of their own, they are to each other as processes are."""
    monkeypatch.setenv(LIMIT_VARIABLE, str(6 * BLOCK / 2**30))
    opened = [MemoryBank.open(URL) for _ in range(banks)]

    def read(seed: int) -> bool:
        choice, snapshot = random.Random(seed), opened[seed % banks].snapshot()
        return all(is_right(snapshot, choice.sample(range(DOCUMENTS), 5)) for _ in range(20))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(read, range(4)))


def read_in_process(rank: int, url: str, cache: str, limit: str) -> None:
    os.environ |= {"MAC_RAG_CACHE": cache, LIMIT_VARIABLE: limit}
    choice = random.Random(rank)
    for _ in range(6):
        bank = MemoryBank.open(url)
        for _ in range(10):
            assert is_right(bank, choice.sample(range(DOCUMENTS), 4))


@pytest.mark.slow
def test_processes_share_a_cache_that_is_too_small_for_them(uploaded: Path, cache: Path) -> None:
    limit = str(8 * BLOCK / 2**30)
    run_in_processes(read_in_process, uploaded.as_uri(), str(cache.parent), limit, count=2)


@settings(max_examples=15)
@given(
    reads=st.lists(st.lists(st.integers(0, DOCUMENTS - 1), min_size=1, max_size=6), min_size=1, max_size=6),
    limit=st.integers(2, 30),
)
def test_any_reads_under_any_bound_are_those_of_the_folder(reads: list[list[int]], limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LIMIT_VARIABLE, str(limit * BLOCK / 2**30))
        bank = MemoryBank.open(URL)
        assert all(is_right(bank, index) for index in reads)
