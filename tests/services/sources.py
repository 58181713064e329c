"""How tests use a source of credentials: opened as publishd opens it, with errors held to one line, and time at will."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from publishd.credentials import Credentials, LiveCredentials, open_source, parse_source
from publishd.errors import NoCredentials

if TYPE_CHECKING:
    from collections.abc import Mapping


class Clock:
    """A time that only the test and `sleep` move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        """Let the time pass at once."""
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


async def settled(live: LiveCredentials) -> None:
    """Wait for a renewal that goes on behind its callers."""
    if live._task:
        await asyncio.wait([live._task])


async def fetched(spec: str, environ: Mapping[str, str] | None = None, **flags: Any) -> Credentials:
    """One fetch from a source opened as publishd opens it."""
    source = open_source(parse_source(spec), environ or {}, **flags)
    try:
        return await source.fetch()
    finally:
        await source.aclose()


async def refused(spec: str, environ: Mapping[str, str] | None = None, *said: str, **flags: Any) -> NoCredentials:
    """The error of one fetch, which must be one line that names the source and has all of `said`."""
    with pytest.raises(NoCredentials) as caught:
        await fetched(spec, environ, **flags)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"no credentials: {parse_source(spec).which}: "), line
    for text in said:
        assert text in line, line
    return caught.value
