"""Errors for clients: the OpenAI error object, its types and its codes."""

from __future__ import annotations

import msgspec

from model.inputs.words import one_line

BAD_REQUEST = "BadRequestError"
NOT_FOUND = "NotFoundError"


class ErrorObject(msgspec.Struct):
    """The error object of OpenAI's API."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    """The body of an answer to a refused request."""

    error: ErrorObject


class RequestError(Exception):
    """The refusal of a request, with an HTTP status and the fields of the error object.

    `code` is OpenAI's short string for this kind of error, which clients compare; None: OpenAI has none.
    `retry_after_s` becomes the Retry-After header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = BAD_REQUEST,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> Error:
        return Error(ErrorObject(self.message, self.type, self.param, self.code))

    def encode(self) -> bytes:
        return msgspec.json.encode(self.body())

    def headers(self) -> dict[str, str]:
        """The answer's headers: Retry-After, or WWW-Authenticate for a 401."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def invalid(param: str, message: str) -> RequestError:
    """400: a well-formed field has a value that cannot be served."""
    return RequestError(400, f"{param}: {message}", param=param)


def given[T](param: str, value: T | None) -> T:
    """The value of a required field. Raises RequestError 400 if it is None."""
    if value is None:
        raise invalid(param, "is missing")
    return value


def unsupported(param: str, what: str) -> RequestError:
    """400: a field that would change the answer is not supported. It is refused, not ignored."""
    return RequestError(400, f"{param}: {what} not supported yet.", param=param, code="unsupported_parameter")


def model_not_found(name: str) -> RequestError:
    """404: no model has this name."""
    message = f"The model `{one_line(name[:200])}` does not exist."
    return RequestError(404, message, type=NOT_FOUND, param="model", code="model_not_found")


def not_kept(kind: str, id: str, param: str) -> RequestError:
    """404: the client has no response, item or conversation with this id."""
    message = f"{kind} with id {id[:100]!r} not found. It is not kept, or not any more, or not complete."
    return RequestError(404, message, type=NOT_FOUND, param=param)


def too_long(message: str, param: str) -> RequestError:
    """400: the request does not fit the model's context."""
    return RequestError(400, message, param=param, code="context_length_exceeded")


def overloaded(message: str, retry_after_s: int = 1) -> RequestError:
    """429: the server has more requests than it can hold."""
    code = "rate_limit_exceeded"
    return RequestError(429, message, type="RateLimitError", code=code, retry_after_s=retry_after_s)


def unavailable(message: str, retry_after_s: int | None = None) -> RequestError:
    """503: the server cannot serve now."""
    return RequestError(503, message, type="ServiceUnavailableError", retry_after_s=retry_after_s)


def internal(message: str) -> RequestError:
    """500: an error of the server itself."""
    return RequestError(500, message, type="InternalServerError")
