"""What goes over the wire between a client and a scripted server: requests as they came, answers as they are sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from email.message import Message


@dataclass(frozen=True)
class Request:
    """One request as it came. `target` is what the request line had; `path` and `key` are decoded."""

    method: str
    target: str
    headers: Message
    body: bytes
    time: float
    """When it had been read, by `time.monotonic()`."""
    connection: int
    """Which connection it came by, counted from 0."""

    @property
    def path(self) -> str:
        return unquote(urlsplit(self.target).path, errors="surrogateescape")

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True, errors="surrogateescape"))

    @property
    def bucket(self) -> str:
        """The first component of the path, as path-style addressing has it."""
        return self.path[1:].partition("/")[0]

    @property
    def key(self) -> str:
        """The object's key, or for a listing the prefix that is asked for."""
        return self.path[1:].partition("/")[2] or self.query.get("prefix", "")


@dataclass(frozen=True)
class Answer:
    """A response. Content-Length and Date are given unless `headers` has them."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: float = 0
    """Seconds before the first byte."""
    cut: int | None = None
    """So many bytes of the body are sent before the connection is closed."""
    pause: float = 0
    """Seconds between any two bytes of the body."""


class Fate(Enum):
    """What becomes of a request that gets no answer."""

    DROP = "read, then the connection is closed"
    DROP_UNREAD = "the connection is closed when its first byte has come; only from the queue, and nothing is recorded"
    SILENCE = "read, and never answered"


Behaviour = Callable[[Request], Answer]
"""What a server answers where no script says otherwise."""

Step = Answer | Fate | Callable[[Request, Behaviour], Answer | Fate]
"""What becomes of one request: decided beforehand, or by a function that is given the request and the behaviour."""


def xml(element: str, content: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """A document of one element, whose content is given as XML."""
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n<{element}>{content}</{element}>'
    return Answer(status, body.encode(), {"Content-Type": "application/xml", **(headers or {})})


def error(status: int, code: str, headers: Mapping[str, str] | None = None, **elements: str) -> Answer:
    """An error as S3 says it, with more elements beside the code."""
    more = "".join(f"<{name}>{text}</{name}>" for name, text in elements.items())
    return xml("Error", f"<Code>{code}</Code><Message>{code}</Message>{more}", status, headers)
