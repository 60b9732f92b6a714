"""The server as an ASGI application, which runs until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path
from secrets import token_hex
from typing import Any

import anyio
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from mcp.server.transport_security import TransportSecuritySettings
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mac_rag.batching_queue import OWNER
from mac_rag.errors import MACError
from mac_rag.server import banks, completions, responses
from mac_rag.server.api_errors import APIError, error_of, unexpected
from mac_rag.server.keys import ANYONE, Principal
from mac_rag.server.mcp_tools import make_tools
from mac_rag.server.requests import UNKNOWN, Admin
from mac_rag.server.service import Service
from mac_rag.server.workers import ClientGoneError

_log = logging.getLogger(__name__)
_access = logging.getLogger("mac_rag.server.requests")

# Id of the request that a thread works for; for logs.
REQUEST: ContextVar[str] = ContextVar("REQUEST", default="-")

_HTTP = {
    404: "there is nothing at this path; /openapi.json lists all paths",
    405: "this path does not take this method; /openapi.json lists the methods",
}
_FOLDER = Path(__file__).parent / "page"
_KINDS = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
# Path -> the page's file there.
_PAGE = {
    "/" if file.name == "index.html" else f"/page/{file.name}": file
    for file in sorted(_FOLDER.iterdir())
    if file.suffix in _KINDS
}


@dataclass(frozen=True)
class Access:
    """Who may use a server without a key, and from where.

    Attributes:
        anyone: True to let requests without a key do everything, until the first key is made.
        any_host: True to take such requests from other machines. Otherwise they must come from this one, without a
            proxy, and name the loopback address as their host, against DNS rebinding.
        origins: origins of other sites whose pages may use the server, such as https://app.example.org; `*` for all.
    """

    anyone: bool = False
    any_host: bool = False
    origins: Sequence[str] = ()


_WITH_KEYS = Access()


def make_app(service: Service, access: Access = _WITH_KEYS) -> ASGIApp:
    """Makes the application of a server, which closes the service when it ends."""
    tools = make_tools(service)
    # The gate has already checked host, origin and key.
    security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    agents = tools.streamable_http_app(stateless_http=True, json_response=True, transport_security=security)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with tools.session_manager.run():
            yield
        await anyio.to_thread.run_sync(service.close, _END - _GRACE)

    app = FastAPI(
        title="mac_rag",
        version=version("mac-rag"),
        description="Banks as models, for clients of OpenAI's API; and documents, which become memory.",
        docs_url=None,  # its page loads scripts from another site
        redoc_url=None,
        redirect_slashes=False,  # a path is right or is an error
        lifespan=lifespan,
        responses={
            "4XX": {"model": Fault, "description": "What is wrong with the request, and the remedy."},
            "5XX": {"model": Fault, "description": "The server cannot do this now."},
        },
    )
    _add_errors(app)
    app.include_router(completions.routes(service))
    app.include_router(responses.routes(service))
    app.include_router(banks.routes(service))

    @app.get("/health")
    async def health() -> dict[str, str]:
        """200 as long as the process answers."""
        return {"status": "ok"}

    @app.get("/ready", response_model=None)
    async def ready() -> Response:
        """200 if the server takes questions and documents, 503 if it is closing."""
        return JSONResponse({"status": "ready" if service.ready else "closing"}, 200 if service.ready else 503)

    text = {"content": {"text/plain": {"schema": {"type": "string"}}}}  # errors are JSON, as everywhere

    @app.get("/metrics", response_class=Response, responses={200: text}, response_model=None)
    def metrics(who: Admin) -> Response:
        """Metrics for Prometheus, for a key that sees all banks."""
        if "*" not in who.banks:
            raise APIError(403, "metrics tell of all banks, and this key may not see all; make a key with --bank '*'")
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    for path, file in _PAGE.items():
        app.add_api_route(path, _sending(file), response_model=None, include_in_schema=False)

    app.router.routes.append(Route("/mcp", agents))  # not mounted at /, where it would take all remaining paths
    gate = Gate(app, service, access)
    return (
        CORSMiddleware(
            gate,
            allow_origins=access.origins,
            allow_methods=["GET", "POST", "PATCH", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "Mcp-Session-Id", "Mcp-Protocol-Version"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
        if access.origins
        else gate
    )


class FaultDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Fault(BaseModel):
    """The body of every error."""

    error: FaultDetails


def _sending(file: Path) -> Callable[[], Response]:
    """A function that responds with a file of the page."""
    content = file.read_bytes()
    return lambda: Response(content, media_type=_KINDS[file.suffix])


def _add_errors(app: FastAPI) -> None:
    """Writes every error in the form that clients of OpenAI's API read."""

    def known(error: Any) -> APIError:
        if isinstance(error, HTTPException):
            return APIError(error.status_code, _HTTP.get(error.status_code, str(error.detail)))
        if isinstance(error, RequestValidationError):
            return _invalid(error.errors())
        response = error_of(error)
        if isinstance(error, MACError) and response.status >= 500:  # the gate logs what is no MACError
            _log.error("a request failed: %s: %s", type(error).__name__, error)
        return response

    async def written(_: Request, error: Any) -> Response:
        if isinstance(error, ClientGoneError):
            return Response(status_code=499)  # nobody reads it; the log does
        response, headers = known(error), getattr(error, "headers", None) or {}
        return JSONResponse(response.body, response.status, headers={**response.headers, **headers})

    for kind in (APIError, MACError, ClientGoneError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, written)


