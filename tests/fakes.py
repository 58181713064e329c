"""Stores for tests: one in memory, and one that goes wrong where a script says so.

Both keep the contract in `contract.py`. A `FaultyStore` around a `MemoryStore` makes any interleaving deterministic:

    event = asyncio.Event()
    store = FaultyStore(MemoryStore(), [("create", "pub/*", waits(event)), ("list", "pub", fails(Unavailable))])
"""

from __future__ import annotations

import asyncio
import itertools
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from publishd.errors import (
    AlreadyExists,
    NotAFile,
    NotAFolder,
    NotFound,
    NotPublished,
    StoreError,
    TooLarge,
    Unavailable,
)
from publishd.stores import Entry, Finding, Kind

if TYPE_CHECKING:
    import builtins
    from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable

    from publishd.stores import Store

    Effect = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]
    """What becomes of one call: it is given the operation, and runs it before, after or never."""

    Script = Iterable[tuple[str, str, Effect]]

_PIECE = 1 << 20


class MemoryStore:
    """A store in a dictionary, in which folders exist only through keys, as they do on S3.

    `two_step_move` makes `move` a create and a delete with a yield point between, as S3 needs it. Every operation has a
    yield point before its one step, so that concurrent callers interleave.
    """

    def __init__(
        self,
        *,
        two_step_move: bool = False,
        consistent: bool = False,
        concurrency: int = 1,
        root: str = "/memory",
        name_limit: int = 255,
    ) -> None:
        self.root = root
        self.consistent, self.concurrency = consistent, concurrency
        self.contents: dict[str, bytes | Kind] = {}
        """What stands under each key: a file's content, or the kind of what is neither file nor folder."""
        self.synced: list[tuple[str, bool]] = []
        """The key and `recursive` of each sync, in order."""
        self.closed = False
        self._two_step_move = two_step_move
        self._limit = name_limit
        self._inodes: dict[str, int] = {}
        self._next_inode = itertools.count(1)

    # Behind the store's back

    def write(self, key: str, content: bytes | Kind = b"") -> None:
        """Make or replace a file, or with a `Kind` a link or another thing that is no file."""
        self.contents[key] = content

    def remove(self, key: str) -> None:
        """Remove whatever stands under the key, and below it. A folder made there later has another inode."""
        for gone in [known for known in self.contents if known == key or known.startswith(f"{key}/")]:
            del self.contents[gone]
        self._forget_inodes()

    def replace(self, key: str, content: bytes | Kind = b"") -> None:
        """Put a file where anything, a folder included, may stand."""
        self.remove(key)
        self.write(key, content)

    def names(self, folder: str) -> builtins.list[str]:
        """The names of the folder's children, sorted; none where there is no folder."""
        start = f"{folder}/" if folder else ""
        return sorted({key[len(start) :].partition("/")[0] for key in self.contents if key.startswith(start)})

    def _forget_inodes(self) -> None:
        for key in [known for known in self._inodes if known not in self.contents and not self.names(known)]:
            del self._inodes[key]

    def _entry(self, folder: str, name: str) -> Entry:
        key = f"{folder}/{name}" if folder else name
        if key not in self._inodes:
            self._inodes[key] = next(self._next_inode)
        return Entry(name, self._kind(key), self._inodes[key])

    def _kind(self, key: str) -> Kind:
        content = self.contents.get(key, Kind.FOLDER)
        return content if isinstance(content, Kind) else Kind.FILE

    def _error(self, kind: type[StoreError], what: str, key: str, cause: str) -> StoreError:
        return kind(what, f"{self.root}/{key}", cause)

    # The store

    async def list(self, folder: str, prefix: str = "") -> list[Entry]:
        await asyncio.sleep(0)
        if folder in self.contents:
            raise self._error(NotAFolder, "cannot list", folder, "not a folder")
        names = self.names(folder)
        if folder and not names:
            raise self._error(NotFound, "cannot list", folder, "no such folder")
        return [self._entry(folder, name) for name in names if name.startswith(prefix)]

    async def exists(self, key: str) -> bool:
        await asyncio.sleep(0)
        return key in self.contents or bool(self.names(key))

    async def read(self, key: str, limit: int) -> bytes:
        await asyncio.sleep(0)
        content = self._content(key)
        if len(content) > limit:
            raise self._error(TooLarge, "cannot read", key, f"larger than {limit} bytes")
        return content

    async def stream(self, key: str) -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(0)
        content = self._content(key)
        for start in range(0, len(content), _PIECE):
            yield content[start : start + _PIECE]
            await asyncio.sleep(0)

    def _content(self, key: str) -> bytes:
        content = self.contents.get(key)
        if isinstance(content, bytes):
            return content
        if content is None and not self.names(key):
            raise self._error(NotFound, "cannot read", key, "no such file")
        raise self._error(NotAFile, "cannot read", key, "not a regular file")

    async def create(self, key: str) -> None:
        await asyncio.sleep(0)
        if key in self.contents:
            raise self._error(AlreadyExists, "cannot create", key, "it exists")
        if len(key.rpartition("/")[2].encode("utf-8", "surrogateescape")) > self._limit:
            raise self._error(Unavailable, "cannot create", key, "name too long")
        self.contents[key] = b""

    async def make_folder(self, folder: str) -> None:
        await asyncio.sleep(0)

    async def move(self, key: str, to: str) -> None:
        await asyncio.sleep(0)
        if key not in self.contents:
            raise self._error(NotFound, "cannot move", key, "no such file")
        self.contents[to] = self.contents[key]
        if self._two_step_move:
            await asyncio.sleep(0)
        self.contents.pop(key, None)
        self._forget_inodes()

    async def delete(self, key: str) -> None:
        await asyncio.sleep(0)
        if key not in self.contents and self.names(key):
            raise self._error(NotAFile, "cannot delete", key, "it is a folder")
        self.contents.pop(key, None)
        self._forget_inodes()

    async def delete_tree(self, key: str, first: Collection[str] = ()) -> None:
        for name in first:
            await asyncio.sleep(0)
            self.contents.pop(f"{key}/{name}", None)
        await asyncio.sleep(0)
        self.remove(key)

    async def sync(self, key: str, *, recursive: bool) -> None:
        await asyncio.sleep(0)
        self.synced.append((key, recursive))

    async def locate(self, save: str) -> str:
        await asyncio.sleep(0)
        key = save.removeprefix(f"{self.root}/").strip("/")
        if not save.startswith(f"{self.root}/") or not key:
            raise NotPublished("cannot publish", save, f"it does not lie below the checkpoint root {self.root}")
        return key

    async def name_limit(self) -> int:
        await asyncio.sleep(0)
        return self._limit

    async def diagnose(self) -> builtins.list[Finding]:
        await asyncio.sleep(0)
        return []

    async def aclose(self) -> None:
        await asyncio.sleep(0)
        self.closed = True


