"""Clients that go, wait, or send slowly; too much at a time; the end of the server, kind and unkind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from mac_rag.bank import MemoryBank
from mac_rag.data.types import Decoded
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError
from mac_rag.model import MACModel
from mac_rag.server.keys import KeyStore
from mac_rag.server.service import Service
from tests.helpers import wait_until
from tests.server.conftest import NEWS, PRESS, QUESTION
from tests.server.helpers import Running, make, serving

ASK: Any = {"model": "tiny:news", "messages": [{"role": "user", "content": QUESTION}], "sources": 0}


@pytest.fixture
def one_at_a_time(mac_tiny: MACModel, tmp_path: Path) -> Iterator[Running]:
    """A server that takes two questions at a time, and two seconds for a body."""
    with serving(tmp_path, mac_tiny, pending=2, body_seconds=2) as running:
        with running.client() as client:
            make(client, "news", *NEWS)
        yield running


def engine_of(running: Running) -> MACEngine:
    return running.service.catalog.get("news").engine


def request(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def test_a_full_queue_refuses_and_late_answers_are_told(
    one_at_a_time: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = engine_of(one_at_a_time)._queue
    monkeypatch.setattr(one_at_a_time.service.questions, "_seconds", 2)
    with one_at_a_time.client() as client, ThreadPoolExecutor(2) as pool:
        with queue.turn():
            waiting = [pool.submit(client.post, "/v1/chat/completions", json=ASK) for _ in range(2)]
            wait_until(lambda: len(queue._waiting) == 2)
            for more in ({}, {"stream": True}):
                refused = client.post("/v1/chat/completions", json={**ASK, **more})
                assert refused.status_code == 429
                assert refused.headers["retry-after"] == "1"
            for answer in waiting:
                assert answer.result().status_code == 504
        wait_until(lambda: not one_at_a_time.service.questions.pending)
        monkeypatch.undo()
        assert client.post("/v1/chat/completions", json=ASK).status_code == 200


def test_a_short_question_is_answered_beside_a_long_one(
    one_at_a_time: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, rows = engine_of(one_at_a_time), list[int]()
    lm = engine.model.base_lm
    long = {**ASK, "max_tokens": 60, "logit_bias": {str(token): -100 for token in lm.end_tokens}}
    read = lm._read

    def slow(ids: Any, *rest: Any) -> Any:
        rows.append(len(ids))
        time.sleep(0.03)
        return read(ids, *rest)

    with one_at_a_time.client() as client, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(lm, "_read", slow)
        expected = [client.post("/v1/chat/completions", json=body).json() for body in (long, ASK)]
        alone = max(rows)
        rows.clear()
        waiting = pool.submit(client.post, "/v1/chat/completions", json=long)
        wait_until(lambda: len(rows) > 2)
        short = client.post("/v1/chat/completions", json=ASK).json()
        assert not waiting.done()
        assert max(rows) == 2 * alone
        found = [waiting.result().json(), short]
    for one, same in zip(found, expected, strict=True):
        assert (one["choices"], one["usage"]) == (same["choices"], same["usage"])


def test_a_question_of_a_client_that_left_is_not_asked(one_at_a_time: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, batches = engine_of(one_at_a_time), list[int]()
    monkeypatch.setattr(engine, "on_batch", batches.append)
    with engine._queue.turn():
        with one_at_a_time.connected() as connection:
            connection.sendall(request(ASK))
            wait_until(lambda: len(engine._queue._waiting) == 1)
        wait_until(lambda: engine._queue._waiting[0].is_cancelled)
    wait_until(lambda: not one_at_a_time.service.questions.pending)
    assert batches == []


def test_a_stream_ends_with_its_client(one_at_a_time: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ended = engine_of(one_at_a_time), threading.Event()

    def endless(*_: Any, **__: Any) -> Iterator[Decoded]:
        try:
            while True:
                yield Decoded("piece ")
                time.sleep(0.01)
        finally:
            ended.set()

    monkeypatch.setattr(engine, "stream", endless)
    with one_at_a_time.connected() as connection:
        connection.sendall(request({**ASK, "stream": True}))
        assert b"200 OK" in connection.recv(1000)
    assert ended.wait(20)  # the server's own bound would end it after a minute
    wait_until(lambda: not one_at_a_time.service.questions.pending)


def test_a_stream_that_takes_too_long_says_so(one_at_a_time: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    read = threading.Event()

    def slow(*_: Any, **__: Any) -> Iterator[Decoded]:
        yield Decoded("a piece")
        assert read.wait(20)
        yield Decoded("too late")

    monkeypatch.setattr(engine_of(one_at_a_time), "stream", slow)
    monkeypatch.setattr(one_at_a_time.service.questions, "_seconds", 2)
    text = one_at_a_time.client().post("/v1/chat/completions", json={**ASK, "stream": True}).text
    read.set()
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert "a piece" in events[0]
    assert json.loads(events[1])["error"]["code"] == "timeout"
    assert events[2] == "[DONE]"
    assert "too late" not in text


def test_a_body_that_never_ends_is_refused(one_at_a_time: Running) -> None:
    with one_at_a_time.connected() as connection:
        connection.sendall(request(ASK)[:-10])
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")
    assert one_at_a_time.client().get("/ready").status_code == 200


def test_stopping_finishes_what_has_begun(mac_tiny: MACModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go = threading.Event(), threading.Event()
    with serving(tmp_path, mac_tiny) as running, running.client() as client, ThreadPoolExecutor(2) as pool:
        make(client, "news")
        engine = engine_of(running)
        adapt = engine.adapt

        def slow(*arguments: Any, **options: Any) -> Any:
            began.set()
            assert go.wait(20)
            return adapt(*arguments, **options)

        monkeypatch.setattr(engine, "adapt", slow)
        body = {"documents": [{"id": "press", "text": PRESS}]}
        put = pool.submit(client.post, "/v1/banks/news/documents", json=body)
        assert began.wait(20)
        running.server.should_exit = True
        wait_until(lambda: not running.service.ready)
        with pytest.raises(httpx.TransportError):  # it listens no more
            httpx.get(f"{running.url}/health", trust_env=False)
        go.set()
        assert put.result().json()["added"] == 1
    assert MemoryBank.open(tmp_path / "banks" / "news" / "bank").document_ids == ["press"]


def test_work_that_arrives_at_the_end_is_refused(one_at_a_time: Running) -> None:
    with one_at_a_time.client() as client:
        one_at_a_time.service.refuse_new_work()
        for method, path, body in (
            ("POST", "/v1/chat/completions", ASK),
            ("POST", "/v1/banks/news/documents", {"documents": [{"id": "new", "text": "A text."}]}),
            ("GET", "/v1/banks/news", None),
        ):
            response = client.request(method, path, json=body)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "closing"
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
    assert "new" not in engine_of(one_at_a_time).bank


def start(folder: Path, *options: str) -> tuple[subprocess.Popen[bytes], str]:
    """`mac-rag serve` in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = "from mac_rag.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", "--data", str(folder), "--model", "mac-tiny", "--port", str(port),
         "--requests-per-minute", "0", *options],
        env=dict(os.environ), stderr=subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
                return process, url
        except httpx.TransportError:
            assert process.poll() is None
            time.sleep(0.1)
    process.kill()
    raise AssertionError("the server did not start")


@pytest.mark.parametrize("wrong", [".", "banks"])
def test_a_data_folder_that_cannot_be_written_is_named(mac_tiny: MACModel, tmp_path: Path, wrong: str) -> None:
    folder = tmp_path / "data"
    (folder / wrong).parent.mkdir(exist_ok=True)
    (folder / wrong).touch()
    with pytest.raises(ConfigError, match=rf"{folder / wrong} cannot be written: .*; give another folder"):
        Service(folder, mac_tiny, "tiny")


def test_a_key_for_a_folder_that_cannot_be_written_names_it(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    store = KeyStore(tmp_path / "data" / "keys.json")
    for change in (lambda: store.add("reader", "read", ["*"]), lambda: store.remove("reader")):
        with pytest.raises(ConfigError, match=rf"{tmp_path / 'data'} cannot be written: .*; give another folder"):
            change()