# In the location of a fault, FastAPI names the branch of a union like a field: `stop.list[constrained-str]`.
_BRANCH = re.compile(r"str|bool|int|float|none|\[key\]|(constrained-|list\[|dict\[|function-|nullable\[).*")
_WRONG_KIND = {"string_type", "list_type", "bool_type", "none_required", "dict_type"}


def _invalid(errors: Any) -> APIError:
    """The response to the first fault of a request. It does not repeat what the client sent.

    A field that takes several types has a fault for each of them. The one for the type that was sent is chosen.
    """
    place = _place(errors[0])
    of_field = [error for error in errors if _place(error)[: len(place)] == place]
    fault = max(of_field, key=lambda error: (error["type"] not in _WRONG_KIND, len(_place(error))))
    where, what = ".".join(_place(fault)), fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        what = "there is no such field; leave it out"
    if fault["type"] == UNKNOWN:
        name = fault["ctx"]["name"]
        return APIError(400, f"{name}: {what}"[:500], param=name[:200])
    if not where:
        where, what = "the body", "give an object in JSON, with Content-Type: application/json"
    return APIError(400, f"{where}: {what}"[:500], param=where[:200] if _place(fault) else None)


def _place(fault: Any) -> list[str]:
    """The location of a fault: names and indices of fields."""
    parts = [str(part) for part in fault["loc"] if part not in ("body", "query", "path")]
    return [part for part in parts if not _BRANCH.fullmatch(part)]


# The gate in front of every route, also of any that is added later: it wraps the whole ASGI application.

# Paths that need no key, because they reveal nothing about any bank.
PUBLIC = frozenset({"/health", "/ready", *_PAGE})
_HEADER_BYTES = 32 << 10
_AGENT_BYTES = 1 << 20  # the SDK parses a message of MCP in the event loop
_LATER = {"Retry-After": "1"}
_REFUSED_AFTER = 0.5  # seconds before one request too many is refused
_KEYS_BODIES = 4  # keys whose bodies may be as large as those of one key may be at most
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
# What proxies add to a request. A header that begins with x-forwarded counts, too.
_FORWARDING = frozenset(
    b"forwarded via x-real-ip x-client-ip x-cluster-client-ip x-original-host client-ip true-client-ip "
    b"cf-connecting-ip cf-ray fly-client-ip".split()
)
_HEADERS = {
    b"content-security-policy": b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    b"img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"cache-control": b"no-store",
}


