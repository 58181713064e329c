"""Removing all but the latest publications, and the saves they named, so that it can be killed at any instant.

Each victim's entry moves from `pub/` to `prune/`, which withdraws it and records the intent at once. A listing made
after that shows whether anything published since protects the save: a publisher that is slower finds the record and
takes its entry back. Then the save goes, completion markers first; then whatever entries name it by now; then the
record. What a killed prune left in `prune/` the next one finishes in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from publishd.errors import Denied, InvalidEntry, Linked, NoSpace, NotAFile, NotFound, PublishdError, StoreError, TooLarge
from publishd.frameworks import FRAMEWORKS
from publishd.publications import GONE, Publication, Saves, present_latest, published, read
from publishd.stores import PRUNE, in_parallel

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

    from publishd.stores import Store

    Note = Callable[[str, str, str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a prune will do; publications are in order, latest last."""

    kept: tuple[Publication, ...]
    victims: tuple[Publication, ...]
    gone: tuple[Publication, ...]
    """Those whose save is gone; they count for nothing."""
    records: tuple[Publication, ...] = ()
    """Victims of earlier prunes that are still to be finished."""

    @property
    def doomed(self) -> list[Publication]:
        """The victims, of this prune and earlier ones, whose saves nothing protects."""
        kept, protected = frozenset(self.kept), Saves(publication.path for publication in self.kept)
        found = dict.fromkeys((*self.records, *self.victims))
        return [victim for victim in found if victim not in kept and not protected.touch(victim.path)]


def plan(publications: Sequence[Publication], there: Collection[Publication], keep: int) -> Plan:
    """Pure: of publications in order, latest last, all older than the `keep` latest ones whose save is there are victims.

    Where fewer are there, none is. One that is gone but later than the last kept stays, so that resolve goes on
    naming it.
    """
    counted = [index for index, publication in enumerate(publications) if publication in there]
    cut = counted[-keep] if len(counted) >= keep else 0
    gone = tuple(publication for publication in publications if publication not in there)
    return Plan(tuple(publications[cut:]), tuple(publications[:cut]), gone)


async def propose(store: Store, keep: int, note: Note) -> Plan:
    """The plan for the root as it is now. Raises StoreError or InvalidEntry at any doubt.

    `note(what, which, cause)` is told of what is odd but no failure.
    """
    publications = await published(store)
    wanted = plan(publications, await present_latest(store, publications, keep), keep)
    for publication in wanted.gone:
        note("not counted", f"{store.root}/{publication.path}", GONE)
    records, junk = await read(store, PRUNE)
    for error in junk:
        note(error.what, error.which, error.cause)
    return replace(wanted, records=tuple(records))


@dataclass(slots=True)
class Result:
    """What a prune did, and what it could not do."""

    removed: list[Publication] = field(default_factory=list)
    """Publications that are gone with their saves, those that earlier prunes had withdrawn first."""
    failed: list[PublishdError] = field(default_factory=list)


async def prune(store: Store, keep: int, note: Note) -> Result:
    """Remove all but the `keep` latest publications and the saves they named, and finish what earlier prunes left.

    Raises as `propose` does, with nothing removed; later failures are collected: one save that can't be deleted does
    not keep the others.
    """
    wanted = await propose(store, keep, note)
    pruning = _Pruning(store, wanted, note)
    try:
        await pruning.finish(await pruning.unless_kept(wanted.records))
        await pruning.finish(await pruning.withdraw())
    except (InvalidEntry, StoreError) as error:
        pruning.result.failed.append(error)
    return pruning.result


class _Pruning:
    """One run over a plan."""

    def __init__(self, store: Store, wanted: Plan, note: Note) -> None:
        self._store, self._note = store, note
        self._kept, self._victims = frozenset(wanted.kept), wanted.victims
        self.result = Result()

    async def unless_kept(self, records: Iterable[Publication]) -> list[Publication]:
        """The records to finish: one whose entry is among the latest again is dropped."""
        unfinished = list(records)
        await self._delete(record.record for record in unfinished if record in self._kept)
        return [record for record in unfinished if record not in self._kept]

    async def withdraw(self) -> list[Publication]:
        """Move the victims' entries to records, and return those that were moved."""
        return await self._those(self._victims, self._withdraw)

    async def _withdraw(self, victim: Publication) -> bool:
        try:
            await self._store.move(victim.key, victim.record)
        except NotFound:
            return False  # another prune was faster, and finishes it
        except (NoSpace, NotAFile):
            await self._withdraw_unrecorded(victim)
            return False
        except StoreError as error:
            self.result.failed.append(error)
            return False
        return True

    async def _withdraw_unrecorded(self, victim: Publication) -> None:
        """Where no record can be made (a full disk, or junk of its name): entry, then save, and nothing in between."""
        try:
            await self._store.delete(victim.key)
        except StoreError as error:
            self.result.failed.append(error)
        else:
            await self.finish([victim], recorded=False)

    async def finish(self, withdrawn: Sequence[Publication], *, recorded: bool = True) -> None:
        """Delete the saves of withdrawn publications unless something protects them, then their records."""
        if not withdrawn:
            return
        victims = frozenset(self._victims)
        protected = Saves(entry.path for entry in await published(self._store) if entry not in victims)
        kept = [publication for publication in withdrawn if protected.touch(publication.path)]
        for publication in kept:
            self._note("save kept", f"{self._store.root}/{publication.path}", "a remaining publication needs it")
        doomed = [publication for publication in withdrawn if not protected.touch(publication.path)]
        removed = await self._those(doomed, partial(self._remove, recorded=recorded))
        self.result.removed += removed
        paths = {publication.path for publication in await self._those(removed, partial(self._is_ours, recorded=recorded))}
        await self._delete(entry.key for entry in await published(self._store) if entry.path in paths)
        if recorded:
            await self._delete(publication.record for publication in (*kept, *removed))

    async def _remove(self, publication: Publication, *, recorded: bool) -> bool:
        return await self._is_ours(publication, recorded=recorded) and await self._delete_save(publication)

    async def _is_ours(self, publication: Publication, *, recorded: bool) -> bool:
        """Whether the record still stands: once another prune has finished it, the save's path may be used anew."""
        if not recorded:
            return True
        try:
            if self._store.consistent:
                return await self._store.exists(publication.record)
            await self._store.read(publication.record, 0)
        except NotFound:
            return False
        except (NotAFile, TooLarge, Denied):
            return True  # whatever it holds, it stands
        except StoreError as error:
            self.result.failed.append(error)
            return False
        return True

    async def _delete_save(self, publication: Publication) -> bool:
        try:
            await self._store.delete_tree(publication.path, [framework.marker for framework in FRAMEWORKS.values()])
        except Linked as error:
            self._note("left alone", f"{self._store.root}/{publication.path}", f"{error.which} is a symbolic link")
            return False
        except StoreError as error:
            self.result.failed.append(error)
            return False
        return True

    async def _delete(self, keys: Iterable[str]) -> None:
        await in_parallel(self._store.concurrency, self._delete_one, keys)

    async def _delete_one(self, key: str) -> None:
        try:
            await self._store.delete(key)
        except StoreError as error:
            self.result.failed.append(error)

    async def _those(
        self, publications: Sequence[Publication], succeeds: Callable[[Publication], Awaitable[bool]]
    ) -> list[Publication]:
        results = await in_parallel(self._store.concurrency, succeeds, publications)
        return [publication for publication, succeeded in zip(publications, results, strict=True) if succeeded]
