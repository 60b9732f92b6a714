"""Banks copied to an object store and back: whole, only what is new, and never half."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from typer.testing import CliRunner, Result

from mac_rag.bank import MemoryBank
from mac_rag.bank.remote import pull, push
from mac_rag.bank.verify import verify
from mac_rag.cli.main import app
from mac_rag.data.types import Document
from mac_rag.errors import BankError, DamageError, FingerprintError
from tests.bank.helpers import contents, memory, put

NAMES = [f"document {number}" for number in range(8)]
MEMORY = "memory://bank"
_numbers = count()


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    """Address of an S3 server in this process."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of an empty place on an S3 server, with endpoint and credentials in the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-of-the-test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fs = fsspec.filesystem("s3")
    if not fs.exists("banks"):
        fs.mkdir("banks")
    return f"s3://banks/{next(_numbers)}/bank"


@pytest.fixture
def store() -> Iterator[Any]:
    """An empty file system in memory; banks in it are at `MEMORY`."""
    MemoryFileSystem.store.clear()
    yield fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()


def filled(folder: Path, documents: int = 3, *, keep_texts: bool = False) -> MemoryBank:
    bank = MemoryBank.create(folder, "model", keep_texts=keep_texts)
    for number, name in enumerate(NAMES[:documents]):
        put(bank, name, float(number))
    return bank


def names(url: str) -> set[str]:
    fs, path = fsspec.url_to_fs(url)
    fs.invalidate_cache()
    return {place.rpartition("/")[2] for place in fs.find(path)}


def test_a_pulled_bank_is_the_one_that_was_pushed(s3: str, tmp_path: Path) -> None:
    with filled(tmp_path / "bank", keep_texts=True) as bank:
        bank.delete(NAMES[1])
        bank.commit()
    assert push(tmp_path / "bank", s3) == pull(s3, tmp_path / "copy") == 2
    copy, bank = MemoryBank.open(tmp_path / "copy"), MemoryBank.open(tmp_path / "bank")
    assert torch.equal(copy.phi, bank.phi)
    assert [entry.members for entry in copy] == [entry.members for entry in bank]
    assert copy[NAMES[2]].texts == ("text 2.0",)
    assert verify(tmp_path / "copy").clean
    with MemoryBank.open(tmp_path / "copy", write=True) as opened:
        put(opened, "new", 9.0)


def test_a_pull_moves_readers_on_and_what_is_old_goes(s3: str, tmp_path: Path) -> None:
    with filled(tmp_path / "bank", 6) as bank:
        push(tmp_path / "bank", s3)
        before = names(s3)
        assert len(before) == 2
        assert push(tmp_path / "bank", s3) == 6
        assert names(s3) == before
        pull(s3, tmp_path / "copy")
        reader = MemoryBank.open(tmp_path / "copy")
        put(bank, NAMES[6], 6.0)
        for changed in (lambda: None, lambda: bank.delete(NAMES[0])):
            changed()
            bank.commit()
            push(tmp_path / "bank", s3)
            assert pull(s3, tmp_path / "copy") == len(bank)
            assert reader.refresh()
            assert contents(reader) == contents(bank)
            assert reader.history == 0
    assert len(names(s3)) == 2
    assert not names(s3) & (before - {"bank.json"})
    assert {file.name for file in tmp_path.iterdir()} <= {"bank", "copy", "copy-wal", "copy-shm"}


def test_neither_side_loses_a_later_commit_or_another_bank(store: Any, tmp_path: Path) -> None:
    filled(tmp_path / "long").close()
    filled(tmp_path / "short", 1).close()
    MemoryBank.create(tmp_path / "other", "another model").close()
    push(tmp_path / "long", MEMORY)
    with pytest.raises(BankError, match=r"memory://bank is at commit 3, which .*short does not have"):
        push(tmp_path / "short", MEMORY)
    with pytest.raises(FingerprintError, match="choose another place"):
        push(tmp_path / "other", MEMORY)
    push(tmp_path / "short", "memory://short")
    with pytest.raises(BankError, match=r"long is at commit 3, and what was fetched, at 1, is an older"):
        pull("memory://short", tmp_path / "long")
    with pytest.raises(FingerprintError, match="choose a new file"):
        pull(MEMORY, tmp_path / "other")
    (tmp_path / "letter").write_text("Dear Ada,")
    with pytest.raises(BankError, match="letter is damaged or no memory bank"):
        pull(MEMORY, tmp_path / "letter")
    assert (tmp_path / "letter").read_text() == "Dear Ada,"
    with pytest.raises(BankError, match="or another bank; choose another file"):
        pull(MEMORY, tmp_path / "short")
    pull("memory://short", tmp_path / "copy")
    with MemoryBank.open(tmp_path / "copy", write=True), pytest.raises(BankError, match="is open for writing"):
        pull("memory://short", tmp_path / "copy")


