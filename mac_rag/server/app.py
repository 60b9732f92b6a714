"""The server as an ASGI application, which runs until SIGTERM or Ctrl-C."""

from __future__ import annotations

import ctypes
import logging
import re
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from mcp.server.transport_security import TransportSecuritySettings
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp

from mac_rag.errors import MACError
from mac_rag.server import banks, completions
from mac_rag.server.api_errors import APIError, error_of, unexpected
from mac_rag.server.gate import Gate
from mac_rag.server.mcp_tools import make_tools
from mac_rag.server.requests import Admin
from mac_rag.server.service import Service
from mac_rag.server.workers import ClientGoneError

_log = logging.getLogger(__name__)

_HTTP = {
    404: "there is nothing at this path; /openapi.json lists all paths",
    405: "this path does not take this method; /openapi.json lists the methods",
}
_PAGE = Path(__file__).parent / "page"
_KINDS = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript",
    "style.css": "text/css",
    "icon.svg": "image/svg+xml",
}


def make_app(service: Service, *, anyone: bool = False, any_host: bool = False) -> ASGIApp:
    """Makes the application of a server, which closes the service when it ends.

    Args:
        service: the server's banks, keys and threads.
        anyone: True to let requests without a key do everything, as long as no key exists.
        any_host: see `Gate`.
    """

    tools = make_tools(service)
    # The gate has already checked host, origin and key.
    security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    agents = tools.streamable_http_app(stateless_http=True, json_response=True, transport_security=security)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with tools.session_manager.run():
            yield
        await anyio.to_thread.run_sync(service.close)

    app = FastAPI(
        title="mac_rag",
        version=version("mac-rag"),
        description="Banks as models, for clients of OpenAI's API; and documents, which become memory.",
        docs_url=None,  # its page loads scripts from another site
        redoc_url=None,
        redirect_slashes=False,  # a path is right or is an error
        lifespan=lifespan,
    )
    _add_errors(app)
    app.include_router(completions.routes(service))
    app.include_router(banks.routes(service))

    @app.get("/health")
    def health() -> dict[str, str]:
        """200 as long as the process answers."""
        return {"status": "ok"}

    @app.get("/ready", response_model=None)
    def ready() -> Response:
        """200 if the server takes questions and documents, 503 if it is closing."""
        return JSONResponse({"status": "ready" if service.ready else "closing"}, 200 if service.ready else 503)

    @app.get("/metrics", response_model=None)
    def metrics(_: Admin) -> Response:
        """Metrics for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    pages = {name: (_PAGE / name).read_bytes() for name in _KINDS}

    @app.get("/", response_model=None, include_in_schema=False)
    def page() -> Response:
        return Response(pages["index.html"], media_type=_KINDS["index.html"])

    @app.get("/page/app.js", response_model=None, include_in_schema=False)
    def script() -> Response:
        return Response(pages["app.js"], media_type=_KINDS["app.js"])

    @app.get("/page/style.css", response_model=None, include_in_schema=False)
    def style() -> Response:
        return Response(pages["style.css"], media_type=_KINDS["style.css"])

    @app.get("/page/icon.svg", response_model=None, include_in_schema=False)
    async def icon() -> Response:
        return Response(pages["icon.svg"], media_type=_KINDS["icon.svg"])

    app.router.routes.append(Route("/mcp", agents))  # not mounted at /, where it would take all remaining paths
    return Gate(app, service, anyone=anyone, any_host=any_host)


def _add_errors(app: FastAPI) -> None:
    """Writes every error in the form that clients of OpenAI's API read."""

    def written(error: APIError, headers: Mapping[str, str] | None = None) -> Response:
        return JSONResponse(error.body, error.status, headers={**error.headers, **(headers or {})})

    @app.exception_handler(APIError)
    async def refused(_: Request, error: APIError) -> Response:
        return written(error)

    @app.exception_handler(MACError)
    async def library(_: Request, error: MACError) -> Response:
        response = error_of(error)
        if response.status >= 500:
            _log.error("a request failed: %s: %s", type(error).__name__, error)
        return written(response)

    @app.exception_handler(ClientGoneError)
    async def gone(_: Request, __: ClientGoneError) -> Response:
        return Response(status_code=499)  # nobody reads it; the log does

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        return written(APIError(error.status_code, _HTTP.get(error.status_code, str(error.detail))), error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return written(_invalid(error.errors()))

    @app.exception_handler(Exception)
    async def fault(_: Request, error: Exception) -> Response:
        _log.error("a request failed", exc_info=error)
        return written(unexpected())


# In the location of a fault, FastAPI names the branch of a union like a field: `stop.list[constrained-str]`.
_BRANCH = re.compile(r"str|bool|int|float|none|(constrained-|list\[|dict\[|function-|nullable\[).*")
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
    if not where:
        where, what = "the body", "give an object in JSON, with Content-Type: application/json"
    return APIError(400, f"{where}: {what}"[:500], param=where[:200] if _place(fault) else None)


def _place(fault: Any) -> list[str]:
    """The location of a fault: names and indices of fields."""
    parts = [str(part) for part in fault["loc"] if part not in ("body", "query", "path")]
    return [part for part in parts if not _BRANCH.fullmatch(part)]


# Seconds that running requests have left when the server ends; a question has its own bound.
_GRACE = 90


class Server(uvicorn.Server):
    """Uvicorn that tells the service when shutdown begins, so that new requests on open connections are refused.

    Args:
        service: the server's banks, keys and threads.
        host, port: the address to listen on; port 0 for a free one.
        anyone, any_host: see `make_app`.
    """

    def __init__(self, service: Service, *, host: str, port: int, anyone: bool = False, any_host: bool = False) -> None:
        self._service = service
        super().__init__(
            uvicorn.Config(
                make_app(service, anyone=anyone, any_host=any_host),
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
        await super().shutdown(sockets)


def run(service: Service, *, host: str, port: int, anyone: bool, any_host: bool) -> None:
    """Serves until SIGTERM or Ctrl-C."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for noisy in ("httpx", "mcp", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    with returned_memory():
        server = Server(service, host=host, port=port, anyone=anyone, any_host=any_host)
        try:
            server.run()
        finally:
            service.close()


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
