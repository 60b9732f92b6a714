"""The gate in front of every route: checks key, size and rate of requests, and adds headers to responses.

It wraps the whole ASGI application, so it also guards any route that is added later.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mac_rag.server.api_errors import APIError, unexpected
from mac_rag.server.keys import ANYONE, Principal
from mac_rag.server.service import Service

_access = logging.getLogger("mac_rag.server.requests")
_log = logging.getLogger(__name__)

# Paths that need no key, because they reveal nothing about any bank.
PUBLIC = frozenset({"/health", "/ready", "/", "/page/app.js", "/page/style.css", "/page/icon.svg"})
_HEADER_BYTES = 32 << 10
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
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
        anyone: True to let requests without a key do everything, until the first key is made.
        any_host: True to take any `Host` header of such requests. Otherwise it must name the loopback address, so that
            a page of another site cannot reach the server under a domain name of its own (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, service: Service, *, anyone: bool, any_host: bool) -> None:
        self._app = app
        self._service = service
        self._anyone = anyone
        self._any_host = any_host
        self._rate = RateLimit(service.limits.requests_per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, sent = time.perf_counter(), _SecuredSend(send)
        who: Principal | None = None
        try:
            who = self._admit(scope)
            scope.setdefault("state", {})["principal"] = who
            await self._app(scope, self._bounded(receive), sent)
        except APIError as error:
            await _refuse(error, scope, receive, sent)
        except Exception:
            _log.exception("a request failed")
            if not sent.status:
                await _refuse(unexpected(), scope, receive, sent)
        finally:
            seconds = time.perf_counter() - began
            route = str(getattr(scope.get("route"), "path", None) or "none")
            self._service.metrics.request(_method(scope), route, sent.status, seconds)
            record = {"method": _method(scope), "route": route, "status": sent.status, "seconds": round(seconds, 4)}
            _access.info(json.dumps({**record, "key": None if who is None else who.name}))

    def _admit(self, scope: Scope) -> Principal | None:
        """The principal that makes a request; None for a public path.

        Raises:
            APIError: if the request is refused.
        """
        if sum(len(name) + len(value) for name, value in scope["headers"]) > _HEADER_BYTES:
            raise APIError(431, f"the headers have more than {_HEADER_BYTES:,} bytes; send fewer or shorter ones")
        length = _only(scope, b"content-length")
        if length is not None and (not length.isdigit() or len(length) > 15):
            raise APIError(400, f"Content-Length is {length!r:.40}; give the number of bytes of the body")
        if length is not None and int(length) > self._service.limits.body_bytes:
            raise self._too_large()
        if self._service.keys:
            self._anyone = False  # for good, even if all keys are removed later
        if self._anyone:
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

    def _check_site(self, scope: Scope) -> None:
        """Refuses requests that a page of another site makes a browser send. For a server without keys."""
        host = _only(scope, b"host") or ""
        name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
        if not self._any_host and name.lower() not in _LOOPBACK:
            raise APIError(
                403,
                f"without keys, this server answers at localhost, not at {name!r:.80}; use localhost, or make a key",
                code="wrong_host",
            )
        origin, site = _only(scope, b"origin"), _only(scope, b"sec-fetch-site")
        foreign = origin is not None and origin.lower() != f"{scope['scheme']}://{host.lower()}"
        if foreign or site in ("cross-site", "same-site"):
            raise APIError(
                403, "without keys, this server answers no pages of other sites; make a key", code="cross_site"
            )

    def _bounded(self, receive: Receive) -> Receive:
        """`receive` with bounds on the body's size and on the time that it takes."""
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
            size += len(message.get("body", b""))
            if size > limits.body_bytes:
                raise HTTPException(413, self._too_large().message)
            complete = message["type"] != "http.request" or not message.get("more_body", False)
            return message

        return bounded

    def _too_large(self) -> APIError:
        most = self._service.limits.body_bytes
        return APIError(413, f"the body has more than {most:,} bytes; send it in parts", code="too_large")


class _SecuredSend:
    """A `send` that adds security headers to each response and notes its status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own: Iterable[tuple[bytes, bytes]] = message.get("headers", ())
            kept = [(name, value) for name, value in own if name.lower() not in _HEADERS and name != b"server"]
            message = {**message, "headers": [*kept, *_HEADERS.items()]}
        await self._send(message)


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
