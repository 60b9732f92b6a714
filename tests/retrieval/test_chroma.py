"""Chroma in a folder and on a real server, behind a proxy, failing and killed: it keeps and finds what it may."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sqlite3
import ssl
import stat
import subprocess
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_rag.bank import MemoryBank
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, ConfigError, DocumentError, FingerprintError, MACError
from mac_rag.model import MACModel
from mac_rag.retrieval import DenseRetriever, make_retriever
from mac_rag.retrieval import chroma as chroma_module
from mac_rag.retrieval.chroma import ChromaRetriever
from mac_rag.sync import difference
from tests.helpers import DEEP, DIGITS
from tests.retrieval.helpers import Proxy, Server, WordEncoder, documents

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
DOCUMENTS = st.lists(
    st.builds(Document, TEXTS.map("id {}".format), TEXTS, st.dictionaries(TEXTS, JSON, max_size=2)),
    max_size=4,
    unique_by=lambda document: document.id,
)


@pytest.fixture(params=["folder", "server"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new and empty place: a folder, or a collection of a server."""
    if request.param == "folder":
        return str(tmp_path / "chroma")
    return f"{request.getfixturevalue('server').url}/{tmp_path.name}"


def test_it_ranks_as_an_exact_search_but_for_a_few(place: str) -> None:
    rng = np.random.default_rng(0)
    words = [f"w{index}" for index in range(60)]
    texts = [" ".join(rng.choice(words, 8)) for _ in range(300)]
    chroma, exact = ChromaRetriever(place, WordEncoder()), DenseRetriever(WordEncoder())
    for retriever in (chroma, exact):
        retriever.add(documents(*texts))
    allowed = {f"d{index}" for index in range(0, 300, 7)}
    questions = [" ".join(rng.choice(words, 3)) for _ in range(20)]
    missed = 0
    for which in (None, allowed):
        for found, right in zip(
            chroma.retrieve(questions, 5, allowed=which), exact.retrieve(questions, 300, allowed=which)
        ):
            score_of = {hit.document_id: hit.score for hit in right}
            scores = [hit.score for hit in found]
            assert scores == sorted(scores, reverse=True)
            assert scores == pytest.approx([score_of[hit.document_id] for hit in found])
            best = Counter(round(hit.score) for hit in right[:5])
            missed += (best - Counter(map(round, scores))).total()
            assert which is None or all(hit.document_id in which for hit in found)
            for hit in found:
                place_of = int(hit.document_id[1:])
                assert (hit.text, hit.metadata) == (texts[place_of], {"place": place_of})
    assert missed <= 4  # of 200: the graph that Chroma builds in several threads can hide a document


def test_documents_come_and_change_and_go(place: str) -> None:
    chroma = ChromaRetriever(place, WordEncoder())
    first, second, third = documents("one", "two", "three")
    chroma.add([first, second])
    changed = Document("d1", "two and more", {"deep": [1, {"x": None}], "float": 0.1})
    chroma.put([changed, third])
    assert len(chroma) == 3
    assert chroma.documents(["d2", "d1"]) == [third, changed]
    [[hit]] = chroma.retrieve(["two and more"], 1)
    assert (hit.document_id, hit.text, hit.metadata) == ("d1", changed.text, changed.metadata)
    chroma.delete("d0")
    assert len(chroma) == 2
    assert "d0" not in chroma
    assert all(hit.document_id != "d0" for hit in chroma.retrieve(["one"], 3)[0])
    assert list(chroma.content_hashes()) == ["d1", "d2"]
    assert chroma.content_hashes(["d0", "d2"]).keys() == {"d2"}


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda chroma: chroma.put([Document("x", "1"), Document("x", "2")]), "'x' comes 2 times"),
        (lambda chroma: chroma.put([Document("new", "1"), Document("", "2")]), "no visible character"),
        (lambda chroma: chroma.put([Document("new", "1"), Document("x", "\ud800")]), "index 0 is U\\+D800"),
        (lambda chroma: chroma.put([Document("new", "1"), Document("x", "2", {"a": {1}})]), "cannot be kept as JSON"),
        (lambda chroma: chroma.documents(["d0", "nothing"]), "no document 'nothing'"),
    ],
)
def test_refusals_change_nothing(tmp_path: Path, act: Callable[[ChromaRetriever], object], message: str) -> None:
    chroma = ChromaRetriever(tmp_path, WordEncoder())
    chroma.add(documents("one"))
    with pytest.raises((BankError, DocumentError), match=message):
        act(chroma)
    assert chroma.documents(list(chroma.content_hashes())) == documents("one")