class FaultyStore:
    """A store around another one, which follows a script of (operation, key pattern, effect).

    Of the entries left in the script, a call consumes the first that names its operation and whose pattern, as a shell
    would match it, fits its key; a call that none fits goes through. `move` is matched by the key that it moves.
    """

    def __init__(self, inner: Store, script: Script = ()) -> None:
        self.inner = inner
        self.root = inner.root
        self.consistent, self.concurrency = inner.consistent, inner.concurrency
        self.script = list(script)
        self.calls: list[tuple[str, str]] = []
        """Operation and key of every call so far, in order."""

    def count(self, operation: str, pattern: str = "*") -> int:
        """How often this operation was called with such a key."""
        return sum(called == operation and fnmatchcase(key, pattern) for called, key in self.calls)

    def _effect(self, operation: str, key: str) -> Effect:
        self.calls.append((operation, key))
        for entry in self.script:
            if entry[0] == operation and fnmatchcase(key, entry[1]):
                self.script.remove(entry)
                return entry[2]
        return passes

    async def list(self, folder: str, prefix: str = "") -> list[Entry]:
        found: list[Entry] = await self._effect("list", folder)(lambda: self.inner.list(folder, prefix))
        return found

    async def exists(self, key: str) -> bool:
        found: bool = await self._effect("exists", key)(lambda: self.inner.exists(key))
        return found

    async def read(self, key: str, limit: int) -> bytes:
        content: bytes = await self._effect("read", key)(lambda: self.inner.read(key, limit))
        return content

    async def stream(self, key: str) -> AsyncGenerator[bytes, None]:
        await self._effect("stream", key)(_nothing)
        pieces = self.inner.stream(key)
        try:
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()

    async def create(self, key: str) -> None:
        await self._effect("create", key)(lambda: self.inner.create(key))

    async def make_folder(self, folder: str) -> None:
        await self._effect("make_folder", folder)(lambda: self.inner.make_folder(folder))

    async def move(self, key: str, to: str) -> None:
        await self._effect("move", key)(lambda: self.inner.move(key, to))

    async def delete(self, key: str) -> None:
        await self._effect("delete", key)(lambda: self.inner.delete(key))

    async def delete_tree(self, key: str, first: Collection[str] = ()) -> None:
        await self._effect("delete_tree", key)(lambda: self.inner.delete_tree(key, first))

    async def sync(self, key: str, *, recursive: bool) -> None:
        await self._effect("sync", key)(lambda: self.inner.sync(key, recursive=recursive))

    async def locate(self, save: str) -> str:
        key: str = await self._effect("locate", save)(lambda: self.inner.locate(save))
        return key

    async def name_limit(self) -> int:
        limit: int = await self._effect("name_limit", "")(self.inner.name_limit)
        return limit

    async def diagnose(self) -> builtins.list[Finding]:
        found: builtins.list[Finding] = await self._effect("diagnose", "")(self.inner.diagnose)
        return found

    async def aclose(self) -> None:
        await self._effect("aclose", "")(self.inner.aclose)


