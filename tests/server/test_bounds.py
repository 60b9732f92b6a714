"""What a request may cost, where its work is done, and what others notice of it."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from mac_rag.errors import BankError
from mac_rag.model import MACModel
from mac_rag.server import catalog, completions, jobs, requests
from mac_rag.server.service import Service
from tests.helpers import wait_until
from tests.server.conftest import NEWS, PRESS, QUESTION
from tests.server.helpers import Running, make, serving

CHAT: Any = {"model": "tiny:news", "messages": [{"role": "user", "content": QUESTION}]}


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


class TestRequests:
    @pytest.mark.parametrize(
        ("path", "more", "param"),
        [
            ("chat/completions", {"filters": {"year": list(range(2_000))}}, "filters"),
            ("chat/completions", {"filters": {str(key): 1 for key in range(2_000)}}, "filters"),
            ("chat/completions", {"filters": {"year": nested(20)}}, "filters"),
            ("chat/completions", {"metadata": {str(key): 1 for key in range(30_000)}}, None),
            ("chat/completions", {"user": "x" * 1_100_000}, None),
            ("chat/completions", {"messages": CHAT["messages"] * 300}, "messages"),
            ("banks/news/search", {"query": "a", "filters": {"year": list(range(2_000))}}, "filters"),
        ],
    )
    def test_what_costs_too_much_is_refused(self, running: Running, path: str, more: Any, param: str | None) -> None:
        body = {**(CHAT if path.startswith("chat") else {}), **more}
        response = running.client().post(f"/v1/{path}", json=body)
        assert response.status_code in (400, 413)
        assert response.json()["error"]["param"] == param

    def test_texts_to_embed_are_bounded_in_sum(self, running: Running) -> None:
        body = {"model": "all-MiniLM-L6-v2", "input": ["x" * 19_000] * 11}
        response = running.client().post("/v1/embeddings", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "too_long")

    def test_a_message_of_an_agent_is_short(self, running: Running) -> None:
        """The SDK parses it in the event loop."""
        call = {"name": "remember", "arguments": {"bank": "news", "text": "x" * 1_100_000}}
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
        assert running.client().post("/mcp", json=message).status_code == 413

    def test_work_is_done_outside_of_the_event_loop(self, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        loops: list[bool] = []

        def noting(function: Any) -> Any:
            def noted(*arguments: Any, **options: Any) -> Any:
                try:
                    asyncio.get_running_loop()
                    loops.append(True)
                except RuntimeError:
                    loops.append(False)
                return function(*arguments, **options)

            return noted

        for module, name in (
            (requests, "parse_json"),
            (catalog, "condition"),
            (catalog, "_described"),
            (completions, "_written"),
        ):
            monkeypatch.setattr(module, name, noting(getattr(module, name)))
        with running.client() as client:
            client.post("/v1/chat/completions", json={**CHAT, "filters": {"year": [2004, 2005]}}).raise_for_status()
            client.get("/v1/banks/news/documents").raise_for_status()
            client.post("/v1/embeddings", json={"model": "all-MiniLM-L6-v2", "input": "a"}).raise_for_status()
        assert len(loops) >= 5
        assert not any(loops)

    def test_a_filter_is_kept_for_the_next_question_whatever_its_length(self, running: Running) -> None:
        bank = running.service.catalog.get("news")
        long = {"year": [2004, *("x" * 1_000 for _ in range(500))]}
        assert bank.allowed(long) == {"bridge"}
        assert bank.allowed(long) is bank.allowed(json.loads(json.dumps(long)))
        assert max(len(str(key)) for key in bank._filtered) < 200

    def test_answers_about_a_filter_that_nobody_waits_for_end(self, running: Running) -> None:
        with pytest.raises(catalog.CancelledError):
            running.service.catalog.get("news").allowed({"year": 1850}, lambda: True)


def test_bodies_are_bounded_in_sum(mac_tiny: MACModel, tmp_path: Path) -> None:
    with serving(tmp_path, mac_tiny, bodies_bytes=300_000) as running, running.client() as client:
        make(client, "news")
        head = "POST /v1/banks/news/documents HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        gate: Any = running.server.config.loaded_app
        body, kind = b" " * 150_000, {"Content-Type": "application/json"}
        with running.connected() as first:
            first.sendall(f"{head}Content-Length: 250000\r\n\r\n".encode() + b" " * 200_000)
            wait_until(lambda: gate._bodies.total() == 200_000)
            refused = client.post("/v1/banks/news/documents", content=body, headers=kind)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        wait_until(lambda: not gate._bodies.total())
        assert client.post("/v1/banks/news/documents", content=body, headers=kind).status_code == 400


class TestKeys:
    @pytest.fixture
    def two(self, mac_tiny: MACModel, tmp_path: Path) -> Iterator[tuple[Running, list[httpx.Client]]]:
        keys = dict.fromkeys(("greedy", "modest"), ("admin", ["*"]))
        with serving(tmp_path, mac_tiny, keys=keys, pending=4) as running:
            clients = [running.client(name) for name in keys]
            make(clients[0], "news", *NEWS)
            yield running, clients

    def test_a_key_that_asks_too_much_hinders_no_other(self, two: Any) -> None:
        """Four questions of one key wait; the fifth is refused, and another key's is answered before three of them."""
        running, [greedy, modest] = two
        engine = running.service.catalog.get("news").engine
        order: list[str] = []

        def ask(client: httpx.Client, name: str, number: int) -> int:
            body = {**CHAT, "temperature": 1.0, "seed": number}  # other settings, so that none share a batch
            status = client.post("/v1/chat/completions", json=body).status_code
            order.append(name)
            return status

        with ThreadPoolExecutor(5) as pool:
            with engine.turn():
                waiting = [pool.submit(ask, greedy, "greedy", number) for number in range(4)]
                wait_until(lambda: len(engine._queue._waiting) == 4)
                assert greedy.post("/v1/chat/completions", json=CHAT).status_code == 429
                waiting.append(pool.submit(ask, modest, "modest", 9))
                wait_until(lambda: len(engine._queue._waiting) == 5)
            assert {answer.result() for answer in waiting} == {200}
        assert "modest" in order[:3]


