"""A Chroma server behind a proxy with tokens and TLS, one that fails, and one that others change meanwhile."""

from __future__ import annotations

import logging
import signal
import socket
import ssl
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
import trustme

from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, ConfigError, MACError
from mac_rag.memory import MemoryBank
from mac_rag.model import MACModel
from mac_rag.retrieval import chroma_server
from mac_rag.retrieval.chroma import ChromaRetriever
from mac_rag.sync import difference
from tests.retrieval.helpers import Proxy, Server, WordEncoder, documents

SECRET = "s3cr3t-of-the-proxy"
BEARER = {"Authorization": f"Bearer {SECRET}"}
VARIABLE = "MAC_RAG_CHROMA_TOKEN"


@pytest.fixture
def authority(tmp_path: Path) -> tuple[ssl.SSLContext, Path]:
    """The context of an HTTPS server on localhost, and the file of the authority that vouches for it."""
    own = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    own.issue_cert("localhost").configure_cert(context)
    own.cert_pem.write_to_path(tmp_path / "authority.pem")
    return context, tmp_path / "authority.pem"


def test_a_token_and_a_private_authority(
    server: Server,
    authority: tuple[ssl.SSLContext, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Everything works through the proxy, and the token appears nowhere."""
    context, file = authority
    caplog.set_level(logging.DEBUG)
    said: list[str] = []
    with Proxy(server.port, BEARER, context) as proxy:
        place = f"{proxy.url}/behind"
        monkeypatch.setenv(VARIABLE, SECRET)
        said.append(refused(place, r"certificate of .* is not trusted; set SSL_CERT_FILE"))
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
        chroma = ChromaRetriever(place, WordEncoder())
        chroma.put(documents("one storm", "two"))
        chroma.delete("d1")
        assert [hit.document_id for hit in chroma.retrieve(["storm"], 3, allowed={"d0"})[0]] == ["d0"]
        assert len(ChromaRetriever(f"{server.url}/behind", WordEncoder())) == 1
        said += [repr(chroma), str(vars(chroma)), repr(chroma._client), *proxy.forwarded]
        monkeypatch.setenv(VARIABLE, f"not-{SECRET}")
        said.append(refused(place, rf"refuses access \(401\); put its token into .*{VARIABLE}"))
        monkeypatch.delenv(VARIABLE)
        said.append(refused(place, r"refuses access \(401\)"))
        monkeypatch.setenv(VARIABLE, "another")
        assert len(ChromaRetriever(place, WordEncoder(), headers=BEARER)) == 1  # headers win over the environment
        proxy.failures = [500]
        with pytest.raises(BankError, match="with status 500 is not a Chroma server") as error:
            len(chroma)
        said.append("".join(traceback.format_exception(error.value)))
    said.append(refused(place, "no Chroma server answers at https://localhost", headers=BEARER))
    said += [caplog.text, *capfd.readouterr()]
    assert not [text for text in said if SECRET in text]


def refused(place: str, message: str, **options: Any) -> str:
    """The traceback of a retriever that cannot be made."""
    with pytest.raises(MACError, match=message) as error:
        ChromaRetriever(place, WordEncoder(), **options)
    return "".join(traceback.format_exception(error.value))


@pytest.mark.parametrize(
    "place",
    [
        f"http://user:{SECRET}@localhost:8000",
        f"https://{SECRET}@localhost:8000/name",
        f"http://user:{SECRET}@localhost:port",
        f"http://user:{SECRET}@localhost",
        f"http://localhost:8000/name?token={SECRET}",
        f"http://localhost:8000/name#{SECRET}",
    ],
)
def test_a_password_in_an_address_is_refused_and_not_repeated(place: str) -> None:
    said = refused(place, f"has a user, a password or a query.*{VARIABLE}")
    assert SECRET not in said


@pytest.mark.parametrize("token", ["", f"{SECRET}\n", f"{SECRET}\r\nX-Admin: 1", f" {SECRET}", f"{SECRET}é"])
def test_a_token_http_cannot_carry_is_refused_and_not_repeated(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, token)
    assert SECRET not in refused("http://localhost:1", f"{VARIABLE} is empty, or has line breaks")
    monkeypatch.delenv(VARIABLE)
    assert SECRET not in refused("http://localhost:1", "the header 'X-Key' is", headers={"X-Key": token or " "})


def test_failures_of_the_connection_pass(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chroma_server, "_FIRST_WAIT", 0.01)
    with Proxy(server.port, {}) as proxy:
        chroma = ChromaRetriever(f"{proxy.url}/passing", WordEncoder())
        proxy.failures = [503, None, 502]
        chroma.put(documents("one", "two"))
        proxy.failures = [504, None]
        assert [hit.document_id for hit in chroma.retrieve(["two"], 1)[0]] == ["d1"]
        proxy.failures = [None, 503]
        chroma.delete("d0")
        assert list(chroma.content_hashes()) == ["d1"]
        proxy.failures = [503] * 50
        with pytest.raises(BankError, match="with status 503"):
            chroma.put(documents("never"))
        assert 0 < len(proxy.failures) < 50  # a few attempts, and not for ever
        proxy.failures = [429]
        with pytest.raises(BankError, match="with status 429"):
            len(chroma)
        assert proxy.failures == []


@pytest.mark.parametrize("after", ["at once", "later"])
def test_a_server_that_takes_requests_and_never_answers(server: Server, after: str) -> None:
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        held: list[socket.socket] = []

        def accept() -> None:
            while not done.is_set():
                try:
                    held.append(silent.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        # An implementation without a time-out would be told that the server is gone, and not that it is slow.
        threading.Timer(20, lambda: [one.close() for one in held]).start()
        if after == "at once":
            with pytest.raises(BankError, match="did not answer in time; check whether it is overloaded"):
                ChromaRetriever(f"http://127.0.0.1:{port}", WordEncoder(), timeout=0.3)
        else:
            chroma = ChromaRetriever(f"{server.url}/slow", WordEncoder())
            chroma._client._requests._session.timeout = 0.3
            chroma._client._requests._api_url = f"http://127.0.0.1:{port}/api/v2"
            with pytest.raises(BankError, match="did not answer in time"):
                chroma.put(documents("one"))
        done.set()
        silent.shutdown(socket.SHUT_RDWR)


@pytest.mark.long
def test_a_server_killed_in_the_middle_of_adapting_loses_nothing(tiny_model: MACModel, tmp_path: Path) -> None:
    """Between two upserts; the same call completes it, whichever process makes it."""
    everything = [Document(f"d{number}", f"A storm hit town number {number}.") for number in range(9)]
    with Server(tmp_path / "chroma") as server:
        chroma = ChromaRetriever(server.url, WordEncoder(), batch_bytes=3000)
        bank = MemoryBank.create(tmp_path / "bank", tiny_model.fingerprint)
        engine = MACEngine(tiny_model, bank, retriever=chroma)
        engine.adapt(everything[:2])
        upsert, calls = chroma._collection.upsert, []

        def killing(**request: Any) -> None:
            if len(calls) == 1:
                server.process.send_signal(signal.SIGKILL)
                server.process.wait()
            calls.append(len(request["ids"]))
            upsert(**request)

        chroma._collection.upsert = killing
        with pytest.raises(BankError, match="no Chroma server answers"):
            engine.adapt(everything)
        assert len(calls) == 2
        assert 0 < calls[0] < 7
        bank.close()
        server.start()
        kept = ChromaRetriever(server.url, WordEncoder())
        assert len(kept) == 2 + calls[0]  # what was taken in before the kill
        again = MACEngine(tiny_model, MemoryBank.open(tmp_path / "bank", write=True), retriever=kept)
        report = again.adapt(everything)
        assert report.added + report.unchanged == 9
        assert not difference(again.bank, kept)
        assert sorted(kept.content_hashes()) == sorted(again.bank.document_ids) == [one.id for one in everything]
        again.bank.close()


def test_pages_miss_nothing_while_another_client_writes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mac_rag.retrieval.chroma._IDS", 3)
    ours = ChromaRetriever(f"{server.url}/shared", WordEncoder())
    theirs = ChromaRetriever(f"{server.url}/shared", WordEncoder())
    ours.put(documents(*(f"text {number}" for number in range(12))))
    get, pages = ours._get, []

    def changing(**options: Any) -> Any:
        """After the first page, another client deletes what was on it, and adds a document."""
        result = get(**options)
        if options["include"]:
            pages.append(result["ids"])
            if len(pages) == 1:
                for name in result["ids"]:
                    theirs.delete(name)
                theirs.put([Document("a", "new")])
        return result

    monkeypatch.setattr(ours, "_get", changing)
    names = [f"d{number}" for number in range(12)]
    assert sorted(ours.content_hashes()) == sorted(names)  # as they were when it began
    assert len(pages) == 4
    pages.clear()
    held = set(theirs.content_hashes()) & set(names)
    assert len(held) == 9
    hits = ours.retrieve(["text"], 99, allowed=names)[0]  # meanwhile three more are deleted
    assert {hit.document_id for hit in hits} == held
    assert len(theirs) == 1 + 6


def test_no_token_is_sent_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "bad\ntoken")
    ChromaRetriever(tmp_path, WordEncoder()).put(documents("one"))
    with pytest.raises(ConfigError, match="headers are for a server"):
        ChromaRetriever(tmp_path, WordEncoder(), headers=BEARER)
