"""Keeps the credentials of one source valid: at most one fetch at a time, and never a storm of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from math import inf
from typing import TYPE_CHECKING, Any

from publishd.credentials.base import Credentials, NotNow
from publishd.errors import NoCredentials

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from publishd.credentials.base import Source

log = logging.getLogger(__name__)

_PATIENCE = 15.0
"""Seconds that callers without a valid set wait for a source that fails."""

_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0
_LONGEST_WAIT_OF_CALLERS = 4.0
_FIRST_REJECTED_WAIT, _LONGEST_REJECTED_WAIT = 5.0, 300.0
_CLOSE_SECONDS = 2.0
_ROUNDS = 3

_PROVEN, _PROVEN_MINTED = 5.0, 60.0
"""Seconds of age from which a set that a store suddenly rejects had worked before; minted ones are known late."""


class LiveCredentials:
    """The credentials of one source, kept valid: renewed before they expire, never in a storm. Use from one loop only.

    Whoever asks at the same time shares one fetch, which goes on when an asker is cancelled.
    """

    def __init__(
        self,
        source: Source,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._source, self._clock, self._sleep = source, clock, sleep
        self._current: Credentials | None = None
        self._fetched = -inf
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        self._next_try = -inf
        self._error: NoCredentials | None = None
        self._setback: NotNow | None = None
        self._complained = False
        self._rejected: Credentials | None = None
        self._rejections = 0
        self._next_replacement = -inf

    async def get(self) -> Credentials:
        """A set that is valid as far as can be known, at once if there is one; a due renewal goes on behind it.

        Without one: waits for at most about 15 s, then raises NoCredentials; until the next try is due, again at once.
        """
        for _ in range(_ROUNDS):
            current = self._current
            if current and self.age < current.valid_for:
                if self.age >= current.renew_after and self._clock() >= self._next_try and not self._task:
                    self._begin(self._renew_behind())
                return current
            await self._join_or_begin()
        raise NotNow("no credentials", self._source.which, "they expire before they arrive")

    async def renew(self, rejected: Credentials) -> Credentials:
        """A set other than the one that the store has just called expired or invalid.

        Raises NoCredentials where the source has no other, and, at once, where its last replacement was rejected too and
        the growing wait for the next one is not over.
        """
        joined = False
        while (current := self._current) is None or current.keys == rejected.keys:
            if self._task and not joined:
                joined = True
                with contextlib.suppress(NoCredentials):
                    await self._join()
                continue
            before = self._rejections, self._next_replacement
            self._replace(rejected)
            try:
                await self._join_or_begin()
            except NoCredentials:  # the source failed, which says nothing about what the store makes of its keys
                self._rejections, self._next_replacement = before
                raise
            if self._current and self._current.keys == rejected.keys:
                raise self._no_other("the store calls them expired or invalid, and the source has no others")
        return await self.get()

    @property
    def age(self) -> float:
        """Seconds since the fetch of the current set began; inf without one."""
        return self._clock() - self._fetched

    async def aclose(self) -> None:
        """Nothing is fetched any more, and the source is released; takes 2 s at most, and raises nothing."""
        task, self._task = self._task, None
        if task:
            task.cancel()
            await asyncio.wait([task], timeout=_CLOSE_SECONDS)
        try:
            await asyncio.wait_for(self._source.aclose(), _CLOSE_SECONDS)
        except Exception as error:
            log.debug("closing %s: %s", self._source.which, type(error).__name__)

    # One fetch at a time

    async def _join_or_begin(self) -> None:
        if not self._task:
            if self._error and self._clock() < self._next_try:
                raise _copy(self._error)
            self._begin(self._fetch_patiently())
        await self._join()

    def _begin(self, fetching: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.create_task(fetching)
        # Where all who waited were cancelled nobody else asks for its outcome, and asyncio would complain of that.
        self._task.add_done_callback(lambda task: None if task.cancelled() else task.exception())

    async def _join(self) -> None:
        task = self._task
        assert task
        # Waited for, not awaited: whoever is cancelled here leaves it running for the others.
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            if self._setback:  # nobody would learn of it any more
                log.warning("%s (no longer waited for)", self._setback)
                self._setback = None
            raise
        if task.cancelled():
            raise NoCredentials("no credentials", self._source.which, "publishd is ending")
        if error := task.exception():
            raise _copy(error) if isinstance(error, NoCredentials) else error

    async def _fetch_patiently(self) -> None:
        began = self._clock()
        wait = _FIRST_WAIT
        try:
            while True:
                left = began + _PATIENCE - self._clock()
                try:
                    return await self._fetch(left)
                except NotNow as error:
                    self._setback = error
                    pause = _jittered(wait)
                    if pause >= left:
                        raise
                await self._sleep(pause)
                wait = min(wait * 2, _LONGEST_WAIT_OF_CALLERS)
        except NoCredentials as error:
            self._error = error
            self._wait_longer()
            raise
        finally:
            self._task, self._setback = None, None

    async def _renew_behind(self) -> None:
        remaining = self._remaining
        try:
            await self._fetch(_PATIENCE)
        except NoCredentials as error:
            self._wait_longer(within=max(remaining / 2, _FIRST_WAIT))
            if not self._complained:
                log.warning("credentials could not be renewed, the old ones are still used: %s", error)
            self._complained = True
        finally:
            self._task = None

    async def _fetch(self, seconds: float) -> None:
        began = self._clock()
        try:
            async with asyncio.timeout(max(seconds, _FIRST_WAIT)):
                fresh = await self._source.fetch()
        except TimeoutError:
            silence = NotNow("no credentials", self._source.which, "it did not answer in time")
            raise _copy(self._setback or silence) from None
        except NoCredentials:
            raise
        except Exception as error:  # its text is not known to be free of secrets
            raise NotNow("no credentials", self._source.which, f"unexpected {type(error).__name__}") from None
        if fresh.valid_for <= 0:
            raise NotNow("no credentials", self._source.which, "those it gives have expired", "is its clock, or ours, right?")
        self._current, self._fetched = fresh, began
        self._failures, self._next_try, self._error = 0, -inf, None
        if self._complained:
            log.info("credentials are renewed again: %s", self._source.which)
        self._complained = False

    @property
    def _remaining(self) -> float:
        return self._current.valid_for - self.age if self._current else 0.0

    def _wait_longer(self, within: float = inf) -> None:
        wait = min(_FIRST_WAIT * 2**self._failures, _LONGEST_WAIT)
        self._failures = min(self._failures + 1, 10)
        self._next_try = self._clock() + min(_jittered(wait), within)

    # Sets that the store rejects

    def _replace(self, rejected: Credentials) -> None:
        """Allow one fetch in place of a rejected set, or raise NoCredentials because that would be too early."""
        now = self._clock()
        if self._had_worked(rejected, self.age):
            self._rejections, self._next_replacement = 0, -inf
        self._rejected = rejected
        if now < self._next_replacement:
            raise self._no_other("the store rejects fresh ones, too; the next are asked for after a while")
        wait = min(_FIRST_REJECTED_WAIT * 2**self._rejections, _LONGEST_REJECTED_WAIT)
        self._rejections = min(self._rejections + 1, 10)
        self._next_replacement = now + _jittered(wait)

    def _had_worked(self, rejected: Credentials, age: float) -> bool:
        if self._rejected and self._rejected.keys == rejected.keys:
            return False
        return age >= min(_PROVEN_MINTED if rejected.minted else _PROVEN, rejected.valid_for)

    def _no_other(self, cause: str) -> NoCredentials:
        return NoCredentials("no credentials", self._source.which, cause, "check what they may do, and both clocks")


def _copy(error: NoCredentials) -> NoCredentials:
    """The same error for one more caller: raised twice, one object would collect the tracebacks of both."""
    return type(error)(error.what, error.which, error.cause, error.remedy)


def _jittered(seconds: float) -> float:
    return seconds * random.uniform(0.8, 1.0)  # noqa: S311 - spreads clients, protects nothing
