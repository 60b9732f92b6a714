"""Replicas answer as the server does, from the state that a question is to see; and in processes of Ray."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError, FingerprintError
from mac_rag.lm.decoding import Sampling
from mac_rag.model import MACModel
from mac_rag.server.api_errors import APIError
from mac_rag.server.asking import Asking, Piece, Reply, ServedQuestion
from mac_rag.server.catalog import BankCatalog
from mac_rag.server.metrics import Metrics
from mac_rag.server.replicas import Replica, ReplicatedAsking, SentQuestions
from tests.server.conftest import BRIDGE, PRESS, QUESTION
from tests.server.test_faults import start

DOCUMENTS = [Document("press", PRESS, {"date": "2005-05-09"}), Document("bridge", BRIDGE, {"date": "2004-05-09"})]


class Here:
    """Replicas in this process, which take turns."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas = replicas
        self.sent: list[SentQuestions] = []

    def _next(self, sent: SentQuestions) -> Replica:
        self.sent.append(sent)
        return self.replicas[len(self.sent) % len(self.replicas)]

    def answer(self, sent: SentQuestions, cancelled: Callable[[], bool] | None) -> list[Reply]:
        return asyncio.run(self._next(sent).answer(sent))

    def stream(self, sent: SentQuestions) -> Iterator[Piece | Reply]:
        async def all_of(replica: Replica) -> list[Piece | Reply]:
            return [piece async for piece in replica.stream(sent)]

        yield from asyncio.run(all_of(self._next(sent)))


class Served:
    """A catalog, asked by itself and by two replicas."""

    def __init__(self, folder: Path, model: MACModel) -> None:
        self.catalog = BankCatalog(folder, model)
        metrics = Metrics(self.catalog)
        self.here = Here([Replica("mac-tiny", model.fingerprint, folder, 8, 0.0) for _ in range(2)])
        self.itself = Asking(MACEngine(model), metrics)
        self.replicated = ReplicatedAsking(MACEngine(model), metrics, self.here, self.catalog)


@pytest.fixture
def served(tmp_path: Path, mac_tiny: MACModel) -> Iterator[Served]:
    served = Served(tmp_path, mac_tiny)
    served.catalog.create("news", retriever="bm25").put(DOCUMENTS)
    yield served
    served.catalog.close()


def test_replicas_answer_as_the_server_itself(served: Served) -> None:
    bank = served.catalog.get("news")
    for question in (
        ServedQuestion(QUESTION, bank, sources=2),
        ServedQuestion(QUESTION, bank, use_retriever=False, sources=1),
        ServedQuestion(QUESTION, bank, use_memory=False),
        ServedQuestion(QUESTION, bank, as_of="2004-12-31", sources=2),
        ServedQuestion(QUESTION, bank, allowed=frozenset({"bridge"})),
        ServedQuestion(QUESTION, bank, k=1, max_new_tokens=1),
        ServedQuestion(QUESTION, bank, sampling=Sampling(log_probabilities=2)),
        ServedQuestion(QUESTION, None),
    ):
        assert served.replicated.answer([question]) == served.itself.answer([question])
        *pieces, reply = served.replicated.stream(question)
        assert [*pieces, reply] == list(served.itself.stream(question))
    several = [ServedQuestion(text, bank, k=1) for text in (QUESTION, "Who opened Basalt Bridge?")]
    assert served.replicated.answer(several) == served.itself.answer(several)


def test_a_question_behind_a_change_sees_it(served: Served) -> None:
    bank, question = served.catalog.get("news"), "How many workers does Rainga Press have?"
    for round in range(4):  # each replica is behind at some time
        bank.put([Document("press", PRESS.replace("180", str(140 + round)))])
        [reply] = served.replicated.answer([ServedQuestion(question, bank)])
        assert reply.text == str(140 + round)
    bank.forget(["press"])
    for _ in range(2):
        [reply] = served.replicated.answer([ServedQuestion(question, bank, sources=5)])
        assert [source.document_id for source in reply.sources] == ["bridge"]


def test_another_bank_of_the_same_name_is_opened_anew_and_a_deleted_one_is_closed(served: Served) -> None:
    bank = served.catalog.get("news")
    for _ in served.here.replicas:
        served.replicated.answer([ServedQuestion(QUESTION, bank)])
    late = served.here.sent[-1]
    served.catalog.delete("news")
    served.catalog.create("other", retriever="none").put([Document("bridge", BRIDGE)])
    again = served.catalog.create("news", retriever="none")
    again.put([Document("new", PRESS)])
    for _ in served.here.replicas:
        [reply] = served.replicated.answer([ServedQuestion(QUESTION, again, sources=5)])
        assert [source.document_id for source in reply.sources] == ["new"]
    for replica in served.here.replicas:
        with pytest.raises(APIError, match="no bank 'news'"):  # of the deleted one, sent long ago
            asyncio.run(replica.answer(late))
    served.catalog.delete("news")
    for _ in served.here.replicas:
        served.replicated.answer([ServedQuestion(QUESTION, served.catalog.get("other"))])
    assert [[one.name for one in replica.served()] for replica in served.here.replicas] == [["other"], ["other"]]