class TestErrors:
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
    def test_a_full_disk(self, running: Running, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        def full(*_: Any, **__: Any) -> None:
            raise OSError(number, "No space left on device", "/srv/data/uploads/secret")

        monkeypatch.setattr(jobs.Upload, "_write", full)
        with running.client() as client:
            sent = client.post("/v1/banks/news/files", files=[("f", ("a.txt", b"a"))])
            assert (sent.status_code, sent.json()["error"]["code"]) == (507, "disk_full")
            assert "/srv" not in sent.text
        assert list(running.service.jobs.uploads.iterdir()) == []

    def test_head_is_get_without_a_body(self, running: Running) -> None:
        with running.client() as client:
            for path in ("/", "/health", "/v1/models", "/v1/banks/news", "/v1/banks/none", "/v1/chat/completions"):
                got, head = client.get(path), client.head(path)
                assert (head.status_code, head.content) == (got.status_code, b"")
                assert head.headers["content-length"] == got.headers["content-length"]

    def test_a_request_has_an_id_in_its_reply_and_its_line_of_the_log(
        self, running: Running, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        with running.client() as client:
            responses = [client.get(path) for path in ("/health", "/v1/banks", "/nowhere")]
        ids = [response.headers["x-request-id"] for response in responses]
        assert len(set(ids)) == 3

        def lines() -> dict[str, Any]:
            own = [json.loads(one.getMessage()) for one in caplog.records if one.name.endswith(".requests")]
            return {line["request"]: (line["key"], line["peer"]) for line in own}

        wait_until(lambda: set(ids) <= set(lines()))  # a line comes after its reply
        assert [lines()[one] for one in ids] == [
            (None, "127.0.0.1"),
            ("anyone", "127.0.0.1"),
            ("anyone", "127.0.0.1"),
        ]

    def test_errors_in_the_log_name_the_request(self, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        from mac_rag.server.app import _with_request

        seen: list[Any] = []

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                seen.append(record)

        handler = Handler()
        handler.addFilter(_with_request)

        def fails(*_: Any) -> None:
            logging.getLogger("mac_rag.server").error("in a thread")
            raise RuntimeError

        monkeypatch.setattr(running.service.catalog.get("news"), "info", fails)
        logging.getLogger("mac_rag.server").addHandler(handler)
        response = running.client().get("/v1/banks/news")
        logging.getLogger("mac_rag.server").removeHandler(handler)
        assert response.status_code == 500
        assert {record.request for record in seen} == {response.headers["x-request-id"]}

    def test_long_ids_do_not_end_the_pages(self, mac_tiny: MACModel, tmp_path: Path) -> None:
        names = [f"{number}" + "\N{GRINNING FACE}" * 999 for number in range(3)]
        with serving(tmp_path, mac_tiny) as running, running.client() as client:
            make(client, "news", *((name, PRESS) for name in names))
            found, more, after = list[str](), True, {}
            while more:
                page = client.get("/v1/banks/news/documents", params={"limit": 1, **after}).json()
                found += [document["id"] for document in page["data"]]
                more, after = page["has_more"], {"after": found[-1]}
            assert found == names
            too_long = {"documents": [{"id": names[0] + "xx", "text": PRESS}]}
            assert client.post("/v1/banks/news/documents", json=too_long).status_code == 400

    def test_every_error_is_in_the_description(self, running: Running) -> None:
        described = running.client().get("/openapi.json").json()
        for path, operations in described["paths"].items():
            for method, operation in operations.items():
                for kind in ("4XX", "5XX"):
                    assert list(operation["responses"][kind]["content"]) == ["application/json"], (method, path)
                assert "422" not in operation["responses"]
        assert "202" in described["paths"]["/v1/banks/{name}/documents"]["post"]["responses"]
        assert list(described["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]

    def test_metrics_count_jobs_memory_and_disk(self, running: Running) -> None:
        text = running.client().get("/metrics").text
        for name in ('mac_rag_jobs{state="waiting"} 0.0', "mac_rag_disk_free_bytes ", "process_resident_memory_bytes "):
            assert name in text


def test_a_second_process_is_refused_before_it_touches_anything(mac_tiny: MACModel, tmp_path: Path) -> None:
    with serving(tmp_path, mac_tiny) as running:
        kept = running.service.jobs.uploads / "job-1"
        kept.mkdir(parents=True)
        new = tmp_path / "banks" / ".new-1"
        new.mkdir()
        with pytest.raises(BankError, match="is open for writing in process"):
            Service(tmp_path, mac_tiny, "tiny")
        assert kept.exists()
        assert new.exists()
    Service(tmp_path, mac_tiny, "tiny").close()
    assert not kept.exists()


def test_a_stop_waits_for_nobody_forever(mac_tiny: MACModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question and a change that do not end: both clients are told, and the change is taken back."""
    monkeypatch.setattr("mac_rag.server.app._GIVE_UP", 0.5)
    go = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        with serving(tmp_path, mac_tiny) as running, running.client() as client:
            make(client, "news")
            engine = running.service.catalog.get("news").engine
            adapt, begun = engine.adapt, threading.Semaphore(0)

            def endless(documents: Any, *, cancelled: Any, **options: Any) -> Any:
                begun.release()
                wait_until(cancelled)
                return adapt(documents, cancelled=cancelled, **options)

            def never(*_: Any, **__: Any) -> Any:
                begun.release()
                assert go.wait(60)
                return []

            monkeypatch.setattr(engine, "adapt", endless)
            monkeypatch.setattr(running.service.asking, "answer", never)
            body = {"documents": [{"id": "press", "text": PRESS}]}
            sent = [
                pool.submit(client.post, "/v1/banks/news/documents", json=body),
                pool.submit(client.post, "/v1/chat/completions", json=CHAT),
            ]
            assert all(begun.acquire(timeout=20) for _ in sent)
            running.server.should_exit = True
            answers = [answer.result() for answer in sent]
        go.set()
    assert [answer.status_code for answer in answers] == [503, 503]
    with serving(tmp_path, mac_tiny) as running:
        assert len(running.service.catalog.get("news")) == 0