@pytest.fixture(scope="module")
def reused(tmp_path_factory: pytest.TempPathFactory) -> ChromaRetriever:
    return ChromaRetriever(tmp_path_factory.mktemp("reused"), WordEncoder())


@settings(max_examples=15, deadline=None)
@given(given_documents=DOCUMENTS)
def test_everything_comes_back_as_it_was(reused: ChromaRetriever, given_documents: list[Document]) -> None:
    for name in reused.content_hashes():
        reused.delete(name)
    reused.put(given_documents)
    ids = [document.id for document in given_documents]
    assert reused.documents(ids) == given_documents
    others = DenseRetriever(WordEncoder())
    others.add(given_documents)
    assert reused.content_hashes() == others.content_hashes()
    assert all(name in reused for name in ids)


@pytest.mark.slow
def test_large_batches_are_cut_to_what_chroma_takes(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chroma = ChromaRetriever(place, WordEncoder())
    many = [Document(f"d{index}", f"w{index % 97}") for index in range(5471)]
    chroma.put(many)
    assert len(chroma) == len(many)
    assert chroma.documents([document.id for document in many]) == many
    assert len(chroma.content_hashes()) == len(many)
    [hits] = chroma.retrieve(["w5"], 3, allowed={"d5", "d6", "d5340"})  # 5 and 5340 have the same text
    assert [hit.document_id for hit in hits][:2] == ["d5", "d5340"]
    monkeypatch.setattr("mac_rag.retrieval.chroma._BATCH_BYTES", 10_000)
    wide = [Document(f"w{index}", "long " * 1000) for index in range(5)]
    chroma.put(wide)
    assert chroma.documents([document.id for document in wide]) == wide


def test_another_encoder_is_refused(place: str) -> None:
    ChromaRetriever(place, WordEncoder()).add(documents("one"))
    with pytest.raises(FingerprintError, match="made by the encoder 'words', not by 'other'"):
        ChromaRetriever(place, WordEncoder("other"))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"metadata": DEEP}, "nested more than 64 deep"),
        ({"metadata": f'{{"a": {DIGITS}}}'}, "a number of 5,000 digits"),
        ({"metadata": "[]"}, "not a JSON object"),
        ({"metadata": 1}, "it has no metadata"),
    ],
)
def test_metadata_that_another_program_wrote_is_named(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    retriever = ChromaRetriever(tmp_path / "chroma", WordEncoder())
    retriever.add([Document("d", "the harbour")])
    retriever._collection.update(ids=["d"], metadatas=[record])
    for act in (
        lambda: retriever.retrieve(["harbour"], 1),
        lambda: retriever.retrieve(["harbour"], 1, allowed={"d"}),
        lambda: retriever.documents(["d"]),
    ):
        with pytest.raises(BankError, match=rf"document 'd' in .*chroma was not written by mac_rag: .*{message}"):
            act()
    retriever.delete("d")
    retriever.add([Document("d", "the harbour")])
    assert retriever.documents(["d"]) == [Document("d", "the harbour")]


def test_a_foreign_collection_is_refused(server: Server) -> None:
    server.client().create_collection("foreign", embedding_function=None)
    with pytest.raises(ConfigError, match=r"'foreign' in .* was not made by mac_rag"):
        ChromaRetriever(f"{server.url}/foreign", WordEncoder())
    with pytest.raises(BankError, match="Chroma refuses"):
        ChromaRetriever(f"{server.url}/a", WordEncoder())


@pytest.mark.parametrize("address", ["http://", "http://localhost", "https://:80", "http://localhost:port"])
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"is not the address of a Chroma server; write http://HOST:PORT"):
        ChromaRetriever(address, WordEncoder())


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(BankError, match=r"no Chroma server answers at http://127.0.0.1:1 .*chroma run --path"):
        ChromaRetriever("http://127.0.0.1:1", WordEncoder())


