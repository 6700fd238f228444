"""What clients read when a request cannot be served: OpenAI's error shape, so that their libraries understand it."""

import json
from collections.abc import Mapping, Sequence

from starlette.responses import JSONResponse, Response

RETRY_AFTER_S = 5
"""A small model is up again after a few seconds; a client that asks more often than this only costs."""


class GatewayError(Exception):
    """A request that ends in an error of ours; the text is one sentence for the client.

    GatewayError
     ├─ BadRequestError        400, 404, 405, 413: the client's to correct
     ├─ UnknownModelError      404: no model has that name
     ├─ NotReadyError          503: known, or perhaps known, but nothing can answer now
     ├─ BarredError            503: known, and only an operator can bring it back
     └─ UpstreamError          502, 504: the replicas could not be reached or broke off
         └─ UnreachableError   502: no connection came about, so that nothing was sent
    """

    kind = "server_error"

    def __init__(self, status: int, code: str, sentence: str, *, param: str | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.code = code
        self.param = param
        self.headers: dict[str, str] = {}

    def body(self) -> dict[str, object]:
        """The error as OpenAI's API words it."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The error as an answer."""
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)

    def event(self) -> bytes:
        """The error as a server-sent event, for a stream that is already under way.

        It begins with a blank line: what was relayed before may have stopped in the middle of an event.
        """
        return b"\n\ndata: " + json.dumps(self.body()).encode() + b"\n\n"


class BadRequestError(GatewayError):
    """The request itself is wrong."""

    kind = "invalid_request_error"


class UnknownModelError(GatewayError):
    """No model has that name."""

    kind = "invalid_request_error"

    def __init__(self, model: str, known: Sequence[str]) -> None:
        there_are = ", ".join(known) or "none"
        super().__init__(
            404, "model_not_found", f"no model is named {model[:250]}; there are: {there_are}", param="model"
        )


class NotReadyError(GatewayError):
    """Nothing can answer now; trying again later can help."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(503, code, sentence)
        self.headers = {"Retry-After": str(RETRY_AFTER_S)}


class BarredError(GatewayError):
    """Nothing answers, and no request can change that: it is refused at once, and asks nobody to come back soon."""

    def __init__(self, model: str, why: str) -> None:
        super().__init__(503, "model_barred", f"{model} cannot answer: {why}")


class UpstreamError(GatewayError):
    """The replicas could not be reached, or one broke off."""


class UnreachableError(UpstreamError):
    """No replica could be connected to; the request has reached none of them."""

    def __init__(self, model: str, tried: int) -> None:
        super().__init__(
            502,
            "upstream_unreachable",
            f"none of the {tried} replicas of {model} can be reached: try again in a few seconds",
        )


def http_error(status: int, detail: str, headers: Mapping[str, str] | None) -> Response:
    """An error of the HTTP layer (no such path, wrong method) in the same shape."""
    error = BadRequestError(status, "not_found" if status == 404 else "bad_request", detail)
    error.headers = dict(headers or {})
    return error.response()
