"""The checks by which `publishd probe` shows, from this node, whether a checkpoint root can be used.

What is created has a fresh random name directly below the root. In `pub/` it would stop every resolve, and a folder would
outlive its content on stores that keep empty ones for a while (SeaweedFS). That all checks pass is evidence, no proof: a
store may still lose exclusivity across its own nodes.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import TYPE_CHECKING, TypeVar

from publishd.errors import AlreadyExists, PublishdError, printable
from publishd.publications import longest_path, read
from publishd.stores import PRUNE, Finding, Verdict, list_fresh

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
    from typing import Any

    from publishd.stores import Store

log = logging.getLogger(__name__)

T = TypeVar("T")

_PREFIX = "probe-"
_TRIES = 4
_AT_ONCE = 8
_SECONDS = 10.0
_SHORT_PATH = 64
_SHORTEST_SAVE = "exec/1/step-0"
_OVERWRITES = (
    "this store overwrites silently: two executions could both believe that an entry is theirs, and one withdraw the other's. "
    "Do not use it (known of SeaweedFS before 4.17, Garage, and object stores mounted as folders)"
)


async def probe(store: Store) -> AsyncGenerator[Finding, None]:
    """Each check's outcome as soon as it is known; nothing is left in the store, or a finding says what was and why.

    Never raises for what a store does; a check that makes no sense after an earlier one failed is left out. A
    cancellation takes effect once what was begun is cleared away, within some 20 s.
    """
    reachable = await _outcome("reachable", _reachable(store))
    yield reachable
    if reachable.verdict is Verdict.FAIL:
        return
    yield await _outcome("entries", _entries(store))
    yield await _outcome("records", _records(store))
    scratch = _Scratch(store)
    for part in (_exclusive, _visible):
        findings = await scratch.used_for(part)
        for finding in findings:
            yield finding
        if any(finding.verdict is Verdict.FAIL for finding in findings):
            break
    if scratch.left:
        yield Finding("cleanup", Verdict.FAIL, f"left behind: {scratch.left}")
    yield await _outcome("name limit", _name_limit(store))
    for finding in await _diagnosed(store):
        yield finding


async def _outcome(check: str, made: Awaitable[Finding]) -> Finding:
    try:
        return await made
    except PublishdError as error:
        return Finding(check, Verdict.FAIL, str(error))


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """The work's result. A cancellation cuts it short only after a while, and is raised once it has ended."""
    task, cancelled = asyncio.create_task(work), False
    while not task.done():
        try:
            done, _ = await asyncio.wait([task], timeout=_SECONDS if cancelled else None)
        except asyncio.CancelledError:
            cancelled = True
            continue
        if not done:
            task.cancel()
    if cancelled:
        if not task.cancelled():
            task.exception()  # seen, lest the loop complains; the cancellation is what counts
        raise asyncio.CancelledError
    return task.result()


# What only looks


async def _reachable(store: Store) -> Finding:
    names = await list_fresh(store, "") or []
    return Finding("reachable", Verdict.OK, printable(f"{store.root} was read: {_count(len(names), 'name')} in it"))


async def _entries(store: Store) -> Finding:
    publications, invalid = await read(store)
    if invalid:
        more = f" ({_count(len(invalid) - 1, 'other')} like it)" if len(invalid) > 1 else ""
        return Finding("entries", Verdict.FAIL, f"{invalid[0]}{more}: until then resolve, list and prune refuse to work")
    latest = f", the latest of epoch {publications[-1].epoch}, step {publications[-1].step}" if publications else ""
    return Finding("entries", Verdict.OK, f"{_count(len(publications), 'publication')}{latest}")


async def _records(store: Store) -> Finding:
    publications, invalid = await read(store, PRUNE)
    if invalid:
        more = f" (and {_count(len(invalid) - 1, 'other')})" if len(invalid) > 1 else ""
        return Finding("records", Verdict.WARN, f"{invalid[0]}{more}")
    if publications:
        waiting = _count(len(publications), "save")
        return Finding("records", Verdict.OK, f"{waiting} withdrawn and not yet removed: the next prune goes on with that")
    return Finding("records", Verdict.OK, "no prune was interrupted")


async def _name_limit(store: Store) -> Finding:
    limit = await store.name_limit()
    longest = longest_path(limit)
    detail = f"names of {limit} bytes: a save's path below the root may have {longest}"
    if longest < len(_SHORTEST_SAVE):
        return Finding("name limit", Verdict.FAIL, f"{detail}, into which not even {_SHORTEST_SAVE} fits")
    if longest < _SHORT_PATH:
        return Finding("name limit", Verdict.WARN, f"{detail}, which is little: keep the attempt's name short")
    return Finding("name limit", Verdict.OK, detail)


async def _diagnosed(store: Store) -> list[Finding]:
    try:
        return await _to_its_end(store.diagnose())
    except PublishdError as error:
        return [Finding("store", Verdict.FAIL, str(error))]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


# What creates and deletes


