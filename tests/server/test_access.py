"""Keys, scopes, tenants and limits: who may do what, and that nobody learns of what is not theirs."""

from __future__ import annotations

import asyncio
import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from mac_rag.cli.main import app as command
from mac_rag.errors import ConfigError
from mac_rag.model import MACModel
from mac_rag.server.app import PUBLIC, Access, make_app
from mac_rag.server.keys import KeyStore, Principal
from tests.server.conftest import PRESS, QUESTION
from tests.server.helpers import Running, make, serving


@pytest.fixture(scope="module")
def tenants(mac_tiny: MACModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with keys: `root` for everything, `acme` and `initech` for the banks that begin with their names."""
    keys = {"root": ("admin", ["*"]), "acme": ("write", ["acme-*"]), "initech": ("admin", ["initech-*"]),
            "reader": ("read", ["acme-news"])}  # fmt: skip
    with serving(tmp_path_factory.mktemp("tenants"), mac_tiny, keys=keys) as running, running.client("root") as root:
        for name in ("acme-news", "initech-news"):
            make(root, name, (f"{name}-secret", PRESS))
        yield running


def requests_to_bank(name: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Every request that names a bank."""
    chat = {"messages": [{"role": "user", "content": QUESTION}]}
    place = f"/v1/banks/{name}"
    return [
        ("GET", place, {}),
        ("DELETE", place, {}),
        ("PATCH", place, {"json": {"name": "initech-taken"}}),
        ("POST", f"{place}/backup", {}),
        ("POST", f"{place}/compact", {}),
        ("GET", f"{place}/documents", {}),
        ("POST", f"{place}/documents", {"json": {"documents": [{"id": "a", "text": "b"}]}}),
        ("POST", f"{place}/documents/delete", {"json": {"ids": ["a"]}}),
        ("GET", f"{place}/document", {"params": {"id": f"{name}-secret"}}),
        ("DELETE", f"{place}/document", {"params": {"id": f"{name}-secret"}}),
        ("POST", f"{place}/files", {"files": [("f", ("a.txt", b"text"))]}),
        ("POST", f"{place}/search", {"json": {"query": "press"}}),
        ("POST", "/v1/chat/completions", {"json": {"model": f"tiny:{name}", **chat}}),
        ("POST", "/v1/chat/completions", {"json": {"model": "tiny", "bank": name, **chat}}),
        ("POST", "/v1/chat/completions", {"json": {"model": f"tiny:{name}", "stream": True, **chat}}),
        ("POST", "/v1/completions", {"json": {"model": f"tiny:{name}", "prompt": QUESTION}}),
        ("GET", f"/v1/models/tiny:{name}", {}),
    ]


class TestKeys:
    def test_every_route_needs_one(self, tenants: Running) -> None:
        with tenants.client() as nobody, tenants.client("mac_guessed") as guesser, tenants.client("root") as root:
            paths = root.get("/openapi.json").json()["paths"]
            assert len(paths) > 15
            guarded = [(method, path) for path, methods in paths.items() for method in methods if path not in PUBLIC]
            guarded += [("get", "/openapi.json"), ("post", "/mcp"), ("get", "/docs"), ("get", "/nowhere")]
            for method, path in guarded:
                for client in (nobody, guesser):
                    response = client.request(method, re.sub(r"\{.*?\}", "acme-news", path))
                    assert response.status_code == 401, path
                    assert response.json()["error"]["code"] == "invalid_api_key"
                    assert "acme" not in response.text
            for path in PUBLIC:
                assert nobody.get(path).status_code == 200

    def test_scopes(self, tenants: Running) -> None:
        needed = {"GET": "read", "DELETE": "write"}
        for method, path, more in requests_to_bank("acme-news"):
            if path.endswith(("/backup", "/compact")) or (method != "GET" and path == "/v1/banks/acme-news"):
                scope = "admin"
            elif path.endswith(("/documents", "/files", "/delete")) and method == "POST":
                scope = "write"
            else:
                scope = needed.get(method, "read")
            if scope == "read":
                continue
            response = tenants.client("reader").request(method, path, **more)
            assert response.status_code == 403, path
            if scope == "admin":
                assert tenants.client("acme").request(method, path, **more).status_code == 403
        with tenants.client("acme") as writer:
            assert writer.get("/metrics").status_code == 403
            assert writer.post("/v1/banks", json={"name": "acme-more"}).status_code == 403

    def test_a_bank_of_others_is_answered_as_one_that_is_not_there(self, tenants: Running) -> None:
        with tenants.client("initech") as client:
            theirs, absent = requests_to_bank("acme-news"), requests_to_bank("acme-none")
            for (method, path, more), (_, other_path, other_more) in zip(theirs, absent, strict=True):
                found = client.request(method, path, **more)
                missing = client.request(method, other_path, **other_more)
                assert found.status_code == missing.status_code == 404, path
                assert found.text.replace("acme-news", "") == missing.text.replace("acme-none", "")
            assert (
                "acme" not in client.get("/v1/models").text + client.get("/v1/banks").text + client.get("/v1/jobs").text
            )
            # To make a bank under a name of theirs is refused without telling whether it is there.
            for name in ("acme-news", "acme-none"):
                assert client.post("/v1/banks", json={"name": name}).status_code == 403

    def test_jobs_of_others_are_not_there(self, tenants: Running) -> None:
        body = {"documents": [{"id": "job", "text": PRESS}], "wait": False}
        job = tenants.client("acme").post("/v1/banks/acme-news/documents", json=body).json()["id"]
        client = tenants.client("initech")
        for method in ("GET", "DELETE"):
            answer, absent = client.request(method, f"/v1/jobs/{job}"), client.request(method, "/v1/jobs/job-0")
            assert answer.status_code == 404
            assert answer.text == absent.text

    def test_metrics_tell_of_all_banks_so_they_need_a_key_for_all(self, mac_tiny: MACModel, tmp_path: Path) -> None:
        keys = {"all": ("admin", ["*"]), "acme": ("admin", ["acme-*"])}
        with serving(tmp_path, mac_tiny, keys=keys) as running:
            root, tenant = map(running.client, keys)
            for name in ("initech-secret", "acme-news"):
                make(root, name)
            running.service.catalog.unavailable |= {"initech-broken", "acme-broken"}
            assert 'bank="initech-secret"' in root.get("/metrics").text
            assert tenant.get("/metrics").status_code == 403
            listed = {bank["name"]: bank["state"] for bank in tenant.get("/v1/banks").json()["data"]}
            assert listed == {"acme-news": "open", "acme-broken": "broken"}
            for path in ("/ready", "/health", "/v1/models", "/v1/banks", "/v1/jobs"):
                assert "initech" not in tenant.get(path).text

    def test_a_removed_key_ends_at_once_and_the_server_stays_shut(self, mac_tiny: MACModel, tmp_path: Path) -> None:
        store = KeyStore(tmp_path / "keys.json")
        token = store.add("only", "admin", ["*"])
        with serving(tmp_path, mac_tiny) as running, running.client(token) as client:
            assert client.get("/v1/banks").status_code == 200
            store.remove("only")
            assert client.get("/v1/banks").status_code == 401
            (tmp_path / "keys.json").unlink()
            assert client.get("/v1/banks").status_code == 401
        with serving(tmp_path, mac_tiny) as running, running.client() as client:
            assert client.get("/v1/banks").status_code == 401

    def test_no_keys_is_refused_for_a_folder_that_had_some(self, tmp_path: Path) -> None:
        store = KeyStore(tmp_path / "keys.json")
        with pytest.raises(ConfigError, match="no key 'typo'"):
            store.remove("typo")
        assert not store.was_used
        store.add("only", "admin", ["*"])
        store.remove("only")
        result = CliRunner().invoke(command, ["serve", "--data", str(tmp_path), "--no-keys"])
        assert isinstance(result.exception, ConfigError)
        assert "has had keys" in str(result.exception)

    def test_keys_are_hashed_on_disk_and_private(self, tmp_path: Path) -> None:
        store = KeyStore(tmp_path / "keys.json")
        token = store.add("one", "read", ["*"])
        assert token.removeprefix("mac_") not in (tmp_path / "keys.json").read_text()
        assert stat.S_IMODE((tmp_path / "keys.json").stat().st_mode) == 0o600
        assert KeyStore(tmp_path / "keys.json").find(token) == Principal("one", "read", ("*",))
        for wrong in ("", token[:-1], token + "a", token.upper(), "\udcff"):
            assert store.find(wrong) is None
        with pytest.raises(ConfigError, match="already"):
            store.add("one", "read", ["*"])
        for bank in ("../x", "A", ""):
            with pytest.raises(ConfigError, match="names no banks"):
                store.add("two", "read", [bank])

    def test_a_damaged_file_of_keys_lets_nobody_in(self, mac_tiny: MACModel, tmp_path: Path) -> None:
        store = KeyStore(tmp_path / "keys.json")
        token = store.add("one", "admin", ["*"])
        with serving(tmp_path, mac_tiny) as running, running.client(token) as client:
            (tmp_path / "keys.json").write_text("{}")
            assert client.get("/v1/banks").status_code == 500

    def test_the_commands(self, tmp_path: Path) -> None:
        def run(*arguments: str) -> str:
            result = CliRunner().invoke(command, ["key", *arguments, "--data", str(tmp_path)])
            assert result.exit_code == 0, result.output
            return result.stdout.strip()

        token = run("add", "agent", "--scope", "write", "--bank", "news-*", "--bank", "notes")
        assert KeyStore(tmp_path / "keys.json").find(token) == Principal("agent", "write", ("news-*", "notes"))
        assert json.loads(run("list"))["name"] == "agent"
        assert token not in run("list")
        run("remove", "agent")
        assert run("list") == ""

    def test_the_world_is_not_served_without_keys(self, tmp_path: Path) -> None:
        for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
            result = CliRunner().invoke(command, ["serve", "--data", str(tmp_path), "--host", host])
            assert isinstance(result.exception, ConfigError)
            assert "--no-keys" in str(result.exception)


class TestWithoutKeys:
    @pytest.mark.parametrize(
        "headers",
        [
            {"Host": "evil.example"},
            {"Host": "localhost.evil.example:80"},
            {"Host": ""},
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Origin": "http://127.0.0.1:1"},
            {"Sec-Fetch-Site": "cross-site"},
        ],
    )
    def test_pages_of_other_sites_are_refused(self, running: Running, headers: dict[str, str]) -> None:
        assert running.client().get("/v1/banks", headers=headers).status_code == 403
        assert running.client().get("/", headers=headers).status_code == 403

    @pytest.mark.parametrize(
        "name", ["Forwarded", "X-Forwarded-For", "X-Forwarded-Proto", "Via", "X-Real-IP", "CF-Connecting-IP"]
    )
    def test_what_came_through_a_proxy_is_refused(self, running: Running, name: str) -> None:
        """A proxy may say that the host is localhost."""
        for path in ("/", "/v1/banks", "/mcp"):
            response = running.client().get(path, headers={"Host": "localhost", name: "127.0.0.1"})
            assert (response.status_code, response.json()["error"]["code"]) == (403, "not_local")
        # nginx as it is without further settings
        assert raw(running, b"GET /v1/banks HTTP/1.0\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 403")

    @pytest.mark.parametrize(("peer", "status"), [("127.0.0.1", 200), ("::1", 200), ("192.0.2.7", 403), ("", 403)])
    def test_who_is_local_is_told_by_the_connection(self, running: Running, peer: str, status: int) -> None:
        async def asked() -> int:
            app: Any = make_app(running.service, Access(anyone=True))
            there = httpx.ASGITransport(app, client=(peer, 1))
            async with httpx.AsyncClient(transport=there, base_url="http://localhost") as client:
                return (await client.get("/v1/banks")).status_code

        assert asyncio.run(asked()) == status

    def test_its_own_page_is_not(self, running: Running) -> None:
        headers = {"Origin": running.url, "Sec-Fetch-Site": "same-origin"}
        assert running.client().get("/v1/banks", headers=headers).status_code == 200

    def test_sites_that_are_named_may_use_it(self, running: Running) -> None:
        origin = "https://app.example.org"
        preflight = {"Origin": origin, "Access-Control-Request-Method": "POST",
                     "Access-Control-Request-Headers": "authorization, content-type"}  # fmt: skip
        foreign = {"Origin": origin, "Sec-Fetch-Site": "cross-site"}

        async def told(origins: list[str]) -> list[httpx.Response]:
            app: Any = make_app(running.service, Access(anyone=True, origins=origins))
            there = httpx.ASGITransport(app, client=("127.0.0.1", 1))
            async with httpx.AsyncClient(transport=there, base_url="http://localhost") as client:
                return [
                    await client.options("/v1/banks", headers=preflight),
                    await client.get("/v1/banks", headers=foreign),
                ]

        asked, answered = asyncio.run(told([origin]))
        assert asked.headers["access-control-allow-origin"] == origin
        assert "authorization" in asked.headers["access-control-allow-headers"].lower()
        assert (answered.status_code, answered.headers["access-control-allow-origin"]) == (200, origin)
        for response in asyncio.run(told(["https://other.example"])):
            assert "access-control-allow-origin" not in response.headers
        assert response.status_code == 403

    def test_no_other_site_may_read_answers(self, running: Running) -> None:
        response = running.client().get("/v1/banks")
        assert not [name for name in response.headers if name.startswith("access-control")]
        assert response.headers["cross-origin-resource-policy"] == "same-origin"
        preflight = {"Access-Control-Request-Method": "POST", "Origin": running.url}
        assert running.client().options("/v1/banks", headers=preflight).status_code in (404, 405)


def raw(running: Running, request: bytes) -> bytes:
    """What the server answers to these bytes."""
    with running.connected() as connection:
        connection.sendall(request)
        pieces = []
        while piece := connection.recv(65536):
            pieces.append(piece)
        return b"".join(pieces)


class TestHeaders:
    HEAD = b"GET /v1/banks HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"

    def test_a_header_that_comes_twice_is_refused(self, tenants: Running) -> None:
        key = f"Authorization: Bearer {tenants.tokens['root']}\r\n".encode()
        for before, status in ((b"", b"200"), (key, b"400"), (b"Authorization: Basic x\r\n", b"400")):
            assert raw(tenants, self.HEAD + before + key + b"\r\n").startswith(b"HTTP/1.1 " + status)

    @pytest.mark.parametrize(
        "more",
        [
            b"Content-Length: 5\r\nContent-Length: 6\r\n",
            b"Content-Length: -1\r\n",
            b"Content-Length: 1e3\r\n",
            b"X: a\r\n b: c\x00\r\n",
            b"X-Long: " + b"a" * 100_000 + b"\r\n",
            b"no colon\r\n",
        ],
    )
    def test_malformed_headers_are_refused(self, running: Running, more: bytes) -> None:
        answer = raw(running, self.HEAD + more + b"\r\nhello")
        assert answer[9:12] in (b"400", b"431")
        assert running.client().get("/health").status_code == 200

    def test_forwarded_headers_change_nothing(self, tenants: Running) -> None:
        headers = {"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Host": "localhost", "X-Original-URL": "/health"}
        assert tenants.client().get("/v1/banks", headers=headers).status_code == 401

    def test_every_answer_carries_the_policy(self, running: Running) -> None:
        for path in ("/", "/v1/banks", "/nowhere", "/v1/banks/none"):
            headers = running.client().get(path).headers
            assert "default-src 'none'" in headers["content-security-policy"]
            assert "unsafe" not in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            assert "server" not in headers


def test_too_many_requests_wait(mac_tiny: MACModel, tmp_path: Path) -> None:
    with serving(tmp_path, mac_tiny, requests_per_minute=3) as running, running.client() as client:
        answers = [client.get("/v1/banks") for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 20
        assert answers[-1].json()["error"]["code"] == "rate_limit_exceeded"
        assert client.get("/health").status_code == 200