def test_whatever_takes_a_file_refuses_a_url_and_names_pull(tmp_path: Path) -> None:
    bank = filled(tmp_path / "bank")
    url = "s3://bucket/bank"
    uses: list[Callable[[], object]] = [
        lambda: MemoryBank.open(url),
        lambda: MemoryBank.open(url, write=True),
        lambda: MemoryBank.open(Path(url)),
        lambda: MemoryBank.exists(url),
        lambda: MemoryBank.create(url, "model"),
        lambda: MemoryBank.create_on_commit(url, "model"),
        lambda: bank.save(url),
        lambda: verify(url),
        lambda: push(url, MEMORY),
        lambda: pull(MEMORY, url),
    ]
    for use in uses:
        with pytest.raises(BankError, match=rf"{url} is a URL.* mac-rag bank pull {url} FILE"):
            use()
    assert not Path("s3:").exists()


def test_missing_banks_buckets_and_packages_are_errors_with_a_remedy(s3: str, tmp_path: Path) -> None:
    with pytest.raises(BankError, match=rf"no memory bank at {s3}; put one there: mac-rag bank push"):
        pull(s3, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    with pytest.raises(BankError, match="no memory bank at s3://no-such-bucket/bank"):
        pull("s3://no-such-bucket/bank", tmp_path / "copy")
    with pytest.raises(BankError, match=r"needs a package that is not installed.*pip install 'mac-rag\[remote\]'"):
        pull("gs://bucket/bank", tmp_path / "copy")
    with pytest.raises(BankError, match="nonsense"):
        pull("nonsense://bucket/bank", tmp_path / "copy")


def test_without_fsspec_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(BankError, match=r"pip install 'mac-rag\[remote\]'"):
        pull("s3://bucket/bank", tmp_path / "copy")


@pytest.mark.parametrize("url", ["https://me:secret-word@host/bank", "https://host/bank?signature=secret-word"])
def test_secrets_in_urls_are_refused_and_not_repeated(url: str, tmp_path: Path) -> None:
    with pytest.raises(BankError) as error:
        pull(url, tmp_path / "copy")
    assert "secret-word" not in str(error.value)


def test_credentials_appear_in_no_error(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.filesystem("s3").clear_instance_cache()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(BankError, match="check the connection, the endpoint and the credentials") as error:
        pull(s3, tmp_path / "copy")
    assert "of-the-test" not in str(error.value)
    fsspec.filesystem("s3").clear_instance_cache()


def test_pulled_files_are_private(store: Any, tmp_path: Path) -> None:
    filled(tmp_path / "bank", keep_texts=True).close()
    push(tmp_path / "bank", MEMORY)
    pull(MEMORY, tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("ending", [".sqlite", ".json"])
def test_objects_that_are_not_what_was_pushed_leave_the_file_as_it_was(store: Any, tmp_path: Path, ending: str) -> None:
    with filled(tmp_path / "bank") as bank:
        push(tmp_path / "bank", MEMORY)
        pull(MEMORY, tmp_path / "copy")
        before = contents(bank)
        put(bank, NAMES[3], 3.0)
    push(tmp_path / "bank", MEMORY)
    [name] = [name for name in names(MEMORY) if name.endswith(ending)]
    content = store.cat_file(f"/bank/{name}")
    for damage in (content[:-1], bytes(9) + content[9:], b"", b"[]", b"{" * 100_000):
        store.pipe_file(f"/bank/{name}", damage)
        with pytest.raises(DamageError, match=rf"(?s)memory://bank/{name}.*push the bank again"):
            pull(MEMORY, tmp_path / "copy")
    store.rm_file(f"/bank/{name}")
    with pytest.raises(BankError, match="mac-rag bank push"):
        pull(MEMORY, tmp_path / "copy")
    assert contents(MemoryBank.open(tmp_path / "copy")) == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    push(tmp_path / "bank", MEMORY)
    pull(MEMORY, tmp_path / "copy")
    assert contents(MemoryBank.open(tmp_path / "copy")) == contents(MemoryBank.open(tmp_path / "bank"))


def test_a_copy_that_is_interrupted_leaves_one_commit_or_the_next_and_goes_on(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways, from each call of the store on."""
    with filled(tmp_path / "bank", 5) as bank:
        push(tmp_path / "bank", MEMORY)
        pull(MEMORY, tmp_path / "copy")
        before = contents(bank)
        bank.delete(NAMES[0])
        bank.compact()
        after = contents(bank)

    def at_each_call(copy: Callable[[], object], seen: Callable[[], dict[str, float]]) -> None:
        states = []
        for allowed in range(100):
            with monkeypatch.context() as patch:
                left = iter(range(allowed))
                for name in ("_open", "pipe_file", "rm_file"):
                    patch.setattr(MemoryFileSystem, name, failing(getattr(MemoryFileSystem, name), left))
                try:
                    copy()
                except BankError:
                    pass
                else:
                    break
            states.append(seen())
            assert states[-1] in (before, after)
        assert states[0] == before
        assert seen() == after

    def failing(call: Callable[..., Any], left: Iterator[int]) -> Callable[..., Any]:
        def fail(*arguments: Any, **options: Any) -> Any:
            if next(left, None) is None:
                raise TimeoutError("the connection is gone")
            return call(*arguments, **options)

        return fail

    def there() -> dict[str, float]:
        pull(MEMORY, tmp_path / f"seen {next(_numbers)}")
        return contents(MemoryBank.open(max(tmp_path.glob("seen *"), key=lambda path: path.stat().st_mtime_ns)))

    at_each_call(lambda: push(tmp_path / "bank", MEMORY), there)
    assert len(names(MEMORY)) == 2
    at_each_call(lambda: pull(MEMORY, tmp_path / "copy"), lambda: contents(MemoryBank.open(tmp_path / "copy")))


def test_both_follow_a_change_on_the_other_side_meanwhile(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens, puts = MemoryFileSystem._open, MemoryFileSystem.put_file
    with filled(tmp_path / "bank", 5) as bank:

        def put_after_a_change(*arguments: Any, **options: Any) -> Any:
            if NAMES[0] in bank:
                bank.delete(NAMES[0])
                bank.commit()
            return puts(*arguments, **options)

        monkeypatch.setattr(MemoryFileSystem, "put_file", put_after_a_change)
        assert push(tmp_path / "bank", MEMORY) == 5

        def open_after_a_push(fs: Any, path: str, mode: str, **options: Any) -> Any:
            if NAMES[1] in bank and path.endswith("sqlite"):
                bank.delete(NAMES[1])
                bank.commit()
                push(tmp_path / "bank", MEMORY)
            return opens(fs, path, mode, **options)

        monkeypatch.setattr(MemoryFileSystem, "_open", open_after_a_push)
        assert pull(MEMORY, tmp_path / "copy") == 3
        assert contents(MemoryBank.open(tmp_path / "copy")) == contents(MemoryBank.open(tmp_path / "bank"))


def test_the_commands(store: Any, tmp_path: Path) -> None:
    with MemoryBank.create(tmp_path / "bank", "model") as bank:
        bank.put([Document(name, "") for name in NAMES], memory(8))
        bank.commit()

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments))

    pushed = run("bank", "push", str(tmp_path / "bank"), MEMORY)
    assert pushed.output == f"8 documents are at {MEMORY}\n"
    pulled = run("bank", "pull", MEMORY, str(tmp_path / "copy"))
    assert f"8 documents are in {tmp_path / 'copy'}" in pulled.output.replace("\n", " ")
    assert contents(MemoryBank.open(tmp_path / "copy")) == contents(MemoryBank.open(tmp_path / "bank"))
    for arguments in (
        ("ask", "Who?", "--bank", MEMORY),
        ("adapt", __file__, "--bank", MEMORY),
        ("bank", "info", "--bank", MEMORY),
        ("bank", "compact", "--bank", MEMORY),
        ("bank", "backup", "--bank", str(tmp_path / "bank"), "--output", MEMORY),
        ("bank", "restore", MEMORY, "--bank", str(tmp_path / "new")),
    ):
        refused = run(*arguments)
        assert isinstance(refused.exception, BankError)
        assert f"mac-rag bank pull {MEMORY} FILE" in str(refused.exception)
