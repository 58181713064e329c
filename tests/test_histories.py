"""Random histories of one root: saves appear, are published, vanish; prunes run, and die in the middle."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from hypothesis import example, given, settings
from hypothesis import strategies as st

from commands import Root
from fakes import FaultyStore
from publishd.errors import NotPublished
from publishd.prune import prune
from publishd.publications import Announced, Publication, publish, published, read, resolve
from publishd.stores import PRUNE
from publishd.stores.posix import PosixStore

if TYPE_CHECKING:
    from fakes import Effect
    from publishd.stores import Store

SAVES = ["exec/a/s1", "exec/a/s2", "exec/a/s2/inner", "exec/b/s1", "hand"]


class Appears(NamedTuple):
    """Training makes a save, unless a prune is at it."""

    path: str


class Publishes(NamedTuple):
    """Somebody publishes a save, whether it is there or not."""

    publication: Publication


class Vanishes(NamedTuple):
    """Something that is not publishd removes a save."""

    path: str


class Prunes(NamedTuple):
    """A prune runs; where `dies` is given, it is killed in place of that change of the store."""

    keep: int
    dies: int | None


Step = Appears | Publishes | Vanishes | Prunes

paths = st.sampled_from(SAVES)
publications = st.builds(Publication, st.integers(1, 3), st.integers(0, 3), paths)
steps: st.SearchStrategy[Step] = st.one_of(
    st.builds(Appears, paths),
    st.builds(Publishes, publications),
    st.builds(Publishes, publications),
    st.builds(Vanishes, paths),
    st.builds(Prunes, st.integers(1, 3), st.none() | st.integers(0, 9)),
)


class Killed(BaseException):
    """Nothing of the program runs after this."""


class Mortal(FaultyStore):
    """A store whose process is killed in place of change number `dies`; what is being removed is half removed by then."""

    def __init__(self, inner: Store, dies: int | None) -> None:
        super().__init__(inner)
        self._dies, self._changes = dies, 0

    def _effect(self, operation: str, key: str) -> Effect:
        if operation in ("move", "delete", "delete_tree"):
            if self._changes == self._dies:
                if operation == "delete_tree":
                    (Path(self.root, key) / "weights").unlink(missing_ok=True)
                raise Killed
            self._changes += 1
        return super()._effect(operation, key)


def touching(one: str, other: str) -> bool:
    """Whether one path is the other, lies inside it or around it."""
    return one == other or one.startswith(f"{other}/") or other.startswith(f"{one}/")


def by_name(entry: Publication) -> str:
    """The order of publications; that of base32 is not that of the paths."""
    return entry.name


class History:
    """A root on disk beside the model of it: the entries there must be, and which of their saves are whole."""

    def __init__(self, path: Path) -> None:
        self.root = Root(path).make()
        self.store = PosixStore(str(path), sync=False)
        self.entries: set[Publication] = set()
        self.records: set[Publication] = set()

    def there(self, path: str) -> bool:
        return (self.root.path / path).is_dir()

    def latest(self, keep: int) -> set[Publication]:
        """What a prune must keep, told otherwise than the code tells it: walk back until `keep` saves were met."""
        kept, met = set(), 0
        for entry in sorted(self.entries, key=by_name, reverse=True):
            kept.add(entry)
            met += self.there(entry.path)
            if met == keep:
                return kept
        return set(self.entries)

    async def does(self, step: Step) -> None:
        """Take one step on disk and in the model, and compare."""
        match step:
            case Appears(path):
                if not any(touching(record.path, path) for record in self.records):
                    (self.root.path / path).mkdir(parents=True, exist_ok=True)
                    (self.root.path / path / "weights").touch()
            case Vanishes(path):
                shutil.rmtree(self.root.path / path, ignore_errors=True)
            case Publishes(publication):
                await self.publishes(publication)
            case Prunes(keep, dies):
                await self.prunes(keep, dies)
        await self.agrees()

    async def publishes(self, publication: Publication) -> None:
        withdrawn = any(touching(record.path, publication.path) for record in self.records)
        try:
            announced = await publish(self.store, publication)
        except NotPublished:
            assert withdrawn or not self.there(publication.path)
        else:
            assert not withdrawn
            assert announced is (Announced.EXISTED if publication in self.entries else Announced.CREATED)
            self.entries.add(publication)

    async def prunes(self, keep: int, dies: int | None) -> None:
        """Whatever a prune did, and however far it came, only what it was to remove may be gone, or on its way."""
        whole = {path for path in SAVES if (self.root.path / path / "weights").exists()}
        kept, doomed = self.latest(keep), self.records | self.entries
        try:
            finished = not (await prune(Mortal(self.store, dies), keep, lambda *_: None)).failed
        except Killed:
            finished = False
        entries, records = set(await published(self.store)), set((await read(self.store, PRUNE)).publications)
        assert kept <= entries <= self.entries
        doomed -= kept
        for path in SAVES:
            needed = any(touching(entry.path, path) for entry in kept)
            named = any(entry.path == path or path.startswith(f"{entry.path}/") for entry in doomed)
            if path in whole and (needed or not named):
                assert (self.root.path / path / "weights").exists()
            elif finished and not needed and any(entry.path == path for entry in doomed):
                assert not (self.root.path / path).exists()
        for lost in doomed - entries - records:
            assert not self.there(lost.path) or any(touching(entry.path, lost.path) for entry in entries)
        if finished:
            assert (entries, records) == (kept, set())
        self.entries, self.records = entries, records

    async def agrees(self) -> None:
        """Every entry parses, they are those of the model, and resolve answers with the latest of them."""
        assert set(await published(self.store)) == self.entries
        latest = max(self.entries, key=by_name, default=None)
        try:
            assert await resolve(self.store) == latest
            assert latest is None or self.there(latest.path)
        except NotPublished:
            assert latest is not None
            assert not self.there(latest.path)


async def goes(history: list[Step]) -> None:
    with TemporaryDirectory() as folder:
        one = History(Path(folder, "root"))
        for step in [*map(Appears, SAVES), *history, Prunes(1, None)]:
            await one.does(step)
        assert one.root.records == []


def of(step: int, path: str) -> Publishes:
    return Publishes(Publication(1, step, path))


@given(st.lists(steps, max_size=25))
@example([of(0, "exec/a/s1"), of(1, "hand"), Prunes(1, 1), of(2, "exec/a/s1"), Vanishes("exec/a/s1"), of(3, "exec/a/s1")])
@example([of(0, "exec/a/s2"), of(1, "exec/a/s2/inner"), of(2, "hand"), Prunes(1, 1), Prunes(1, None)])
@settings(max_examples=250, deadline=None)
def test_any_history_keeps_what_is_published_and_removes_only_what_was(history: list[Step]) -> None:
    """Rules 1, 5, 6, 10, 11, 12: the root agrees with a model of it after every step, and a last prune leaves no debris."""
    asyncio.run(goes(history))
