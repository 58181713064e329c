"""What publishd needs of the place where a checkpoint root lives, and which adapter serves which root.

The protocol is a contract between the adapters and the rules above them: few methods, no default bodies, and the
first sentence of each docstring is what an adapter guarantees. `tests/contract.py` holds every adapter to it.

Keys are relative to the root, `/`-separated, and valid: no empty, `.` or `..` component. They are text as the file
system encoding (UTF-8 with surrogate escapes) decodes a name's bytes, so that any name survives the way there and back.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from publishd.errors import NotAFolder, NotFound

if TYPE_CHECKING:
    import builtins
    from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable

    from publishd.stores.s3 import Access

A = TypeVar("A")
T = TypeVar("T")

PUB = "pub"
"""The folder of entries. It and `PRUNE` are publishd's own, and never links."""

PRUNE = "prune"
"""The folder of records: entries withdrawn by a prune whose saves are not yet removed."""

EXEC = "exec"
"""The folder of executions, each of which writes into `exec/<attempt>/`."""


class Kind(Enum):
    """What a name in a listing stands for. A link is a link, whatever it points to."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    OTHER = "other"


class Entry(NamedTuple):
    """One name in a listing. `inode` tells a folder from another one made later under its name; 0 where there is none."""

    name: str
    kind: Kind
    inode: int


class Verdict(Enum):
    """How a check of a root came out. A warning is for what may be meant."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


class Finding(NamedTuple):
    """The outcome of one check of a root."""

    check: str
    verdict: Verdict
    detail: str


class Store(Protocol):
    """A checkpoint root. Each method raises a `StoreError` for whatever the store could not do, and nothing else.

    A cancelled call either has not begun or runs to its end unseen: no step of it is left half done.
    """

    root: str
    """The root, absolute, without a trailing slash; `f"{root}/{key}"` is what a person calls the key."""

    consistent: bool
    """Files appear whole, and every call sees at once what stands there, so that nobody needs to look twice.

    File systems are not: writing takes time, and their clients cache names.
    """

    concurrency: int
    """How many calls at once are worth making."""

    async def list(self, folder: str, prefix: str = "") -> list[Entry]:
        """Every immediate child of the folder ('' is the root), as it stands after the call began; no name is dropped.

        With `prefix` only those whose names begin with it. Raises NotFound where there seems to be no such folder (which
        a caching file system may say wrongly: see `list_fresh`), NotAFolder where something else stands there. A store
        without folders can't tell that by a prefix: then there are no children.
        """
        ...

    async def exists(self, key: str) -> bool:
        """Whether a file stands under the key, or a folder; a store without folders counts one that holds anything.

        Of a store that is not consistent, a listing may know better.
        """
        ...

    async def read(self, key: str, limit: int) -> bytes:
        """The whole content of a regular file of at most `limit` bytes; nothing else can hang or fool it.

        Raises TooLarge without reading it, NotFound, NotAFile (links included).
        """
        ...

    def stream(self, key: str) -> AsyncGenerator[bytes, None]:
        """The whole content of a regular file of any size, in pieces of at most 1 MiB; raises as `read` does."""
        ...

    async def create(self, key: str) -> None:
        """Of all who create this key, one succeeds: an empty file stands there, durable, and was not there before.

        Raises AlreadyExists where a file stands there, durable and untouched (PerhapsOurs where it may be this call's),
        NotAFile where something else does. After any other error nothing of ours is there, unless the store itself can't
        tell. Missing parent folders are made; the root never is. Whoever makes `pub/` makes `prune/` first.
        """
        ...

    async def make_folder(self, folder: str) -> None:
        """The folder stands there, its parents below the root too, in a store that has folders; the root is never made.

        Links are followed. Raises NotAFolder where something else stands there.
        """
        ...

    async def move(self, key: str, to: str) -> None:
        """`to` stands before `key` is gone, whenever the call is cut short; an older `to` is replaced.

        Both are empty files in `pub/` or `prune/`. Raises NotFound where there is no `key`; NoSpace with `key` as it was.
        """
        ...

    async def delete(self, key: str) -> None:
        """The file or link is gone; that it was not there is success. No link is followed on the way.

        Raises Linked where a parent is a link, NotAFile where a folder stands there; both leave it.
        """
        ...

    async def delete_tree(self, key: str, first: Collection[str] = ()) -> None:
        """The file, or the folder with all it holds, is gone, and nothing else is; that it was not there is success.

        The files in it that `first` names go before all else. Links inside are removed as links. Raises Linked where
        `key` or a parent is a link, Denied where another file system is mounted inside. After an error a part may be
        gone.
        """
        ...

    async def sync(self, key: str, *, recursive: bool) -> None:
        """The folder (or file) and, if recursive, all it holds are durable, and so are its parents up to the root.

        Raises SyncFailed where that failed. A store told not to sync does nothing.
        """
        ...

    async def locate(self, save: str) -> str:
        """The key of a save as a person names it; the part below the root is taken as written.

        Raises NotPublished where it does not lie below the root.
        """
        ...

    async def name_limit(self) -> int:
        """The longest name, in bytes, that `pub/` can hold."""
        ...

    async def diagnose(self) -> builtins.list[Finding]:
        """What only this kind of store can tell of itself; a check that can't be made is a finding, not an error."""
        ...

    async def aclose(self) -> None:
        """All that the store holds open is released, within seconds."""
        ...


def open_store(root: str, *, sync: bool = True, access: Access | None = None) -> Store:
    """The store of a root as the user wrote it; nothing is touched yet. `sync=False` gives up durability (`-no-sync`).

    Raises UsageError for a root that is none, or one on S3 without `access` to it.
    """
    if root.startswith("s3://"):
        from publishd.stores.s3 import open_s3

        return open_s3(root, access)
    from publishd.stores.posix import PosixStore, absolute

    return PosixStore(absolute(root), sync=sync)


async def in_parallel(limit: int, call: Callable[[A], Awaitable[T]], items: Iterable[A]) -> list[T]:
    """The results of the call for all items, in their order, at most `limit` at once.

    Raises the first error in that order once all have ended, so that none goes on unseen.
    """
    turns = asyncio.Semaphore(limit)

    async def in_turn(item: A) -> T:
        async with turns:
            return await call(item)

    results = await asyncio.gather(*map(in_turn, items), return_exceptions=True)
    found = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        found.append(result)
    return found


async def list_fresh(store: Store, folder: str, prefix: str = "") -> builtins.list[Entry] | None:
    """A listing that may be believed when it says that there is no folder: None only if a listing of its parent lacks it.

    NFS clients cache "no such name" for up to a minute, and a listing of the parent is what ends that. Of `pub/` no store
    is believed at once: training would begin anew. Raises NotFound where the root itself is missing, or a folder is
    listed but can't be opened.
    """
    try:
        return await store.list(folder, prefix)
    except NotFound as error:
        if store.consistent and folder != PUB:
            return None
        if not folder:
            remedy = "make it before the first run; was it there before, is its file system mounted?"
            raise NotFound(error.what, error.which, error.cause, remedy) from error
    parent, _, name = folder.rpartition("/")
    try:
        siblings = await list_fresh(store, parent, name)
    except NotAFolder:
        if not parent:
            raise
        return None
    entry = next((entry for entry in siblings or () if entry.name == name), None)
    if entry is None:
        return None
    try:
        return await store.list(folder, prefix)
    except NotFound:
        if entry.kind is Kind.LINK:
            return None  # it leads nowhere
        raise