async def _nothing() -> None:
    pass


# Effects


async def passes(operation: Callable[[], Awaitable[Any]]) -> Any:
    """Nothing is wrong: for skipping the calls before the one that is meant."""
    return await operation()


def _raised(error: type[StoreError] | BaseException) -> BaseException:
    return error("cannot do it", "what the script names", "the script says so") if isinstance(error, type) else error


def fails(error: type[StoreError] | BaseException = Unavailable) -> Effect:
    """Nothing is done, and this is raised."""

    async def effect(_operation: Callable[[], Awaitable[Any]]) -> Any:
        raise _raised(error)

    return effect


def loses_reply(error: type[StoreError] | BaseException = Unavailable) -> Effect:
    """All is done, and yet this is raised."""

    async def effect(operation: Callable[[], Awaitable[Any]]) -> Any:
        await operation()
        raise _raised(error)

    return effect


def waits(event: asyncio.Event, *, reached: asyncio.Event | None = None) -> Effect:
    """The operation begins only once the event is set; `reached` is set when it starts to wait."""

    async def effect(operation: Callable[[], Awaitable[Any]]) -> Any:
        if reached:
            reached.set()
        await event.wait()
        return await operation()

    return effect


def cancels() -> Effect:
    """The task that makes the call is cancelled before anything is done."""

    async def effect(operation: Callable[[], Awaitable[Any]]) -> Any:
        task = asyncio.current_task()
        assert task
        task.cancel()
        await asyncio.sleep(0)
        return await operation()

    return effect


def before(action: Callable[[], object]) -> Effect:
    """Something else happens just before the operation."""

    async def effect(operation: Callable[[], Awaitable[Any]]) -> Any:
        action()
        return await operation()

    return effect


def after(action: Callable[[], object]) -> Effect:
    """Something else happens just after the operation."""

    async def effect(operation: Callable[[], Awaitable[Any]]) -> Any:
        result = await operation()
        action()
        return result

    return effect
