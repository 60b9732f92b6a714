"""What a route asks of whoever uses it: `Reader`, `Writer` or `Admin` in its signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeAlias

from fastapi import Depends, Request

from mac_rag.server.api_errors import APIError
from mac_rag.server.keys import Principal, Scope


def needs(scope: Scope) -> Callable[[Request], Principal]:
    """A dependency that gives whoever makes the request, and refuses a key without this scope."""

    def principal(request: Request) -> Principal:
        who: Principal | None = request.state.principal
        if who is None:
            raise APIError(401, "give a key: Authorization: Bearer KEY", code="invalid_api_key")
        if not who.may(scope):
            raise APIError(403, f"this needs a key with the scope {scope}, and this one has {who.scope}")
        return who

    return principal


Reader: TypeAlias = Annotated[Principal, Depends(needs("read"))]
Writer: TypeAlias = Annotated[Principal, Depends(needs("write"))]
Admin: TypeAlias = Annotated[Principal, Depends(needs("admin"))]
