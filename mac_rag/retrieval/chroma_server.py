"""The connection to a Chroma server: headers that stay secret, time-outs, and retries.

chromadb's own client waits for a server forever, and raises bare exceptions with the text of a proxy. This client uses
chromadb's requests with a session of its own.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx
from chromadb.api.fastapi import FastAPI
from chromadb.api.models.Collection import Collection
from chromadb.config import Settings, System
from chromadb.errors import error_types
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential
from typing_extensions import override

from mac_rag.errors import BankError, ConfigError

TOKEN = "MAC_RAG_CHROMA_TOKEN"  # environment variable

_CONNECT_SECONDS = 10.0
_ATTEMPTS = 4
_FIRST_WAIT = 0.2  # seconds before the second attempt; they double
_UNAVAILABLE = (502, 503, 504)


class ChromaServer:
    """A Chroma server, with the methods of chromadb's client that a `ChromaRetriever` calls.

    Args:
        place: `http://HOST:PORT` or `https://HOST:PORT`.
        headers: sent with each request.
        timeout: most seconds that the server may take to answer.
    """

    def __init__(self, place: str, headers: Mapping[str, str], timeout: float) -> None:
        parts = _split(place)
        settings = Settings(
            chroma_api_impl="chromadb.api.fastapi.FastAPI",
            chroma_server_host=parts.hostname,
            chroma_server_http_port=parts.port,
            chroma_server_ssl_enabled=parts.scheme == "https",
            anonymized_telemetry=False,
        )
        self._requests = _Requests(System(settings), headers, timeout)

    def get_or_create_collection(
        self, name: str, *, metadata: dict[str, Any], configuration: Any, embedding_function: None
    ) -> Collection:
        model = self._requests.get_or_create_collection(name, metadata=metadata, configuration=configuration)
        return Collection(self._requests, model, embedding_function)

    def get_max_batch_size(self) -> int:
        return self._requests.get_max_batch_size()

    def close(self) -> None:
        self._requests._session.close()


class _Requests(FastAPI):
    """chromadb's requests with time-outs, and with retries after a failure of the connection.

    A request of a `ChromaRetriever` can be repeated with the same result, because documents are upserted and deleted by
    id.
    """

    def __init__(self, system: System, headers: Mapping[str, str], timeout: float) -> None:
        super().__init__(system)
        # The headers are not in the settings, because their repr would show them.
        self._session.headers.update(headers)
        self._session.timeout = httpx.Timeout(timeout, connect=min(timeout, _CONNECT_SECONDS))
        self._session.event_hooks = {"response": [_check]}
        self._retrying = Retrying(
            retry=retry_if_exception(_is_passing),
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_exponential(_FIRST_WAIT),
            reraise=True,
        )

    @override  # chromadb insists on the decorator
    def _make_request(self, method: str, path: str, **kwargs: Any) -> Any:
        return self._retrying(super()._make_request, method, path, **kwargs)


def request_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """The headers of all requests: these, and the token in the environment, if there is one.

    Raises:
        ConfigError: for a header that HTTP cannot carry. The message does not contain its value, which is a secret.
    """
    token = os.environ.get(TOKEN)
    values = {} if token is None else {TOKEN: token}
    values |= {f"the header {name!r}": value for name, value in (headers or {}).items()}
    for source, value in values.items():
        if not value or not value.isascii() or not value.isprintable() or value != value.strip():
            raise ConfigError(
                f"{source} is empty, or has line breaks, spaces around it, or characters that are not ASCII; set it to "
                "the value alone"
            )
    return ({} if token is None else {"Authorization": f"Bearer {token}"}) | dict(headers or {})


def collection_name(place: str) -> str:
    """The name of the collection in the address of a server; empty if it has none.

    Raises:
        ConfigError: for a malformed address, or one with a password.
    """
    return _split(place).path.strip("/")


def explained(error: Exception, place: str) -> BankError:
    """The error to raise for a failure of the connection."""
    if isinstance(error, httpx.TimeoutException):
        return BankError(
            f"the Chroma server at {place} did not answer in time; check whether it is overloaded, or allow more time: "
            "ChromaRetriever(timeout=SECONDS)"
        )
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        if status in (401, 403):
            return BankError(
                f"the server at {place} refuses access ({status}); put its token into the environment variable "
                f"{TOKEN}, or give ChromaRetriever(headers=...)"
            )
        return BankError(
            f"the server that answers at {place} with status {status} is not a Chroma server, or cannot reach one; "
            "check the address and the proxy in front of it"
        )
    if _is_certificate(error):
        return BankError(
            f"the certificate of {place} is not trusted; set SSL_CERT_FILE to the file of the authority that issued it"
        )
    return BankError(
        f"no Chroma server answers at {place} ({error}); start one: chroma run --path FOLDER --host HOST --port PORT"
    )


def _split(place: str) -> SplitResult:
    parts = urlsplit(place)
    if "@" in parts.netloc or parts.query or parts.fragment:  # the message does not repeat what may be a password
        raise ConfigError(
            "the address of a Chroma server has a user, a password or a query, which would appear in logs and results; "
            f"write http://HOST:PORT, and put a token into the environment variable {TOKEN}"
        )
    try:
        is_complete = bool(parts.hostname) and parts.port is not None
    except ValueError:
        is_complete = False
    if not is_complete:
        raise ConfigError(
            f"{place!r} is not the address of a Chroma server; write http://HOST:PORT or http://HOST:PORT/NAME"
        )
    return parts


def _check(response: httpx.Response) -> None:
    """Raises an `HTTPStatusError` for an error that is not Chroma's own; chromadb would raise a bare exception."""
    if response.is_success:
        return
    response.read()
    try:
        body = response.json()
    except ValueError:
        body = None
    if not (isinstance(body, dict) and body.get("error") in error_types) or response.status_code in _UNAVAILABLE:
        response.raise_for_status()


def _is_passing(error: BaseException) -> bool:
    """True if the same request may succeed a moment later."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in _UNAVAILABLE
    return isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError) and not _is_certificate(error)


def _is_certificate(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error is not None
