"""Banks, documents and jobs over HTTP, and what they leave on the disk."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from mac_rag.bank import MemoryBank
from mac_rag.data.types import Document
from mac_rag.model import MACModel
from mac_rag.server.catalog import BankCatalog
from tests.server.conftest import BRIDGE, NEWS, PRESS, QUESTION
from tests.server.helpers import Running, ended, make, serving

EVIL = "<img src=x onerror=alert(1)>\"'&</script>"


@pytest.fixture(scope="module")
def own(mac_tiny: MACModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose banks tests change."""
    with serving(tmp_path_factory.mktemp("own"), mac_tiny, body_bytes=200_000, jobs=2) as running:
        yield running


@pytest.fixture
def client(own: Running) -> Iterator[httpx.Client]:
    with own.client() as client:
        yield client


def test_documents_come_and_go(client: httpx.Client) -> None:
    place = make(client, "life", *NEWS)
    document = client.get(f"{place}/document", params={"id": "press"}).json()
    assert (document["text"], document["merged_with"]) == (PRESS, [])
    again = client.post(f"{place}/documents", json={"documents": [{"id": "press", "text": PRESS}]}).json()
    assert again == {"added": 0, "updated": 0, "unchanged": 1, "forgotten": [], "documents": 2}
    page = client.get(f"{place}/documents", params={"limit": 1}).json()
    assert ([one["id"] for one in page["data"]], page["has_more"]) == (["press"], True)
    page = client.get(f"{place}/documents", params={"limit": 1, "after": "press"}).json()
    assert ([one["id"] for one in page["data"]], page["has_more"]) == (["bridge"], False)
    hits = client.post(f"{place}/search", json={"query": "Rainga Press", "k": 1}).json()["data"]
    assert [hit["id"] for hit in hits] == ["press"]
    assert client.delete(f"{place}/document", params={"id": "press"}).json() == {"deleted": ["press"]}
    assert client.get(f"{place}/document", params={"id": "press"}).status_code == 404
    assert client.delete(f"{place}/document", params={"id": "press"}).status_code == 404
    both = client.post(f"{place}/documents/delete", json={"ids": ["bridge", "none", "bridge"]}).json()
    assert both == {"deleted": ["bridge"]}
    assert client.get(place).json()["documents"] == 0
    assert client.post(f"{place}/compact").status_code == 200


@pytest.mark.parametrize(
    "name", ["../life", "..", ".", "a/b", "A", "", "-a", "a" * 65, "a b", "a\n", "con.", "ä", "a\x00", "%2e%2e", EVIL]
)
def test_a_name_is_a_folder_and_nothing_else(own: Running, client: httpx.Client, name: str) -> None:
    before = sorted(path.name for path in own.service.jobs.uploads.parent.rglob("*"))
    assert client.post("/v1/banks", json={"name": name}).status_code == 400
    for ending in ("", "/documents"):
        response = client.get(f"/v1/banks/{quote(name, safe='')}{ending}")
        assert response.status_code in (200, 404)  # an empty name is the list of banks
        assert "keys" not in response.text
    assert sorted(path.name for path in own.service.jobs.uploads.parent.rglob("*")) == before


@pytest.mark.parametrize(
    "document_id", ["../../keys.json", "/etc/passwd", "a\nb", EVIL, "C:\\x", "..", "%2e%2e/x", "ü 文"]
)
def test_ids_are_data(own: Running, client: httpx.Client, document_id: str) -> None:
    place = "/v1/banks/ids"
    client.post("/v1/banks", json={"name": "ids"})
    put = client.post(f"{place}/documents", json={"documents": [{"id": document_id, "text": EVIL + PRESS}]})
    assert put.json()["documents"] == 1
    response = client.get(f"{place}/document", params={"id": document_id})
    assert response.json()["id"] == document_id
    assert response.json()["text"] == EVIL + PRESS
    assert response.headers["content-type"] == "application/json"
    assert client.get(f"{place}/documents").json()["data"][0]["id"] == document_id
    assert client.delete(f"{place}/document", params={"id": document_id}).json()["deleted"] == [document_id]


