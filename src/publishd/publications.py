"""Publications: the codec of their names, and publishing, resolving and listing them over a store.

The storage format is that of the dispatch adapters (`docs/reference.md`, Storage format): `pub/<epoch>-<step>-<path>`,
both numbers in 20 decimal digits, the path in RFC 4648 base32 without padding. Fixed widths make the greatest name the
latest publication.
"""

from __future__ import annotations

import base64
import os.path
import re
from enum import Enum
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from publishd.errors import AlreadyExists, InvalidEntry, NotAFolder, NotFound, NotPublished, PerhapsOurs, Unavailable
from publishd.frameworks import framework_of, incomplete, unfinished
from publishd.stores import EXEC, PRUNE, PUB, Kind, in_parallel, list_fresh

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from publishd.frameworks import Framework
    from publishd.stores import Store

_NAME = re.compile("([0-9]{20})-([0-9]{20})-([A-Z2-7]+)", re.ASCII)
_MAX_NUMBER = "18446744073709551615"
# Letters of RFC 4648 base32 to the digits that int(…, 32) reads, which is how a name is decoded in a microsecond.
_DIGITS = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", b"0123456789abcdefghijklmnopqrstuv")
_SPARE_BITS = {0: 0, 2: 2, 4: 4, 5: 1, 7: 3}
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_NO_COMPONENT = frozenset({"", ".", ".."})
_HEAD = 20 + 1 + 20 + 1


class Publication(NamedTuple):
    """One publication; `path` is the save's, relative to the root."""

    epoch: int
    step: int
    path: str

    @property
    def name(self) -> str:
        """The name of its entry; between publications, greater is later."""
        path = base64.b32encode(self.path.encode("utf-8", "surrogateescape")).rstrip(b"=").decode("ascii")
        return f"{self.epoch:020d}-{self.step:020d}-{path}"

    @property
    def key(self) -> str:
        """The key of its entry."""
        return f"{PUB}/{self.name}"

    @property
    def record(self) -> str:
        """The key of its record once a prune has withdrawn it."""
        return f"{PRUNE}/{self.name}"