class Gate:
    """Checks every request before the application sees it.

    Args:
        app: the application.
        service: the server's keys, limits and metrics.
        access: who may make requests without a key.
    """

    def __init__(self, app: ASGIApp, service: Service, access: Access) -> None:
        self._app = app
        self._service = service
        self._access = access
        self._anyone = access.anyone
        self._rate = RateLimit(service.limits.requests_per_minute)
        self._bodies: Counter[str] = Counter()  # bytes of the bodies that each key is sending, or that are worked on

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{token_hex(12)}"
        REQUEST.set(request_id)
        began, sent = time.perf_counter(), _SecuredSend(send, request_id)
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the server itself leaves the body out
        who: Principal | None = None
        try:
            who = self._admit(scope)
            scope.setdefault("state", {})["principal"] = who
            OWNER.set("" if who is None else who.name)
            with self._bounded(scope, receive, OWNER.get()) as bounded:
                await self._app(scope, bounded, sent)
        except APIError as error:
            if error.code == "rate_limit_exceeded":  # a client that does not wait by itself would take all of the loop
                await asyncio.sleep(_REFUSED_AFTER)
            await _refuse(error, scope, receive, sent)
        except Exception as error:
            _log.exception("a request failed")
            if not sent.status:
                await _refuse(unexpected(error), scope, receive, sent)
        finally:
            seconds = time.perf_counter() - began
            route = str(getattr(scope.get("route"), "path", None) or "none")
            self._service.metrics.request(_method(scope), route, sent.status, seconds)
            record = {"method": _method(scope), "route": route, "status": sent.status, "seconds": round(seconds, 4)}
            peer = (scope.get("client") or (None,))[0]
            who_asked = {"key": None if who is None else who.name, "peer": peer, "request": request_id}
            _access.info(json.dumps({**record, **who_asked}))

    def _admit(self, scope: Scope) -> Principal | None:
        """The principal that makes a request; None for a public path. Raises APIError if the request is refused."""
        if sum(len(name) + len(value) for name, value in scope["headers"]) > _HEADER_BYTES:
            raise APIError(431, f"the headers have more than {_HEADER_BYTES:,} bytes; send fewer or shorter ones")
        length = _only(scope, b"content-length")
        if length is not None and (not length.isdigit() or len(length) > 15):
            raise APIError(400, f"Content-Length is {length!r:.40}; give the number of bytes of the body")
        if length is not None and int(length) > self._largest(scope):
            raise self._too_large(scope)
        if self._anyone and self._service.keys.was_used:
            self._anyone = False
        if self._anyone:
            self._check_peer(scope)
            self._check_site(scope)
        if scope["path"] in PUBLIC:
            return None
        who = self._principal(scope)
        self._rate.take(who.name)
        return who

    def _principal(self, scope: Scope) -> Principal:
        if self._anyone:
            return ANYONE
        scheme, _, token = (_only(scope, b"authorization") or "").partition(" ")
        who = self._service.keys.find(token.strip()) if scheme.lower() == "bearer" and token else None
        if who is None:
            raise APIError(401, "the key is missing or unknown; send Authorization: Bearer KEY", code="invalid_api_key")
        return who

    def _check_peer(self, scope: Scope) -> None:
        """Refuses what comes from another machine, or through a proxy. For a server without keys."""
        if self._access.any_host:
            return
        peer = (scope.get("client") or ("",))[0]
        # nginx adds no header by default, but speaks HTTP/1.0 then, which no program of today does.
        forwarded = scope["http_version"] == "1.0" or any(
            name in _FORWARDING or name.startswith(b"x-forwarded") for name, _ in scope["headers"]
        )
        if forwarded or not is_loopback(peer):
            raise APIError(
                403, "without keys, this server answers this machine alone, and no proxy; make a key", code="not_local"
            )

    def _check_site(self, scope: Scope) -> None:
        """Refuses requests that a page of another site makes a browser send. For a server without keys."""
        host = _only(scope, b"host") or ""
        name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
        if not self._access.any_host and name.lower() not in _LOOPBACK:
            raise APIError(
                403,
                f"without keys, this server answers at localhost, not at {name!r:.80}; use localhost, or make a key",
                code="wrong_host",
            )
        origin, site = _only(scope, b"origin"), _only(scope, b"sec-fetch-site")
        if origin in self._access.origins:
            return
        foreign = origin is not None and origin.lower() != f"{scope['scheme']}://{host.lower()}"
        if foreign or site in ("cross-site", "same-site"):
            raise APIError(
                403, "without keys, this server answers no pages of other sites; make a key", code="cross_site"
            )

    @contextmanager
    def _bounded(self, scope: Scope, receive: Receive, key: str) -> Iterator[Receive]:
        """`receive` with bounds on the body's size, on that of all bodies of the key, and on the time that it takes."""
        limits = self._service.limits
        size, complete = 0, False
        end = asyncio.get_running_loop().time() + limits.body_seconds

        async def bounded() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(
                    408, f"the body took more than {limits.body_seconds:g} s; send it in parts"
                ) from None
            more = len(message.get("body", b""))
            size += more
            self._bodies[key] += more
            if size > self._largest(scope):
                raise HTTPException(413, self._too_large(scope).message)
            if self._bodies[key] > limits.bodies_bytes or self._bodies.total() > _KEYS_BODIES * limits.bodies_bytes:
                raise HTTPException(429, "the server holds too many bytes of other requests; try again", _LATER)
            complete = message["type"] != "http.request" or not message.get("more_body", False)
            return message

        try:
            yield bounded
        finally:
            self._bodies -= Counter({key: size})

    def _largest(self, scope: Scope) -> int:
        """Most bytes of a body."""
        return _AGENT_BYTES if scope["path"] == "/mcp" else self._service.limits.body_bytes

    def _too_large(self, scope: Scope) -> APIError:
        most = self._largest(scope)
        return APIError(413, f"the body has more than {most:,} bytes; send it in parts", code="too_large")


