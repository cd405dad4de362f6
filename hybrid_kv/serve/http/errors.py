"""Every refusal in OpenAI's JSON form."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from hybrid_kv.errors import BusyError, CapacityError, ConfigError, DeviceMemoryError, HybridKVError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_NEVER_AGAIN = {"x-should-retry": "false"}
"""Keeps OpenAI's client from order again what will fail again."""


@dataclass
class ApiError(Exception):
    """A refusal: status, one sentence, the parameter that is wrong and a word for programs."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, usual)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        """The whole answer."""
        # A name that was refused may hold half a character: escaped, it can still be quoted.
        content = json.dumps(self.body, ensure_ascii=True).encode()
        return Response(content, self.status, dict(self.headers), "application/json")


def api_error(error: Exception) -> ApiError:
    """Translates an error of the package for the client; others are 500 and say nothing more."""
    retry_after = getattr(error, "retry_after_s", None)
    if retry_after is not None:
        wait = {"retry-after": str(max(1, math.ceil(retry_after)))}
        return ApiError(429, str(error), code="queue_full", headers=wait)
    match error:
        case ApiError():
            return error
        case DeviceMemoryError() | BusyError():
            return ApiError(503, str(error), code="no_room_now", headers={"retry-after": "5"})
        case CapacityError():
            return ApiError(400, str(error), code="never_fits")
        case ConfigError():
            return ApiError(400, str(error))
        case HybridKVError():
            return ApiError(500, str(error), code="failed", headers=_NEVER_AGAIN)
    message = "an unexpected error ended the request; the server's log has the details"
    return ApiError(500, message, code="internal_error", headers=_NEVER_AGAIN)


def ended_early(reason: str, error: HybridKVError | None) -> ApiError:
    """Of a request that ended without an answer: by an error, out of time, or cancelled."""
    if error is not None:
        return api_error(error)
    if reason == "timeout":
        return ApiError(
            504,
            "the request ran out of time before its first token; shorten the prompt or raise the "
            "server's --timeout",
            code="timeout",
            headers=_NEVER_AGAIN,
        )
    return ApiError(503, "the server is shutting down; ask again later", code="shutting_down")