class Saves:
    """A set of save paths that answers whether one of them is a given path, lies inside it or around it."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = set(paths)
        self._around = {above for path in self._paths for above in _ancestors(path)}

    def __bool__(self) -> bool:
        return bool(self._paths)

    def touch(self, path: str) -> bool:
        """Whether one of the saves is at this path, inside it or around it."""
        return path in self._paths or path in self._around or any(above in self._paths for above in _ancestors(path))


def _ancestors(path: str) -> list[str]:
    return [path[: match.start()] for match in re.finditer("/", path)]


def parse(name: str) -> Publication:
    """The publication of an entry's name.

    Raises ValueError, saying why, unless re-encoding gives the same name and the path is safe.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError("not <20 digits>-<20 digits>-<base32>")
    epoch, step, encoded = match.groups()
    if epoch > _MAX_NUMBER or step > _MAX_NUMBER:
        raise ValueError("a number above 2^64-1")
    spare = _SPARE_BITS.get(len(encoded) % 8)
    bits = int(encoded.encode("ascii").translate(_DIGITS), 32)
    if spare is None or bits & ((1 << spare) - 1):
        raise ValueError("not canonical base32")
    path = (bits >> spare).to_bytes(len(encoded) * 5 // 8, "big").decode("utf-8", "surrogateescape")
    reason = unsafe(path)
    if reason:
        raise ValueError(f"path {path!r}: {reason}")
    return Publication(int(epoch), int(step), path)


def unsafe(path: str) -> str | None:
    """Why no publication may have this path; None if one may."""
    parts = path.split("/")
    if not path.isprintable() and _CONTROL.search(path):
        return "it has a control character"
    if not _NO_COMPONENT.isdisjoint(parts):
        return "it has an empty, '.' or '..' component"
    if parts[0] in (PUB, PRUNE):
        return f"{parts[0]}/ is publishd's own"
    if parts[0] == EXEC and len(parts) < 3:
        return "it is not inside one execution's folder"
    return None


def longest_path(name_limit: int) -> int:
    """The longest path, in bytes, whose entry's name fits into `name_limit` bytes: 133 for 255."""
    return max(0, (name_limit - _HEAD) * 5 // 8)


def check_path(path: str, name_limit: int) -> None:
    """Raise NotPublished where no entry can name this path: unsafe, or too long for names of `name_limit` bytes."""
    reason = unsafe(path)
    if reason:
        raise NotPublished("cannot publish", path, reason)
    reason = too_long(path, name_limit)
    if reason:
        raise NotPublished("cannot publish", path, reason, "use shorter names")


def too_long(path: str, name_limit: int) -> str | None:
    """Why no name of `name_limit` bytes can carry this path; None if one can."""
    limit, length = longest_path(name_limit), len(path.encode("utf-8", "surrogateescape"))
    return f"the path has {length} bytes, and names on this store can carry {limit}" if length > limit else None


# Reading


class Read(NamedTuple):
    """What a folder of entries or records holds: publications, latest last, and whatever else stands there."""

    publications: list[Publication]
    invalid: list[InvalidEntry]


async def read(store: Store, folder: str = PUB) -> Read:
    """Everything in `pub/` (or `prune/`), from one fresh listing. Raises StoreError unless it is known to be complete."""
    entries = await list_fresh(store, folder) or []
    entries.sort(key=itemgetter(0))
    found, invalid = [], []
    for name, kind, _ in entries:
        try:
            if kind is not Kind.FILE:
                raise ValueError(f"a {kind.value}, not a regular file")
            found.append(parse(name))
        except ValueError as error:
            which = f"{store.root}/{folder}/{name}"
            invalid.append(InvalidEntry("not a publication", which, str(error), "move it away if it is not publishd's"))
    return Read(found, invalid)


async def published(store: Store) -> list[Publication]:
    """Every publication, latest last. Raises InvalidEntry where anything else stands in `pub/`; it is never skipped."""
    publications, invalid = await read(store)
    if invalid:
        error, *others = invalid
        more = f" (and {len(others)} more)" if others else ""
        raise InvalidEntry(error.what, error.which + more, error.cause, error.remedy)
    return publications


async def present(store: Store, publications: Iterable[Publication]) -> set[Publication]:
    """Those publications whose save is there, asked afresh; of a file system by a listing of each folder that holds one."""
    if not store.consistent:
        return await _listed(store, publications)
    asked = list(publications)
    there = await in_parallel(store.concurrency, store.exists, [publication.path for publication in asked])
    return {publication for publication, is_there in zip(asked, there, strict=True) if is_there}


async def present_latest(store: Store, publications: Sequence[Publication], count: int) -> set[Publication]:
    """As `present` of publications in order, but sure only of the `count` latest that are there, and of those in between.

    Of the others a listing of each folder tells, which takes fewer requests, and may show what was deleted just now.
    """
    there = await _listed(store, publications)
    if not store.consistent:
        return there
    unsure = [publication for publication in publications if publication in there]
    while count and unsure:
        batch = unsure[-count:]
        del unsure[-count:]
        found = await present(store, batch)
        there -= set(batch) - found
        count -= len(found)
    return there


async def _listed(store: Store, publications: Iterable[Publication]) -> set[Publication]:
    folders: dict[str, list[tuple[str, Publication]]] = {}
    for publication in publications:
        folder, _, name = publication.path.rpartition("/")
        folders.setdefault(folder, []).append((name, publication))
    found = await in_parallel(store.concurrency, lambda folder: _present_in(store, folder, folders[folder]), folders)
    return set().union(*found)


async def _present_in(store: Store, folder: str, wanted: list[tuple[str, Publication]]) -> set[Publication]:
    prefix = os.path.commonprefix([name for name, _ in wanted])  # noqa: RUF071 - of characters, not of components
    kinds = await _kinds(store, folder, prefix)
    there = set()
    for name, publication in wanted:
        kind = kinds.get(name)
        if kind in (Kind.FILE, Kind.FOLDER) or (kind is Kind.LINK and await _leads_somewhere(store, publication.path)):
            there.add(publication)
    return there


async def _kinds(store: Store, folder: str, prefix: str) -> dict[str, Kind]:
    try:
        return {entry.name: entry.kind for entry in await list_fresh(store, folder, prefix) or []}
    except NotAFolder:
        return {}


async def _leads_somewhere(store: Store, link: str) -> bool:
    try:
        await store.list(link)
    except NotFound:
        return False
    except NotAFolder:
        return True
    return True


async def resolve(store: Store) -> Publication | None:
    """The latest publication, whose save is there and not marked as torn; None if nothing was ever published.

    Raises StoreError or InvalidEntry at any doubt, NotPublished where the save is gone or torn.
    """
    for last_try in (False, True):  # a prune may have run between the listing of pub/ and the look at the save
        latest = next(reversed(await published(store)), None)
        if latest is None:
            await _check_nothing_withdrawn(store)
        flaw = await _flaw(store, latest) if latest else None
        if latest is None or flaw is None:
            return latest
        if last_try:
            raise NotPublished("cannot resume", f"{store.root}/{latest.path}", flaw, "resolve -verify looks for an older one")
    raise AssertionError  # the loop returns or raises


async def _check_nothing_withdrawn(store: Store) -> None:
    """Raise NotPublished where an empty `pub/` is no beginning: prunes withdrew what stood there, and it was the last."""
    records = (await read(store, PRUNE)).publications
    if records:
        cause = f"nothing is published any more, but {PRUNE}/ records {records[-1].path}"
        raise NotPublished("cannot resume", store.root, cause, "prune publishes it again if it is whole")


async def _flaw(store: Store, publication: Publication) -> str | None:
    """Why nobody should resume from this save, as far as one listing of its folder and one of itself can tell."""
    if not await present(store, [publication]):
        return GONE
    try:
        return await unfinished(store, framework_of(publication.path), publication.path)
    except NotFound:
        return await _gone(store, publication)


async def _gone(store: Store, publication: Publication) -> str:
    """The reason of a save that could not be opened. Raises NotFound where a listing shows it all the same."""
    if await list_fresh(store, publication.path) is not None:
        raise Unavailable("cannot look at", f"{store.root}/{publication.path}", "it could not be opened, and then it could")
    return GONE


GONE = "it was published, but it is gone"


async def resolve_verified(store: Store, passed_over: Callable[[Publication, str], None]) -> Publication | None:
    """The newest publication whose save is there and complete; None if nothing was ever published.

    Complete is judged by the framework that names its saves so; another save must only be there. `passed_over` is told
    of each newer one and why. Raises NotPublished if there are publications, but none is left.
    """
    publications = await published(store)
    for publication in reversed(publications):
        reason = await _unusable(store, publication)
        if reason is None:
            return publication
        passed_over(publication, reason)
    if not publications:
        await _check_nothing_withdrawn(store)
    else:
        raise NotPublished("cannot resume", store.root, "no publication's save is there and complete", "publishd list shows them")
    return None


async def _unusable(store: Store, publication: Publication) -> str | None:
    framework = framework_of(publication.path)
    if framework is None:
        return await _flaw(store, publication)
    if not await present(store, [publication]):
        return GONE
    try:
        return await incomplete(store, framework, publication.path)
    except NotAFolder:
        return "it is not a folder"
    except NotFound:
        return await _gone(store, publication)


# Publishing


class Announced(Enum):
    """What became of an entry."""

    CREATED = "created by this call"
    EXISTED = "stood there already"
    EITHER = "stands there, and whoever made it, an answer to this call was lost"


async def announce(
    store: Store, publication: Publication, framework: Framework | None = None, *, just_judged: bool = False
) -> Announced:
    """Make the save durable and create its entry; returns whether this call created it.

    With `framework` it is judged again just before the create: what was complete when it was found may have been
    replaced while it waited or was synced. Of a consistent store, whose markers appear whole, only the framework's sign
    is asked for where the caller has just judged it. The caller has checked the path and that the save is not
    withdrawn, and calls `look_again` for what may be created by this call. Raises NotPublished where the save is not
    complete, or its framework marks it as unfinished; StoreError where the store failed: then there is no entry of ours.
    """
    await store.sync(publication.path, recursive=True)
    if framework and not (store.consistent and just_judged):
        reason = await incomplete(store, framework, publication.path)
    else:
        reason = await unfinished(store, framework_of(publication.path), publication.path)
    if reason:
        raise _refused(store, publication, reason)
    try:
        await store.create(publication.key)
    except PerhapsOurs:
        return Announced.EITHER
    except AlreadyExists:
        return Announced.EXISTED
    return Announced.CREATED


async def withdrawn(store: Store) -> Saves:
    """The saves that prunes have withdrawn and not yet removed."""
    return Saves(record.path for record in (await read(store, PRUNE)).publications)


def check_not_withdrawn(store: Store, publication: Publication, recorded: Saves) -> None:
    """Raise NotPublished where a prune is removing the save, something inside it or something around it."""
    if recorded.touch(publication.path):
        raise _refused(store, publication, _PRUNED, "prune finishes that; removing its record from prune/ keeps the save")


async def look_again(
    store: Store, created: Collection[Publication], recorded: Saves, framework: Framework | None = None
) -> dict[Publication, NotPublished]:
    """Remove those entries, created by the caller, whose save is gone or withdrawn by now, and say which.

    `recorded` are the withdrawn saves, asked for after the entries were created. With `framework` a consistent store is
    asked for the marker, which for the same price tells more: without it the save is being made anew.
    """
    there = await (_marked(store, created, framework) if framework and store.consistent else present(store, created))
    refused = {}
    for publication in created:
        if publication not in there or recorded.touch(publication.path):
            await store.delete(publication.key)
            reason = _PRUNED if publication in there else "it is gone"
            refused[publication] = _refused(store, publication, reason)
    return refused


async def _marked(store: Store, publications: Iterable[Publication], framework: Framework) -> set[Publication]:
    async def marked(publication: Publication) -> bool:
        children = await store.list(publication.path, framework.marker)
        return any(child.name == framework.marker for child in children)

    asked = list(publications)
    there = await in_parallel(store.concurrency, marked, asked)
    return {publication for publication, is_there in zip(asked, there, strict=True) if is_there}


async def publish(store: Store, publication: Publication) -> Announced:
    """Publish one save that is known to be complete; returns whether this call created the entry.

    Raises NotPublished where there is no such save, its path can't be published, a prune has withdrawn it or its
    framework marks it as unfinished; StoreError where the store failed.
    """
    check_path(publication.path, await store.name_limit())
    if not await present(store, [publication]):
        raise _refused(store, publication, "there is no such save", "is it there on this node?")
    check_not_withdrawn(store, publication, await withdrawn(store))
    announced = await announce(store, publication)
    if announced is not Announced.EXISTED:
        for refused in (await look_again(store, [publication], await withdrawn(store))).values():
            raise refused
    return announced


_PRUNED = "a prune is removing it, something inside it or something around it"


def _refused(store: Store, publication: Publication, reason: str, remedy: str = "") -> NotPublished:
    return NotPublished("cannot publish", f"{store.root}/{publication.path}", reason, remedy)
