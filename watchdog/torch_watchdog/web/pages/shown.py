"""What every page shares: the templates, and the answer where a job is not there."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from torch_watchdog.errors import DiskAwayError, UnknownJobError
from torch_watchdog.web.access import Role

__all__ = ["answering", "not_found", "render"]

Endpoint = Callable[[Request], Awaitable[Response]]
_TEMPLATES = Environment(
    loader=ChoiceLoader([PackageLoader("torch_watchdog.web"), PackageLoader("torch_watchdog.report")]),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(request: Request, template: str, *, status_code: int = 200, **values: Any) -> Response:
    """`said` is a sentence that an action of this page has left in the address."""
    text = _TEMPLATES.get_template(template).render(
        is_operator=(request.state.role or 0) >= Role.OPERATOR, said=request.query_params.get("said", "")[:300], **values
    )
    return HTMLResponse(text, status_code=status_code)


def not_found(request: Request, sentence: str) -> Response:
    return render(request, "missing.html", status_code=404, sentence=sentence)


def answering(endpoint: Endpoint) -> Endpoint:
    """A job that is not there is a page too, and a disk that is not."""

    @functools.wraps(endpoint)
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except UnknownJobError as error:
            return not_found(request, str(error))
        except DiskAwayError as error:
            return render(request, "missing.html", status_code=503, sentence=str(error))

    return answer
