"""What every source of credentials gives, and how it says that it gave none."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from publishd.errors import NoCredentials

if TYPE_CHECKING:
    from collections.abc import Iterable

SLOW_TIMER = 300.0
"""Seconds after which a set that names no end of its own is fetched again, to notice a rotation before the store does."""

_TELLING = 8
_MARGIN_SHARE = 0.1
_LONGEST_MARGIN = 900.0


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """One set of keys; times in seconds since its fetch began. Its repr shows no secret."""

    access_key: str
    secret_key: str
    session_token: str = ""
    renew_after: float = inf
    """When a fresh set should be fetched."""
    valid_for: float = inf
    """When the set is certainly useless; inf if unknown."""
    minted: bool = False
    """Made for us at this moment: a store may not know it yet for some seconds."""
    endpoint: str = ""
    region: str = ""

    @property
    def keys(self) -> tuple[str, str, str]:
        """What a store judges; two sets of the same keys are one to it."""
        return self.access_key, self.secret_key, self.session_token

    def __repr__(self) -> str:
        return f"<Credentials {self.access_key[:4] if len(self.access_key) >= 12 else ''}…>"


class NotNow(NoCredentials):
    """The source gave none this time, for a reason that may pass."""


class Source(Protocol):
    """One place that credentials come from, and the only one that is ever asked."""

    which: str
    """What messages call it: `env`, `file:/path`, `vault:https://host:port/path`; never a query, never a secret."""

    async def fetch(self) -> Credentials:
        """A set of keys, by one attempt of at most about 10 s that never blocks the loop.

        Raises NotNow where another attempt may succeed, another NoCredentials where somebody has to change something.
        """
        ...

    async def aclose(self) -> None:
        """All that the source holds is released, within 2 s; nothing is raised for the network's sake."""
        ...


def renewal(lifetime: float) -> float:
    """When, in seconds, to renew what lives so long: in its last tenth, but at most 15 minutes before its end.

    So late because nothing is gained by more logins than lifetimes, and so early because the source may be down then.
    """
    return lifetime - min(lifetime * _MARGIN_SHARE, _LONGEST_MARGIN)


def field(fields: dict[str, Any], *names: str, required: bool = True) -> str:
    """The text of the first of these fields that there is; '' if none and not required.

    Raises ValueError, naming the field and not its value, for a missing one and for what can't be a key: not text, or
    text with blanks, control characters or letters outside ASCII (it is to be sent in a header).
    """
    value = next((fields[name] for name in names if fields.get(name) not in (None, "")), "")
    if value == "" and required:
        raise ValueError(f"it has no {' or '.join(names)}")
    if not isinstance(value, str):
        raise ValueError(f"{names[0]} is not text")
    if not re.fullmatch("[!-~]*", value):
        raise ValueError(f"{names[0]} has a blank, a line break or a character outside ASCII")
    return value


def repeats(words: str, secrets: Iterable[str]) -> bool:
    """Whether a server's words have eight characters in a row of one of these secrets, or all of a shorter one."""
    pieces = {words[at : at + _TELLING] for at in range(len(words) - _TELLING + 1)}
    return any(secret and (secret in words or any(piece in secret for piece in pieces)) for secret in secrets)


def until(expiration: object, date: str | None) -> float:
    """Seconds from the `Date` of an answer (else from now) until an ISO 8601 time in it, so that our own clock may be wrong.

    Raises ValueError.
    """
    from email.utils import parsedate_to_datetime

    try:
        end = datetime.fromisoformat(str(expiration))
    except ValueError:
        raise ValueError("its expiration is not a time") from None
    try:
        now = parsedate_to_datetime(date) if date else datetime.now(UTC)
    except ValueError:
        now = datetime.now(UTC)
    return (_aware(end) - _aware(now)).total_seconds()


def _aware(time: datetime) -> datetime:
    return time if time.tzinfo else time.replace(tzinfo=UTC)