class _SecuredSend:
    """A `send` that adds security headers and the request's id to each response, and notes its status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._own = {**_HEADERS, b"x-request-id": request_id.encode()}
        self.status = 0

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own: Iterable[tuple[bytes, bytes]] = message.get("headers", ())
            kept = [(name, value) for name, value in own if name.lower() not in self._own and name != b"server"]
            message = {**message, "headers": [*kept, *self._own.items()]}
        await self._send(message)


def is_loopback(host: str) -> bool:
    """True for an address of this machine that others cannot reach, and for localhost."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _method(scope: Scope) -> str:
    """The method; OTHER for an unusual one, so that nobody can fill the metrics with names."""
    method = str(scope["method"])
    return method if method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH") else "OTHER"


def _only(scope: Scope, name: bytes) -> str | None:
    """The value of a header; None without it.

    Raises:
        APIError: for a header that comes more than once, which two programs may read in two ways.
    """
    values = [value for key, value in scope["headers"] if key.lower() == name]
    if len(values) > 1:
        raise APIError(400, f"the header {name.decode()} comes {len(values)} times; send it once")
    return values[0].decode("latin-1") if values else None


async def _refuse(error: APIError, scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse(error.body, error.status, headers=dict(error.headers))(scope, receive, send)


class RateLimit:
    """A token bucket for each name: full at first, refilled steadily.

    Examples:
        >>> limit = RateLimit(2, clock=lambda: 0.0)
        >>> limit.take("reader"), limit.take("reader")
        (None, None)
        >>> limit.take("reader")
        Traceback (most recent call last):
        ...
        mac_rag.server.api_errors.APIError: more than 2 requests a minute; try again in 30 s

    Args:
        per_minute: requests a minute for each name; 0 for any number.
        clock: returns the time in seconds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}  # name -> tokens left, and when they were counted

    def take(self, name: str) -> None:
        """Counts a request.

        Raises:
            APIError: 429 if there were too many requests; says when to try again.
        """
        if not self._per_minute:
            return
        now = self._clock()
        left, counted = self._left.get(name, (float(self._per_minute), now))
        left = min(float(self._per_minute), left + (now - counted) * self._per_minute / 60)
        if left < 1:
            self._left[name] = (left, now)
            seconds = math.ceil((1 - left) * 60 / self._per_minute)
            raise APIError(
                429,
                f"more than {self._per_minute} requests a minute; try again in {seconds} s",
                code="rate_limit_exceeded",
                retry_after=seconds,
            )
        self._left[name] = (left - 1, now)


# Seconds after the beginning of the end: when running requests are given up, when connections are closed, and when the
# process ends, whatever still runs. Containers are killed after 10 s.
_GIVE_UP, _GRACE, _END = 5.0, 7, 9.0


class Server(uvicorn.Server):
    """Uvicorn that tells the service when shutdown begins, so that new requests on open connections are refused.

    Args:
        service: the server's banks, keys and threads.
        host, port: the address to listen on; port 0 for a free one.
        access: who may use it without a key.
    """

    def __init__(self, service: Service, *, host: str, port: int, access: Access = _WITH_KEYS) -> None:
        self._service = service
        super().__init__(
            uvicorn.Config(
                make_app(service, access),
                host=host,
                port=port,
                access_log=False,  # its lines would hold what clients send; the gate writes its own log
                log_level="warning",
                proxy_headers=False,
                server_header=False,
                ws="none",
                timeout_keep_alive=15,
                timeout_graceful_shutdown=_GRACE,
                limit_concurrency=1_000,
                h11_max_incomplete_event_size=32 << 10,
                http="h11",
            )
        )

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            _log.info("ready at http://%s:%d/", f"[{host}]" if ":" in host else host, port)

    async def shutdown(self, sockets: Any = None) -> None:
        self._service.refuse_new_work()
        asyncio.get_running_loop().call_later(_GIVE_UP, self._service.give_up)
        await super().shutdown(sockets)


def run(service: Service, *, host: str, port: int, access: Access) -> None:
    """Serves until SIGTERM or Ctrl-C."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(request)s %(message)s"
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(_with_request)
    for noisy in ("httpx", "mcp", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    with returned_memory():
        server = Server(service, host=host, port=port, access=access)
        try:
            server.run()
        finally:
            if not service.close(_END - _GRACE):  # the interpreter would wait for the threads that go on
                logging.shutdown()
                os._exit(1)


def _with_request(record: logging.LogRecord) -> bool:
    """Adds the id of the request to a line of the log."""
    record.request = REQUEST.get()
    return True


_M_ARENA_MAX = -8  # of malloc.h


@contextmanager
def returned_memory(every: float = 10.0) -> Iterator[None]:
    """Within the `with` block, returns freed memory of the process to the system. No effect without glibc.

    Dozens of threads compute in turn, and each batch has tensors of other sizes. glibc gives each thread an arena of
    its own, and memory freed in one arena is of no use to other threads, so all threads share two arenas. glibc also
    returns only the free memory at the end of an arena, so a small object that lasts holds back everything freed before
    it. `malloc_trim` every few seconds returns all free pages within some 10 ms. (Large tensors in mappings of their
    own, by M_MMAP_THRESHOLD, would do it as well, but make answers a fifth slower.)

    Args:
        every: seconds between two calls of `malloc_trim`.
    """
    library = _glibc()
    if library is None:
        yield
        return
    library.mallopt(_M_ARENA_MAX, 2)
    end = threading.Event()

    def give_back() -> None:
        while not end.wait(every):
            library.malloc_trim(0)  # without the interpreter's lock, so other threads run on

    thread = threading.Thread(target=give_back, name="mac-rag-memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _glibc() -> ctypes.CDLL | None:
    """The C library of this process, if it has glibc's functions."""
    with suppress(AttributeError, OSError, TypeError):  # TypeError: on Windows a library must have a name
        library = ctypes.CDLL(None)
        library.mallopt.argtypes, library.malloc_trim.argtypes = [ctypes.c_int, ctypes.c_int], [ctypes.c_size_t]
        return library
    return None
