"""What becomes of requests that cannot be answered, in OpenAI's form."""

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from jaxhal.serve.judge import TooMany
from jaxhal.serve.limits import Fault, problem, reason
from jaxhal.serve.upstream import Unreachable
from jaxhal.serve.writer import Busy, Failed

# Characters of a name that an error shows.
_NAME = 80


async def failing(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """Events; an error as the last of them, for the status is told already."""
    try:
        async for one in events:
            yield one
    except Failed as error:
        logging.getLogger(__name__).error("a stream failed", exc_info=error)
        yield f"data: {json.dumps(problem(str(error), 'internal_error'))}\n\n"


async def _fault(request: Request, error: Any) -> JSONResponse:
    kind = error.kind if isinstance(error, Fault) else "invalid_request_error"
    body = problem(reason(error, request.method, request.url.path), kind)
    return JSONResponse(body, error.status_code, headers=error.headers)


async def _invalid(request: Request, error: Any) -> JSONResponse:
    found = error.errors()
    # Of a field that takes several types, what is wrong in the type that was given.
    field = [one for one in found if one["loc"][:2] == found[0]["loc"][:2]]
    first = next((one for one in field if not one["type"].endswith("_type")), found[0])
    place = ".".join(map(str, first["loc"][1:]))[:_NAME]
    why = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        place, why = "", f"the body is not JSON: {first['ctx']['error']}"
    elif first["type"] == "extra_forbidden":
        why = "there is no such field; /openapi.json has those there are"
    elif not place and first["type"] != "value_error":
        why = "give a JSON object, and say so: Content-Type: application/json"
    body = problem(f"{place}: {why}" if place else why, "invalid_request_error")
    body["error"]["param"] = place or None
    return JSONResponse(body, 400)


async def _busy(request: Request, error: Any) -> JSONResponse:
    return JSONResponse(problem(str(error), "unavailable_error"), 503)


async def _too_many(request: Request, error: Any) -> JSONResponse:
    return JSONResponse(problem(str(error), "invalid_request_error"), 413)


async def _failed(request: Request, error: Any) -> JSONResponse:
    logging.getLogger(__name__).error("a request failed", exc_info=error)
    return JSONResponse(problem(str(error), "internal_error"), 500)


async def _unreachable(request: Request, error: Any) -> JSONResponse:
    return JSONResponse(problem(str(error), "upstream_error"), 502)


async def _left(request: Request, error: Any) -> JSONResponse:
    return JSONResponse(problem("the client left", "invalid_request_error"), 499)


async def _broken(request: Request, error: Exception) -> JSONResponse:
    logging.getLogger(__name__).error("a request failed", exc_info=error)
    return JSONResponse(problem("the server failed", "internal_error"), 500)


#: What answers for each kind of error.
HANDLERS: Any = {
    HTTPException: _fault,
    RequestValidationError: _invalid,
    Busy: _busy,
    TooMany: _too_many,
    Failed: _failed,
    Unreachable: _unreachable,
    ClientDisconnect: _left,
    Exception: _broken,
}