class _Scratch:
    """What the checks create: files with names that nobody else can have chosen."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.left = ""
        """What could not be removed, and why; empty if all is gone."""
        self._keys: list[str] = []

    def fresh(self) -> str:
        """A key never used before."""
        self._keys.append(f"{_PREFIX}{uuid.uuid4()}")
        return self._keys[-1]

    async def lists(self, key: str) -> bool:
        """Whether a fresh listing of the root shows the key."""
        return any(entry.name == key for entry in await list_fresh(self.store, "", key) or ())

    async def used_for(self, part: Callable[[_Scratch], Awaitable[list[Finding]]]) -> list[Finding]:
        """What a part of the checks has found, after which all that it created is gone again, also when cancelled."""
        try:
            return await _to_its_end(self._cleaned_after(part))
        except asyncio.CancelledError:
            if self.left:
                log.warning("left behind: %s", self.left)
            raise

    async def _cleaned_after(self, part: Callable[[_Scratch], Awaitable[list[Finding]]]) -> list[Finding]:
        try:
            return await part(self)
        finally:
            await self._clean()

    async def _clean(self) -> None:
        self.left = self._named(self._keys, f"not removed within {_SECONDS:g} s")
        try:
            async with asyncio.timeout(_SECONDS):
                self.left = await self._remove()
        except TimeoutError:
            pass  # `left` says so

    async def _remove(self) -> str:
        """Remove all that was or may have been created; returns what remains and why, empty if nothing does."""
        failure: PublishdError | None = None
        for key in self._keys:
            try:
                await self.store.delete(key)
            except PublishdError as error:
                failure = failure or error
        try:
            names = {entry.name for entry in await list_fresh(self.store, "", _PREFIX) or ()}
        except PublishdError as error:
            return self._named(self._keys, f"perhaps, for that could not be looked at: {failure or error}")
        return self._named([key for key in self._keys if key in names], str(failure or "the store said that it was deleted"))

    def _named(self, keys: list[str], why: str) -> str:
        if not keys:
            return ""
        more = f" (and {_count(len(keys) - 1, 'other')}, {_PREFIX}…)" if len(keys) > 1 else ""
        return printable(f"{self.store.root}/{keys[0]}{more}: {why}")


async def _exclusive(scratch: _Scratch) -> list[Finding]:
    """Exclusive create, one after the other; if that holds, many at once."""
    twice = await _outcome("exclusive create", _create_twice(scratch))
    if twice.verdict is Verdict.FAIL:
        return [twice]
    return [twice, await _outcome("race", _race(scratch))]


async def _create_twice(scratch: _Scratch) -> Finding:
    for _ in range(_TRIES):
        key = scratch.fresh()
        try:
            await scratch.store.create(key)
        except AlreadyExists:  # a fresh name: it was an attempt of this very call, whose answer was lost
            continue
        try:
            await scratch.store.create(key)
        except AlreadyExists:
            return Finding("exclusive create", Verdict.OK, "a new name was created, a second create of it refused")
        return Finding("exclusive create", Verdict.FAIL, f"a second create of the same name succeeded: {_OVERWRITES}")
    detail = f"of {_TRIES} fresh names each was said to exist already: answers get lost, or something stands in between"
    return Finding("exclusive create", Verdict.FAIL, detail)


async def _race(scratch: _Scratch) -> Finding:
    failure: BaseException | None = None
    for _ in range(_TRIES):
        key = scratch.fresh()
        creates = (scratch.store.create(key) for _ in range(_AT_ONCE))
        results = await asyncio.gather(*creates, return_exceptions=True)
        winners = results.count(None)
        failure = next((result for result in results if result and not isinstance(result, AlreadyExists)), None)
        if failure and not isinstance(failure, PublishdError):
            raise failure
        if winners > 1:
            return Finding("race", Verdict.FAIL, f"{winners} of {_AT_ONCE} creates of one name at once succeeded: {_OVERWRITES}")
        if winners == 1 and not failure:
            return Finding("race", Verdict.OK, f"of {_AT_ONCE} creates of one name at once exactly one succeeded")
    # No winner, and no failure: the winner's answer was lost, and its next attempt found its own.
    cause = failure or "the one that succeeded never learnt of it: answers get lost"
    detail = f"of {_AT_ONCE} creates of one name at once none is known to be the only one, in {_TRIES} tries: {cause}"
    return Finding("race", Verdict.FAIL, detail)


async def _visible(scratch: _Scratch) -> list[Finding]:
    """The listing shows what was created, and no more once it is deleted."""
    key = scratch.fresh()
    return [
        await _outcome("listing", _listing(scratch, key)),
        await _outcome("delete", _delete(scratch, key)),
    ]


async def _listing(scratch: _Scratch, key: str) -> Finding:
    try:
        await scratch.store.create(key)
    except AlreadyExists:
        pass  # as above
    if await scratch.lists(key):
        return Finding("listing", Verdict.OK, "what was created is listed at once")
    detail = f"{scratch.store.root}/{key} was created, but a listing lacks it: resolve could miss the latest publication"
    return Finding("listing", Verdict.FAIL, printable(detail))


async def _delete(scratch: _Scratch, key: str) -> Finding:
    await scratch.store.delete(key)
    if not await scratch.lists(key):
        return Finding("delete", Verdict.OK, "what was deleted is gone from the listing at once")
    detail = f"{scratch.store.root}/{key} was deleted, but a listing still has it: prune could not work"
    return Finding("delete", Verdict.FAIL, printable(detail))
