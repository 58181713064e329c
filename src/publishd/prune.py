"""Removing all but the latest publications, and the saves they named, so that it can be killed at any instant.

Each victim's entry moves from `pub/` to `prune/`, which withdraws it and records the intent at once. Listings made after
that show whether anything published since protects the save, which then stays, as does the record: a publisher that is
slower finds it and takes its entry back. They show, too, whether what superseded the victim still stands: a publication
that was counted may have been taken back since, and the victim then returns to `pub/`. Then the save goes, completion
markers first; then whatever entries name it by now; then the record. What a killed prune left in `prune/` the next one
finishes in the same way. An entry whose save a remaining publication needs is only deleted: a record would make the
publisher of that other one take its entry back.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from publishd.errors import (
    AlreadyExists,
    Denied,
    InvalidEntry,
    Linked,
    NoSpace,
    NotAFile,
    NotFound,
    PublishdError,
    StoreError,
    TooLarge,
)
from publishd.frameworks import FRAMEWORKS, framework_of, incomplete
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
    counted: tuple[Publication, ...] = ()
    """The N latest, in order: those that supersede the victims."""
    records: tuple[Publication, ...] = ()
    """Victims of earlier prunes that are still to be finished."""

    @property
    def doomed(self) -> list[Publication]:
        """The victims, of this prune and earlier ones, whose saves nothing protects."""
        kept, protected = frozenset(self.kept), Saves(publication.path for publication in self.kept)
        found = dict.fromkeys((*self.records, *self.victims))
        return [victim for victim in found if victim not in kept and not protected.touch(victim.path)]


def plan(
    publications: Sequence[Publication], there: Collection[Publication], keep: int, doubtful: Collection[Publication] = ()
) -> Plan:
    """Pure: of publications in order, latest last, all older than the `keep` latest ones whose save is there are victims.

    Where fewer are there, none is. One that is gone but later than the last kept stays, so that resolve goes on
    naming it. What is doubtful does not count.
    """
    counted = [index for index, entry in enumerate(publications) if entry in there and entry not in doubtful][-keep:]
    cut = counted[0] if len(counted) == keep else 0
    gone = tuple(publication for publication in publications if publication not in there)
    return Plan(tuple(publications[cut:]), tuple(publications[:cut]), gone, tuple(publications[index] for index in counted))


def doubtful(publications: Iterable[Publication], records: Sequence[Publication]) -> set[Publication]:
    """Those whose save a prune has withdrawn under another name: their publisher may be about to take them back."""
    withdrawn, known = Saves(record.path for record in records), frozenset(records)
    return {publication for publication in publications if publication not in known and withdrawn.touch(publication.path)}


async def propose(store: Store, keep: int, note: Note) -> Plan:
    """The plan for the root as it is now. Raises StoreError or InvalidEntry at any doubt.

    `note(what, which, cause)` is told of what is odd but no failure.
    """
    publications = await published(store)
    records, junk = await read(store, PRUNE)
    unsure = doubtful(publications, records)
    there = await present_latest(store, publications, keep + len(unsure))
    wanted = plan(publications, there, keep, unsure)
    for publication in wanted.gone:
        note("not counted", f"{store.root}/{publication.path}", GONE)
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
        await pruning.finish(await pruning.unless_kept(wanted.records), superseded_by=1)
        await pruning.finish(await pruning.withdraw(), superseded_by=keep)
        await pruning.delete_needed()
    except (InvalidEntry, StoreError) as error:
        pruning.result.failed.append(error)
    return pruning.result


class _Pruning:
    """One run over a plan."""

    def __init__(self, store: Store, wanted: Plan, note: Note) -> None:
        self._store, self._note = store, note
        self._kept, self._counted, self._victims = frozenset(wanted.kept), wanted.counted, dict.fromkeys(wanted.victims)
        protected = Saves(publication.path for publication in wanted.kept)
        self._needed = dict.fromkeys(victim for victim in wanted.victims if protected.touch(victim.path))
        self.result = Result()

    async def unless_kept(self, records: Iterable[Publication]) -> list[Publication]:
        """The records to finish: one whose entry is among the latest again is dropped."""
        unfinished = list(records)
        await self._delete(record.record for record in unfinished if record in self._kept)
        return [record for record in unfinished if record not in self._kept]

    async def withdraw(self) -> list[Publication]:
        """Move the victims' entries to records, and return those that were moved; not of those whose save is needed."""
        return await self._those([victim for victim in self._victims if victim not in self._needed], self._withdraw)

    async def delete_needed(self) -> None:
        """Delete the victims' entries whose saves another publication needs, and still does."""
        if self._needed:
            entries = [entry for entry in await published(self._store) if entry not in self._victims]
            unsure = doubtful(entries, (await read(self._store, PRUNE)).publications)
            protected = Saves(entry.path for entry in entries if entry not in unsure)
            needed = [victim for victim in self._needed if protected.touch(victim.path)]
            await self._delete(victim.key for victim in needed)
            # The other's publisher may have taken that back since, and another prune have returned this one just before.
            standing = Saves(entry.path for entry in await published(self._store))
            for victim in needed:
                self._say_kept(victim)
                if not standing.touch(victim.path):
                    await self._return(victim, recorded=False)

    def _say_kept(self, victim: Publication) -> None:
        self._note("save kept", f"{self._store.root}/{victim.path}", "a remaining publication needs it")

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
            await self.finish([victim], superseded_by=len(self._counted), recorded=False)

    async def finish(self, withdrawn: Sequence[Publication], *, superseded_by: int, recorded: bool = True) -> None:
        """Delete the saves of withdrawn publications, then their records.

        Where something protects the save both stay: its publisher, or another prune, may be about to act on the record. Where
        fewer than `superseded_by` later publications stand, a victim of this prune returns to `pub/`; one of an earlier
        prune, which may have begun to delete, returns if it is whole.
        """
        if not withdrawn:
            return
        entries = [entry for entry in await published(self._store) if entry not in self._victims]
        protected = Saves(entry.path for entry in entries)
        since = await self._since(entries, superseded_by)
        doomed = []
        for publication in withdrawn:
            if protected.touch(publication.path):
                self._say_kept(publication)
                if not recorded:
                    await self._return(publication, recorded=False)
            elif since is None or publication > since:
                await self._restore(publication, recorded=recorded)
            else:
                doomed.append(publication)
        removed = await self._those(doomed, partial(self._remove, recorded=recorded))
        self.result.removed += removed
        paths = {publication.path for publication in await self._those(removed, partial(self._is_ours, recorded=recorded))}
        await self._delete(entry.key for entry in await published(self._store) if entry.path in paths)
        if recorded:
            await self._delete(publication.record for publication in removed)

    async def _since(self, entries: Sequence[Publication], count: int) -> Publication | None:
        """The last but `count` of these entries whose save is there: all that is older is superseded by so many."""
        unsure = doubtful(entries, (await read(self._store, PRUNE)).publications)
        standing = dict.fromkeys(entry for entry in entries if entry not in unsure)
        latest = [publication for publication in self._counted if publication in standing]
        if len(latest) < count:
            there = await present_latest(self._store, list(standing), count)
            latest = [entry for entry in standing if entry in there]
        return latest[-count] if len(latest) >= count else None

    async def _restore(self, publication: Publication, *, recorded: bool) -> None:
        """What superseded the publication does not stand any more."""
        which = f"{self._store.root}/{publication.path}"
        if publication in self._victims or await self._is_whole(publication):
            self._note("published again", which, "no later publication stands that would replace it")
            await self._return(publication, recorded=recorded)
        else:
            self._note("left alone", which, "no later publication stands, and an earlier prune may have begun to delete it")

    async def _is_whole(self, publication: Publication) -> bool:
        """Whether a save still has its marker, which a prune deletes first; of a save without one nobody can tell."""
        framework = framework_of(publication.path)
        try:
            return framework is not None and await incomplete(self._store, framework, publication.path) is None
        except StoreError:
            return False

    async def _return(self, publication: Publication, *, recorded: bool) -> None:
        try:
            if recorded:
                await self._store.move(publication.record, publication.key)
            else:
                await self._store.create(publication.key)
        except (NotFound, AlreadyExists):
            pass  # another prune has finished it, or somebody else returned it
        except StoreError as error:
            self.result.failed.append(error)

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
