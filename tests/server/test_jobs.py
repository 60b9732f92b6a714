"""Jobs: who goes first, what ends them, and what is left of them after a stop and after a kill."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mac_rag.data.conversion import converter
from mac_rag.errors import ConfigError
from mac_rag.model import MACModel
from mac_rag.server.service import Service
from tests.helpers import wait_until
from tests.server.conftest import BRIDGE, PRESS
from tests.server.helpers import Running, ended, make, serving

KEYS = ("many", "few")


@pytest.fixture
def two(mac_tiny: MACModel, tmp_path: Path) -> Iterator[tuple[Running, dict[str, httpx.Client]]]:
    """A server with the bank `news`, and a client for each of two keys."""
    with serving(tmp_path, mac_tiny, keys=dict.fromkeys(KEYS, ("admin", ["*"])), jobs=3) as running:
        clients = {name: running.client(name) for name in KEYS}
        make(clients["many"], "news")
        yield running, clients


def rows(count: int, prefix: str = "") -> list[Any]:
    lines = "\n".join(json.dumps({"id": f"{prefix}{number}", "text": f"Report {number}."}) for number in range(count))
    return [("f", ("rows.jsonl", lines.encode()))]


def send(client: httpx.Client, files: Any) -> dict[str, Any]:
    response = client.post("/v1/banks/news/files", files=files)
    response.raise_for_status()
    job: dict[str, Any] = response.json()
    return job


def test_keys_take_turns_and_have_a_quota_each(two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running, clients = two
    bank, order = running.service.catalog.get("news"), list[str]()
    put = bank.put

    def noted(*arguments: Any, **options: Any) -> Any:
        order.append(running.service.jobs._current.owner)
        return put(*arguments, **options)

    monkeypatch.setattr(bank, "put", noted)
    with bank._change():  # so that all of them wait
        jobs = [(clients["many"], send(clients["many"], rows(96, f"{number}-"))) for number in range(3)]
        assert clients["many"].post("/v1/banks/news/files", files=rows(1)).status_code == 429
        jobs.append((clients["few"], send(clients["few"], rows(1, "few-"))))
    for client, job in jobs:
        assert ended(client, job)["state"] == "done"
    assert order.count("many") == 9
    assert order.index("few") <= 1


def hanging() -> subprocess.Popen[bytes]:
    """In place of the process that converts files, one that never answers."""
    code = "import time; time.sleep(1000)"
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, start_new_session=True)


@pytest.fixture
def never_converts(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The event is set once a conversion has begun, which never ends."""
    begun = threading.Event()

    def running(worker: Any) -> subprocess.Popen[bytes]:
        worker._process, worker._owner = hanging(), converter.os.getpid()
        begun.set()
        return worker._process

    monkeypatch.setattr(converter._Worker, "_running", running)
    yield begun
    converter._WORKER._end()


PAGES: list[Any] = [("f", (f"{number}.html", b"<p>A page.")) for number in range(3)]


def test_a_job_is_cancelled_in_the_midst_of_a_conversion(two: Any, never_converts: threading.Event) -> None:
    _, clients = two
    first, second = send(clients["many"], PAGES), send(clients["many"], PAGES)
    assert never_converts.wait(20)
    began = time.monotonic()
    assert clients["many"].delete(f"/v1/jobs/{second['id']}").json()["state"] == "cancelled"
    clients["many"].delete(f"/v1/jobs/{first['id']}").raise_for_status()
    done = ended(clients["many"], first)
    assert time.monotonic() - began < 5  # two seconds on a machine with nothing else to do
    assert (done["state"], done["left_out"]) == ("cancelled", [])


def test_a_stop_in_the_midst_of_a_conversion_is_quick_and_the_next_start_goes_on(
    mac_tiny: MACModel, tmp_path: Path, never_converts: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [("f", ("first.txt", PRESS.encode())), ("f", ("second.html", f"<p>{BRIDGE}".encode()))]
    with serving(tmp_path, mac_tiny) as running, running.client() as client:
        make(client, "news")
        job = send(client, files)
        assert never_converts.wait(20)
        began = time.monotonic()
    assert time.monotonic() - began < 10
    monkeypatch.undo()
    with serving(tmp_path, mac_tiny) as running, running.client() as client:
        done = ended(client, job)
        assert (done["state"], done["added"], done["total"], done["left_out"]) == ("done", 2, 2, [])
        assert client.get("/v1/banks/news").json()["documents"] == 2
        assert list(running.service.jobs.uploads.iterdir()) == []


def test_what_a_killed_server_had_not_finished_goes_on_or_is_interrupted(mac_tiny: MACModel, tmp_path: Path) -> None:
    """A copy of the files while jobs wait is what a kill leaves behind."""
    with serving(tmp_path / "killed", mac_tiny) as running, running.client() as client:
        make(client, "news")
        with running.service.catalog.get("news")._change():
            body = {"documents": [{"id": "press", "text": PRESS, "metadata": {"text": 7}}], "wait": False}
            whole = client.post("/v1/banks/news/documents", json=body).json()
            lost = send(client, rows(3))
            (running.service.jobs.uploads / "left behind").mkdir()
            shutil.copytree(tmp_path / "killed", tmp_path / "next")
    shutil.rmtree(tmp_path / "next" / "uploads" / lost["id"])
    with serving(tmp_path / "next", mac_tiny) as running, running.client() as client:
        assert ended(client, whole)["state"] == "done"
        assert client.get("/v1/banks/news/document", params={"id": "press"}).json()["metadata"] == {"text": 7}
        listed = client.get("/v1/jobs").json()["data"]
        assert [(job["id"], job["state"]) for job in listed] == [(lost["id"], "interrupted"), (whole["id"], "done")]
        assert "send them again" in listed[0]["error"]
        assert listed[0]["owner"] == "anyone"
        assert list(running.service.jobs.uploads.iterdir()) == []


def test_the_jobs_of_a_deleted_bank_end(two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they would fill a bank that is made under the same name."""
    running, clients = two
    with running.service.catalog.get("news")._change():
        jobs = [send(clients["many"], rows(3)), send(clients["few"], rows(3, "few-"))]
        deleting = threading.Thread(target=clients["few"].delete, args=("/v1/banks/news",))
        deleting.start()
        wait_until(lambda: clients["many"].get(f"/v1/jobs/{jobs[1]['id']}").json()["state"] == "cancelled")
    deleting.join()
    assert ended(clients["many"], jobs[0])["state"] == "cancelled"


def test_documents_of_files_are_bounded_as_all_others(two: Any) -> None:
    _, clients = two
    lines = [json.dumps({"id": "x" * 1_001, "text": "A text."}), json.dumps({"id": "good", "text": "A text."})]
    job = ended(clients["many"], send(clients["many"], [("f", ("rows.jsonl", "\n".join(lines).encode()))]))
    assert (job["added"], job["left_out_count"], job["total"]) == (1, 1, 2)
    assert "give a shorter one" in job["left_out"][0]["reason"]


def test_a_damaged_file_of_jobs_is_named(mac_tiny: MACModel, tmp_path: Path) -> None:
    (tmp_path / "jobs.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(ConfigError, match=r"jobs.sqlite cannot be used: .*; remove it"):
        Service(tmp_path, mac_tiny, "tiny")