def test_a_model_that_differs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FingerprintError, match="mac-tiny is not the server's model"):
        Replica("mac-tiny", "0" * 64, tmp_path, 8, 0.0)


def test_options_that_need_ray_are_refused_without_it(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from mac_rag.cli.main import app

    for arguments, message in (
        (["--replicas", "3"], "--replicas 3 needs --ray"),
        (["--ray", "--device-map", "auto"], "--device-map auto does not work with --ray"),
    ):
        failed = CliRunner().invoke(app, ["serve", "--data", str(tmp_path), *arguments])
        assert isinstance(failed.exception, ConfigError)
        assert message in str(failed.exception)


def processes(parent: int) -> dict[int, str]:
    """Ids and titles of the processes below one."""
    found: dict[int, str] = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                status = (place / "stat").read_text().rpartition(")")[2].split()
                title = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if int(status[1]) == parent:
                found |= {int(place.name): title, **processes(int(place.name))}
    return found


# 127.0.0.1, ::1 and ::ffff:127.0.0.1 as /proc writes them.
_LOOPBACK = {"0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF00000100007F"}


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


@pytest.mark.slow
def test_replicas_answer_over_a_bank_in_shards_while_it_changes_and_a_replica_dies(tmp_path: Path) -> None:
    process, url = start(tmp_path, "--ray", "--seconds", "300")
    try:
        with httpx.Client(base_url=url, timeout=300, trust_env=False) as http:
            assert http.post("/v1/banks", json={"name": "news", "keep_texts": True}).status_code == 400
            http.post("/v1/banks", json={"name": "news"}).raise_for_status()
            assert (tmp_path / "banks" / "news" / "bank" / "shard-1").is_dir()
            documents = [{"id": one.id, "text": one.text, "metadata": dict(one.metadata)} for one in DOCUMENTS]
            http.post("/v1/banks/news/documents", json={"documents": documents}).raise_for_status()
            assert http.get("/v1/banks/news").json()["shards"] == 2

            def ask(**more: object) -> httpx.Response:
                body = {"model": "mac-tiny:news", "messages": [{"role": "user", "content": QUESTION}], **more}
                with httpx.Client(base_url=url, timeout=300, trust_env=False) as own:
                    return own.post("/v1/chat/completions", json=body)

            told = ask(sources=2).json()
            assert told["choices"][0]["message"]["content"] == "180"
            assert told["sources"][0]["document_id"] == "press"
            assert '"content":"180"' in ask(stream=True).text.replace(" ", "")
            # A change is seen by the next question, whichever replica answers, also while others ask.
            faults: list[str] = []
            end = threading.Event()

            def others() -> None:
                while not end.is_set():
                    response = ask()
                    if response.status_code != 200:
                        faults.append(response.text)

            threads = [threading.Thread(target=others) for _ in range(3)]
            for thread in threads:
                thread.start()
            for number in range(141, 147):
                body = {"documents": [{"id": "press", "text": PRESS.replace("180", str(number))}]}
                http.post("/v1/banks/news/documents", json=body).raise_for_status()
                assert ask().json()["choices"][0]["message"]["content"] == str(number)
            end.set()
            for thread in threads:
                thread.join()
            assert faults == []
            # One of two replicas dies: what it was answering is refused, and all goes on.
            assert listeners([process.pid, *processes(process.pid)]) <= _LOOPBACK
            replicas = [one for one, title in processes(process.pid).items() if title.startswith("ray::Replica")]
            assert len(replicas) == 2
            os.kill(replicas[0], signal.SIGKILL)
            statuses = set()
            for _ in range(20):
                statuses.add(ask().status_code)
                time.sleep(0.1)
            assert statuses <= {200, 503}
            assert ask().status_code == 200
            http.delete("/v1/banks/news/document", params={"id": "press"}).raise_for_status()
            sources = ask(sources=5).json()["sources"]
            assert [source["document_id"] for source in sources] == ["bridge"]
            assert http.delete("/v1/banks/news").status_code == 200
            assert ask().status_code == 404
    finally:
        process.terminate()
        process.wait(120)
    deadline = time.monotonic() + 30
    while below := processes(process.pid):
        assert time.monotonic() < deadline, below
        time.sleep(0.2)