def test_files_become_documents_by_their_names(own: Running, client: httpx.Client) -> None:
    place = make(client, "files")
    rows = "\n".join(
        json.dumps({"id": f"row-{number}", "text": f"Report {number}.", "year": number}) for number in range(40)
    )
    files = [
        ("f", ("../../bridge.html", f"<title>The bridge</title><p>{BRIDGE}</p><img src=plan.png>".encode())),
        ("f", ("rows.JSONL", rows.encode())),
        ("f", ("note", PRESS.encode())),
        ("f", ("broken.pdf", b"%PDF-1.7 nothing")),
        ("f", ("binary.txt", b"\x00\xff")),
        ("f", ("note", b"the same name again")),
    ]
    job = client.post(f"{place}/files", files=files)
    assert job.status_code == 202
    done = ended(client, job.json())
    assert (done["state"], done["added"], done["total"], done["finished"]) == ("done", 42, 45, 45)
    assert [one["document"] for one in done["left_out"]] == ["bridge.html", "broken.pdf", "binary.txt", "note"]
    assert done["left_out"][0]["reason"] == "pictures without a description are left out: plan.png"
    assert str(own.service.jobs.uploads) not in json.dumps(done)
    assert client.get(f"{place}/document", params={"id": "bridge.html"}).json()["metadata"] == {"title": "The bridge"}
    assert client.get(f"{place}/document", params={"id": "row-7"}).json()["metadata"] == {"year": 7}
    assert list(own.service.jobs.uploads.iterdir()) == []
    assert client.post(f"{place}/files", files={}).status_code == 400