def test_a_folder_is_open_in_one_process_at_a_time(tmp_path: Path) -> None:
    script = """
import sys
from mac_rag.errors import BankError
from mac_rag.retrieval.chroma import ChromaRetriever
from tests.retrieval.helpers import WordEncoder, documents
for _ in sys.stdin:
    try:
        ChromaRetriever(sys.argv[1], WordEncoder()).put(documents("from there"))
        print("done", flush=True)
    except BankError as error:
        print(error, flush=True)
"""
    chroma = ChromaRetriever(tmp_path, WordEncoder())
    chroma.put(documents("from here"))
    with subprocess.Popen(
        [sys.executable, "-c", script, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as other:

        def there() -> str:
            print("go", file=other.stdin)
            return other.stdout.readline()

        assert "is open in another process" in there()
        assert chroma.documents(["d0"])[0].text == "from here"
        chroma.close()
        assert there() == "done\n"
        other.stdin.close()
    again = ChromaRetriever(tmp_path, WordEncoder())
    assert again.documents(["d0"])[0].text == "from there"


def test_by_name(server: Server, tmp_path: Path) -> None:
    for spec in (f"chroma:{tmp_path / 'folder'}", f"chroma:{server.url}"):
        chroma = make_retriever(spec)
        assert isinstance(chroma, ChromaRetriever)
        chroma.put(documents("A storm hit the coast.", "Cats and dogs."))
        assert [hits[0].document_id for hits in chroma.retrieve(["hurricane", "pets"], 1)] == ["d0", "d1"]
        again = make_retriever(spec)
        assert len(again) == 2
    with pytest.raises(ConfigError, match="unknown retriever 'chroma:'"):
        make_retriever("chroma:")


@pytest.mark.parametrize("where", ["folder", "server"])
def test_no_embedding_function_of_a_collection_is_built(
    where: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """chromadb builds what a schema names, and a sentence encoder may run the code of its model's folder."""
    from chromadb.utils.embedding_functions.sentence_transformer_embedding_function import (
        SentenceTransformerEmbeddingFunction as Function,
    )

    built: list[dict[str, Any]] = []
    monkeypatch.setattr(Function, "build_from_config", staticmethod(built.append))
    encoder = {"model_name": "m", "device": "cpu", "normalize_embeddings": False, "kwargs": {"trust_remote_code": True}}
    function = {"type": "known", "name": "sentence_transformer", "config": encoder}
    if where == "folder":
        place = str(tmp_path / "chroma")
        ChromaRetriever(place, WordEncoder()).close()
        with closing(sqlite3.connect(f"{place}/chroma.sqlite3")) as database, database:
            [(schema,)] = database.execute("select schema_str from collections")
            hostile = schema.replace('{"type":"legacy"}', json.dumps(function))
            assert hostile != schema
            database.execute("update collections set schema_str = ?", (hostile,))
    else:
        url = request.getfixturevalue("server").url
        place = f"{url}/hostile"
        collection = {"name": "hostile", "configuration": {"embedding_function": function}}
        path = "api/v2/tenants/default_tenant/databases/default_database/collections"
        httpx.post(f"{url}/{path}", json=collection).raise_for_status()
    with pytest.raises(ConfigError, match=r"embedding function \(sentence_transformer\), which chromadb would build"):
        ChromaRetriever(place, WordEncoder())
    assert not built
    monkeypatch.setattr("mac_rag.retrieval.chroma._check_schema", lambda *_: None)
    with contextlib.suppress(ConfigError):  # the one of the server was not made by mac_rag
        ChromaRetriever(place, WordEncoder()).add(documents("one"))
        assert built  # what the check is for


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")
def test_files_in_a_folder_are_private(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        retriever = ChromaRetriever(tmp_path / "chroma", WordEncoder())
        retriever.add(documents("one", "two"))
        retriever.retrieve(["one"], 1)  # makes the files of the graph
        retriever.close()
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "chroma", *(tmp_path / "chroma").rglob("*"))}
    assert modes == {0o700, 0o600}


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
    monkeypatch.setattr(chroma_module, "_FIRST_WAIT", 0.01)
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
def test_a_server_killed_in_the_middle_of_adapting_loses_nothing(
    tiny_model: MACModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two upserts; the same call completes it, whichever process makes it."""
    everything = [Document(f"d{number}", f"A storm hit town number {number}.") for number in range(9)]
    with Server(tmp_path / "chroma") as server:
        monkeypatch.setattr(chroma_module, "_BATCH_BYTES", 3000)
        chroma = ChromaRetriever(server.url, WordEncoder())
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
