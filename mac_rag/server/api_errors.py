"""Errors as clients of OpenAI's API read them: a status, and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from typing import Any

from mac_rag.errors import (
    BankError,
    CancelledError,
    ConfigError,
    DamageError,
    DataError,
    DocumentError,
    FingerprintError,
    FullDiskError,
    InstructionError,
    MACError,
    PromptError,
)

# The message for a fault of the server itself; the log says more.
_OURS = "the server cannot do this now; its log says why"
_PATH = re.compile(r"(?<![\w/])/(?:[^\s/:;,'\"]+/)+[^\s/:;,'\"]*")


class APIError(Exception):
    """The error response to a request.

    Args:
        status: HTTP status.
        message: what is wrong, and the remedy.
        param: name of the field that is wrong.
        code: a short code for programs.
        retry_after: seconds to wait before trying again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers: Mapping[str, str] = {} if retry_after is None else {"Retry-After": str(retry_after)}
        if status == 401:
            self.headers = {"WWW-Authenticate": "Bearer"}

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response."""
        return {"error": {"message": self.message, "type": self._kind, "param": self.param, "code": self.code}}

    @property
    def _kind(self) -> str:
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        return kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")


def no_such_bank(name: str) -> APIError:
    """The error for an unknown bank, and also for one that the key may not see."""
    return APIError(404, f"there is no bank {name!r:.80} that this key may use", code="bank_not_found")


def no_such_model(name: str) -> APIError:
    """The error for an unknown model, and also for one whose bank the key may not see."""
    return APIError(
        404, f"there is no model {name!r:.120} that this key may use", param="model", code="model_not_found"
    )


def closing(what: str) -> APIError:
    """The error for work that comes while a bank or the server is closing; `what` is not done because of it."""
    return APIError(503, f"{what}; try again", code="closing", retry_after=5)


def error_of(error: BaseException) -> APIError:
    """The response to an error. It never holds a path of the server."""
    if isinstance(error, APIError):
        return error
    if not isinstance(error, MACError):
        return unexpected(error)
    message = _PATH.sub("(a folder of the server)", str(error))
    if isinstance(error, FullDiskError):
        return APIError(507, "the server's disk is full, so nothing was changed; try again later", code="disk_full")
    if isinstance(error, CancelledError):
        return closing("the server is closing, so nothing was changed")
    if isinstance(error, DamageError | FingerprintError):
        return APIError(503, _OURS, code="bank_unavailable")
    if isinstance(error, DocumentError | DataError | ConfigError | PromptError | InstructionError):
        return APIError(400, message)
    if isinstance(error, BankError):
        return APIError(409, message, code="bank_refuses")
    return APIError(500, _OURS)


def unexpected(error: BaseException | None = None) -> APIError:
    """The response to an error that is no `MACError`: a full disk, or a fault of the server."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return error_of(FullDiskError(""))
    return APIError(500, _OURS)