def test_a_cancelled_job_keeps_what_is_put(own: Running, client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    place = make(client, "long")
    bank = own.service.catalog.get("long")
    rows = "\n".join(json.dumps({"id": f"{number}", "text": f"Report {number}."}) for number in range(100))
    put = bank.put

    def put_once(*arguments: Any, **options: Any) -> Any:
        report = put(*arguments, **options)
        client.delete(f"/v1/jobs/{job['id']}").raise_for_status()
        return report

    monkeypatch.setattr(bank, "put", put_once)
    with bank._change():  # the job waits for its turn
        job = client.post(f"{place}/files", files=[("f", ("rows.jsonl", rows.encode()))]).json()
        other = client.post(f"{place}/files", files=[("f", ("more.jsonl", rows.encode()))]).json()
        full = client.post(f"{place}/files", files=[("f", ("third.jsonl", rows.encode()))])
        assert full.status_code == 429
        assert full.headers["retry-after"]
        assert client.delete(f"/v1/jobs/{other['id']}").json()["state"] == "cancelled"  # it has not begun
    done = ended(client, client.get(f"/v1/jobs/{job['id']}").json())
    assert (done["state"], done["finished"], done["added"]) == ("cancelled", 32, 32)
    assert client.get(place).json()["documents"] == 32


@pytest.mark.parametrize(
    "documents",
    [
        [],
        [{"id": "a"}],
        [{"id": "a", "text": " "}],
        [{"id": "a", "text": "x\x00"}],
        [{"id": " ", "text": "x"}],
        [{"id": "a", "text": "x", "phi": [[0.0]]}],
        [{"id": "a", "text": "x", "metadata": {"date": "03/04/2004"}}],
        [{"id": "good", "text": PRESS}, {"id": "a", "text": 7}],
        [{"id": "good", "text": PRESS}, {"id": "good", "text": "twice"}],
        [{"id": str(number), "text": PRESS} for number in range(1_001)],
    ],
)
def test_bad_documents_change_nothing(client: httpx.Client, documents: list[Any]) -> None:
    client.post("/v1/banks", json={"name": "bad"})
    response = client.post("/v1/banks/bad/documents", json={"documents": documents})
    assert response.status_code in (400, 409), response.text
    assert "message" in response.json()["error"]
    assert client.get("/v1/banks/bad").json()["documents"] == 0


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"\xff",
        b"null",
        b'{"documents": [{"id": "a", "text": "b", "id": "c"}]}',
        b'{"documents": [{"id": "a", "text": "b", "metadata": {"x": NaN}}]}',
        b'{"documents": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"documents": [{"id": "a", "text": "b", "metadata": {"x": ' + b"9" * 5_000 + b"}}]}",
        b'{"documents": [{"id": "a", "text": "\\ud83d"}]}',
    ],
)
def test_bad_json_is_refused(client: httpx.Client, body: bytes) -> None:
    client.post("/v1/banks", json={"name": "bad"})
    response = client.post("/v1/banks/bad/documents", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_json_under_another_type_is_not_read(client: httpx.Client) -> None:
    """A form on a page of another site can send text/plain without asking the server first."""
    body = json.dumps({"name": "sneaked"}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert client.post("/v1/banks", content=body, headers={"Content-Type": kind}).status_code == 400
    assert client.get("/v1/banks/sneaked").status_code == 404


def test_bodies_are_bounded_however_they_come(client: httpx.Client) -> None:
    place = make(client, "large")
    large = json.dumps({"documents": [{"id": "a", "text": "x" * 200_000}]}).encode()
    kind = {"Content-Type": "application/json"}
    assert client.post(f"{place}/documents", content=large, headers=kind).status_code == 413
    chunks = (large[start : start + 10_000] for start in range(0, len(large), 10_000))
    assert client.post(f"{place}/documents", content=chunks, headers=kind).status_code == 413
    files = [("f", ("a.txt", b"x" * 250_000))]
    assert client.post(f"{place}/files", files=files).status_code == 413
    long = {"model": "tiny:large", "messages": [{"role": "user", "content": "x" * 30_000}]}
    assert client.post("/v1/chat/completions", json=long).json()["error"]["code"] == "too_long"


def test_a_renamed_bank_is_the_same_bank(mac_tiny: MACModel, tmp_path: Path) -> None:
    with serving(tmp_path, mac_tiny) as running, running.client() as client:
        make(client, "draft", ("press", PRESS), retriever="hybrid")
        make(client, "taken")
        for name, status in (("taken", 409), ("draft", 409), ("../up", 400)):
            assert client.patch("/v1/banks/draft", json={"name": name}).status_code == status
            assert client.get("/v1/banks/draft").json()["documents"] == 1
        assert client.patch("/v1/banks/draft", json={"name": "final"}).json()["name"] == "final"
        client.post("/v1/banks/final/documents", json={"documents": [{"id": "bridge", "text": BRIDGE}]})
        assert client.get("/v1/banks/draft").status_code == 404
        make(client, "draft")
    with serving(tmp_path, mac_tiny) as running, running.client() as client:
        documents = {bank["name"]: bank["documents"] for bank in client.get("/v1/banks").json()["data"]}
        assert documents == {"draft": 0, "final": 2, "taken": 0}
        body = {"model": "tiny:final", "messages": [{"role": "user", "content": QUESTION}]}
        answer = client.post("/v1/chat/completions", json=body).json()
        assert (answer["choices"][0]["message"]["content"], answer["retrieved"][0]) == ("180", "press")
    audit = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [(one["bank"], one["new"]) for one in audit if one["action"] == "bank.rename"] == [("draft", "final")]


def test_a_bank_with_a_job_keeps_its_name(own: Running, client: httpx.Client) -> None:
    place = make(client, "busy")
    body = {"documents": [{"id": "press", "text": PRESS}], "wait": False}
    with own.service.catalog.get("busy")._change():  # the job waits for its turn
        job = client.post(f"{place}/documents", json=body).json()
        assert client.patch(place, json={"name": "free"}).status_code == 409
    assert ended(client, job)["state"] == "done"
    assert client.patch(place, json={"name": "free"}).status_code == 200


def test_an_empty_bank_is_told(client: httpx.Client) -> None:
    make(client, "empty")
    body = {"model": "tiny:empty", "messages": [{"role": "user", "content": QUESTION}]}
    for more in ({}, {"stream": True}):
        response = client.post("/v1/chat/completions", json={**body, **more})
        assert response.status_code == 409
        assert "empty" in response.json()["error"]["message"]
        assert "/" not in response.json()["error"]["message"].replace("(a folder of the server)", "")


def test_a_restart_finds_everything_and_a_backup_is_a_bank(mac_tiny: MACModel, tmp_path: Path) -> None:
    question = {"model": "tiny:kept", "messages": [{"role": "user", "content": QUESTION}]}
    with serving(tmp_path, mac_tiny) as running, running.client() as client:
        place = make(client, "kept", *NEWS)
        make(client, "gone", ("press", PRESS), retriever="none")
        label = client.post(f"{place}/backup").json()["backup"]
        first = client.post("/v1/chat/completions", json=question).json()
        client.delete("/v1/banks/gone").raise_for_status()
        client.delete(f"{place}/document", params={"id": "bridge"}).raise_for_status()
        assert client.post("/v1/banks", json={"name": "kept"}).status_code == 409
    for leftover in (".new-1", ".deleted-2"):
        (tmp_path / "banks" / leftover).mkdir()
    (tmp_path / "banks" / "half").mkdir()
    with serving(tmp_path, mac_tiny) as running, running.client() as client:
        assert [bank["name"] for bank in client.get("/v1/banks").json()["data"]] == ["kept", "half"]
        assert client.get("/v1/banks").json()["data"][1]["state"] == "broken"
        again = client.post("/v1/chat/completions", json=question).json()
        assert again["choices"] == first["choices"]
        assert again["retrieved"] == ["press"]
        assert client.get("/v1/banks/half").status_code == 503
        assert client.post("/v1/banks", json={"name": "half"}).status_code == 409
    assert sorted(path.name for path in (tmp_path / "banks").iterdir()) == ["half", "kept"]
    assert MemoryBank.open(tmp_path / "backups" / label).document_ids == ["press", "bridge"]
    private = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert [path for path in private if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def test_logs_name_changes_and_no_text(mac_tiny: MACModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with serving(tmp_path, mac_tiny) as running, running.client() as client:
        place = make(client, "news", *NEWS)
        body = {"model": "tiny:news", "messages": [{"role": "user", "content": QUESTION}]}
        client.post("/v1/chat/completions", json=body).raise_for_status()
        client.delete(f"{place}/document", params={"id": "press"}).raise_for_status()
        client.get(f"{place}/document", params={"id": "wanted-but-not-there"})
    audit = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [(one["action"], one["bank"]) for one in audit] == [
        ("bank.create", "news"),
        ("documents.put", "news"),
        ("documents.delete", "news"),
    ]
    assert audit[-1]["ids"] == ["press"]
    own = [record.getMessage() for record in caplog.records if record.name.startswith("mac_rag.server")]
    access = [json.loads(line) for line in own if line.startswith("{")]
    assert [one["status"] for one in access] == [201, 200, 200, 200, 404]
    assert access[-1]["route"] == "/v1/banks/{name}/document"
    for secret in ("Rainga", "Flara", "workers", "wanted-but-not-there"):
        assert secret not in "\n".join(own) + (tmp_path / "audit.jsonl").read_text()


@pytest.mark.parametrize(("kind", "left"), [("bm25", ["bridge"]), ("minilm", ["bridge", "press"])])
def test_a_crash_between_retriever_and_commit(
    kind: str, left: list[str], mac_tiny: MACModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BM25 is in the bank's transaction, so nothing is left. Others are on the disk before the bank commits, so what
    the bank's intent names is finished at the next start."""
    catalog = BankCatalog(tmp_path, mac_tiny)
    bank = catalog.create("news", retriever=kind, keep_texts=True)
    bank.put([Document("bridge", BRIDGE)])

    class Killed(BaseException):
        pass

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    retriever = bank.engine.retriever
    save = type(retriever).put

    def put_and_die(self: Any, documents: Any) -> None:
        save(self, documents)
        for name in ("commit", "rollback"):  # the process is gone: nothing is taken back
            monkeypatch.setattr(bank.bank, name, die)
        raise Killed

    monkeypatch.setattr(type(retriever), "put", put_and_die)
    with pytest.raises(Killed):
        bank.put([Document("press", PRESS)])
    monkeypatch.undo()
    bank.bank.close()
    reopened = BankCatalog(tmp_path, mac_tiny).get("news")
    assert sorted(reopened.bank.document_ids) == left
    assert reopened.engine.retriever is not None
    assert reopened.engine.retriever.held(["bridge", "press"]) == left
    assert (tmp_path / "banks" / "news" / "retriever").exists() == (kind != "bm25")
    reopened.put([Document("press", PRESS)])
    assert reopened.engine.answer([QUESTION])[0].text == "180"
    reopened.close()
