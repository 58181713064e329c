"""The watcher: a scanner that finds saves, a queue of them, and publishers that take the newest first.

A scan is one listing of the execution's folder; it queues what is not settled. A publisher judges each of these saves
(see `frameworks.seems_incomplete`) and publishes it if it is complete. A save is settled once a publication names it.
Errors of the store are logged, and the next scan tries again; any other error is a bug and ends the watch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from publishd.errors import NotAFolder, NotFound, NotPublished, PublishdError, StoreError, SyncFailed
from publishd.fencing import REMEDY, check_room, conflicts, folder_of, published_by
from publishd.frameworks import seems_incomplete
from publishd.prune import prune
from publishd.publications import (
    Announced,
    Publication,
    Saves,
    announce,
    check_not_withdrawn,
    check_path,
    look_again,
    read,
    withdrawn,
)
from publishd.stores import PRUNE, PUB, Kind, list_fresh

if TYPE_CHECKING:
    from publishd.frameworks import Framework
    from publishd.stores import Entry, Store

log = logging.getLogger(__name__)

_URGENT_INTERVAL = 1.0
_RETRY_INTERVAL = 1.0
_SILENT_SECONDS = 1.0
_STILL_TRUE_SECONDS = 1.0
"""For so long a judgement holds on a consistent store; a request that had to be repeated takes longer."""
_LOOK_AGAIN_AFTER = 32
"""Entries created, while more saves wait, before the publisher looks again."""


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """What to watch as, and how; times in seconds."""

    attempt: str
    epoch: int
    interval: float = 10.0
    drain: float = 20.0
    linger: float = 0.0
    keep: int | None = None


@dataclass(slots=True, eq=False)
class _Save:
    """A save folder that is not settled; a folder made later under the same name is another save."""

    name: str
    inode: int
    kind: Kind
    step: int
    reason: str = ""
    """Why it is not complete."""
    failure: str = ""
    """Why it could not be published, as last tried."""
    complete: bool | None = None
    """As last judged; None where that could not be seen."""
    queued: bool = False
    """Waiting for a publisher, or for the second look at its entry."""
    hopeless: bool = False
    """Complete, but never to be published by this watch."""
    said: set[str] = field(default_factory=set)


class Watcher:
    """Publishes the saves of one execution as they complete, until `stop` is set and what is complete is published."""

    def __init__(self, store: Store, framework: Framework, options: WatchOptions, stop: asyncio.Event) -> None:
        self._store, self._framework, self._options, self._stop = store, framework, options, stop
        self._folder = folder_of(options.attempt)
        self._interval = options.interval
        self._wake = asyncio.Event()
        self._stopping = False
        self._begun = False
        self._met = False
        self._name_limit = 0
        self._published_before: set[str] = set()
        self._settled: dict[str, int] = {}
        self._saves: dict[str, _Save] = {}
        self._queue: asyncio.PriorityQueue[tuple[int, int, _Save]] = asyncio.PriorityQueue()
        self._tickets = itertools.count()
        self._busy = 0
        self._named: set[str] | None = None
        self._naming = asyncio.Lock()
        self._withdrawn = Saves(())
        self._created: dict[Publication, _Save] = {}
        self._confirming = asyncio.Lock()
        self._unconfirmable = ""
        self._damaged: dict[tuple[str, int], SyncFailed] = {}
        self._trouble = ""
        self._said: set[str] = set()
        self._noted: set[tuple[str, str]] = set()
        self._prunes: asyncio.Queue[None] = asyncio.Queue()
        self._scanning_since: float | None = None
        self._last_published: float | None = None
        self.scanned = asyncio.Event()
        """Set once a first scan has been carried out, whether or not the store could be seen."""
        self.in_time = True
        """False once the drain has run out of time."""

    async def run(self, *, once: bool = False) -> bool:
        """Watch until `stop` (with `once`: not at all), scan a last time, drain. True if all that is complete is published.

        Raises NotPublished where no save of this execution could ever be published, and whatever is a bug.
        """
        async with asyncio.TaskGroup() as tasks:
            publishers = (self._publish_forever() for _ in range(self._store.concurrency))
            workers = [tasks.create_task(worker) for worker in (*publishers, self._prune_forever())]
            scanner = tasks.create_task(self._scan_until_stopping(), name="scanner")
            if not once:
                await self._stop.wait()
                await self._linger()
            self._stopping = True
            self._wake.set()
            drained = await self._finish(scanner)
            for worker in workers:
                worker.cancel()
        return drained

    def hurry(self) -> None:
        """Scan every second from now on, and once at once: the end is near."""
        self._interval = min(_URGENT_INTERVAL, self._interval)
        self._wake.set()

    def scanning_for(self) -> float:
        """How long the scan in progress has been at it, in seconds; 0 between scans."""
        return 0.0 if self._scanning_since is None else asyncio.get_running_loop().time() - self._scanning_since

    def status(self) -> str:
        """How it goes, in a line for people."""
        published, pending = len(self._settled), len(self._saves)
        age = "no publication by this watch yet"
        if self._last_published is not None:
            age = f"last publication {asyncio.get_running_loop().time() - self._last_published:.0f} s ago"
        failed = max((save for save in self._saves.values() if save.failure), key=lambda save: save.step, default=None)
        trouble = self._trouble or (failed.failure if failed else "")
        trouble = f"; {trouble}" if trouble else ""
        return f"{published + pending} saves seen, {published} published, {pending} pending; {age}{trouble}"

    # Scanning

    async def _scan_until_stopping(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopping:
            self._wake.clear()
            due = loop.time() + self._interval
            await self._scan()
            self.scanned.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._wake.wait()

    async def _linger(self) -> None:
        if self._options.linger:
            self.hurry()
            await asyncio.sleep(self._options.linger)

    async def _scan(self, *, last: bool = False) -> bool:
        """Look at the execution's folder once; False if that could not be done, which is said once."""
        trouble = ""
        self._unconfirmable = ""
        self._scanning_since = asyncio.get_running_loop().time()
        try:
            if not self._begun:
                await self._begin()
            await self._confirm()
            if last:
                await self._unsettle()
            await self._look()
        except StoreError as error:
            trouble = str(error)
        if trouble and trouble != self._trouble:
            log.warning("%s (trying again at every scan)", trouble)
        elif self._trouble and not trouble:
            log.info("can be seen again: %s", self._path())
        self._trouble = trouble
        self._scanning_since = None  # still set where it was cut off
        return not trouble

    async def _begin(self) -> None:
        """What is asked once, before the first listing: whether names fit, and what was published before."""
        self._name_limit = await self._store.name_limit()
        check_room(self._store.root, self._options.attempt, self._framework, self._name_limit)
        published = await self._read_pub()
        try:
            await self._store.sync(PUB, recursive=False)
        except SyncFailed as error:
            log.warning("%s", error)
        except NotFound:
            pass  # nothing was published yet
        self._withdrawn = await withdrawn(self._store)
        for which, cause in conflicts(self._store.root, self._options.attempt, self._options.epoch, published):
            log.warning("WRONG EPOCH? %s: %s (%s)", which, cause, REMEDY)
        self._published_before = self._names(published)
        if self._options.keep and self._withdrawn:  # a prune was killed, and saves that it withdrew are no longer to be published
            self._prunes.put_nowait(None)
        self._begun = True
        log.info("watching: %s: %s saves, as epoch %d", self._path(), self._framework.name, self._options.epoch)

    async def _read_pub(self) -> list[Publication]:
        published, invalid = await read(self._store)
        for error in invalid:
            if str(error) not in self._said:
                self._said.add(str(error))
                log.error("%s; resolve, list and prune fail until then", error)
        return published

    def _names(self, published: list[Publication]) -> set[str]:
        """The names of this execution's saves that are published, at whatever step and epoch."""
        own = published_by(self._options.attempt, published)
        return {publication.path[len(self._folder) + 1 :] for publication in own}

    async def _look(self) -> None:
        """List the folder and queue what is not settled."""
        entries = await list_fresh(self._store, self._folder)
        self._named = None
        for save in self._unsettled(entries):
            save.queued = True
            self._queue.put_nowait((-save.step, next(self._tickets), save))

    async def _unsettle(self) -> None:
        """Believe no longer that a save is settled if nothing in `pub/` or `prune/` names it.

        Its publication may be gone, and a save made anew under its name may have got its inode.
        """
        if self._settled:
            records = (await read(self._store, PRUNE)).publications
            names = self._names(await self._read_pub()) | self._names(records)
            self._settled = {name: inode for name, inode in self._settled.items() if name in names}

    def _unsettled(self, entries: list[Entry] | None) -> list[_Save]:
        """The saves to judge; whatever a listing does not show is forgotten."""
        settled, saves = {}, {}
        for name, kind, inode in entries or ():
            if self._settled.get(name) == inode or name in self._published_before:
                settled[name] = inode
                continue
            step = self._framework.step(name)
            if step is None or kind not in (Kind.FOLDER, Kind.LINK):
                continue
            known = self._saves.get(name)
            saves[name] = known if known and (known.inode, known.kind) == (inode, kind) else _Save(name, inode, kind, step)
            if (name, inode) in self._damaged:
                self._give_up(saves[name], self._damaged[name, inode])
            elif kind is Kind.LINK:
                saves[name].hopeless, saves[name].complete = True, False
                saves[name].reason = "it is a symbolic link (publish it by hand if it is a save)"
                self._say(saves[name], "no save", saves[name].reason)
        if entries:
            self._published_before = set()
        self._settled, self._saves = settled, saves
        self._met = self._met or bool(settled or saves)
        return [save for save in saves.values() if not (save.queued or save.hopeless)]

    # Publishing

    async def _publish_forever(self) -> None:
        while True:
            _, _, save = await self._queue.get()
            self._busy += 1
            try:
                await self._judge(save)
            except StoreError as error:
                self._judge_again(save, error)
            self._busy -= 1
            while self._is_confirming_due():
                try:
                    await self._confirm()
                except StoreError as error:  # the next scan tries again, and says it
                    self._unconfirmable = str(error)
            self._queue.task_done()

    def _is_confirming_due(self) -> bool:
        if not self._created or self._unconfirmable or self._confirming.locked():
            return False
        return len(self._created) >= _LOOK_AGAIN_AFTER or (self._queue.empty() and not self._busy)

    async def _judge(self, save: _Save) -> None:
        """Publish the save if it is complete and no publication names it yet."""
        began = asyncio.get_running_loop().time()
        save.complete = await self._is_complete(save)
        if not save.complete:
            save.queued = False
            return
        async with self._naming:  # one listing serves all that this scan finds
            if self._named is None:
                self._named = self._names(await self._read_pub())
        if save.name in self._named:
            self._settle(save)
        else:
            await self._publish(save, judged=began)

    async def _is_complete(self, save: _Save) -> bool:
        try:
            reason = await seems_incomplete(self._store, self._framework, f"{self._folder}/{save.name}")
        except NotAFolder:
            reason = self._framework.unmarked  # it is just being replaced
        except NotFound:
            if await list_fresh(self._store, f"{self._folder}/{save.name}") is not None:
                raise
            reason = self._framework.unmarked  # it is just being removed
        save.reason = reason or ""
        if reason and reason != self._framework.unmarked:
            self._say(save, "not complete yet", reason)
        return reason is None

    async def _publish(self, save: _Save, *, judged: float) -> None:
        publication = Publication(self._options.epoch, save.step, f"{self._folder}/{save.name}")
        try:
            check_path(publication.path, self._name_limit)
        except NotPublished as error:
            self._give_up(save, error)
            return
        try:
            if self._withdrawn.touch(publication.path):
                self._withdrawn = await withdrawn(self._store)
            check_not_withdrawn(self._store, publication, self._withdrawn)
            just_judged = asyncio.get_running_loop().time() - judged < _STILL_TRUE_SECONDS
            announced = await announce(self._store, publication, self._framework, just_judged=just_judged)
        except NotPublished as error:
            self._judge_again(save, error)
        except SyncFailed as error:
            self._damaged[save.name, save.inode] = error
            self._give_up(save, error)
        except StoreError as error:
            self._retry(save, error)
        else:
            if announced is Announced.EXISTED:
                self._settle(save)
                log.info("already published: %s", self._path(save))
            else:
                self._created[publication] = save

    async def _confirm(self) -> None:
        """Look again at what was created: only what still stands then is published."""
        async with self._confirming:  # two looks at one entry could come to two conclusions
            created = dict(self._created)
            refused: dict[Publication, NotPublished] = {}
            if created:
                self._withdrawn = await withdrawn(self._store)
                refused = await look_again(self._store, created, self._withdrawn, self._framework)
            for publication, save in created.items():
                if self._created.get(publication) is save:
                    del self._created[publication]
        for publication, save in created.items():
            if publication in refused:
                self._judge_again(save, refused[publication])
            else:
                self._settle(save)
                log.info("published: %s: epoch %d, step %d", self._path(save), publication.epoch, publication.step)
                self._last_published = asyncio.get_running_loop().time()
                if self._options.keep and self._prunes.empty():
                    self._prunes.put_nowait(None)

    def _settle(self, save: _Save) -> None:
        self._settled[save.name] = save.inode
        if self._saves.get(save.name) is save:
            del self._saves[save.name]

    def _retry(self, save: _Save, error: PublishdError, what: str = "not published yet") -> None:
        save.queued, save.failure = False, error.cause if isinstance(error, NotPublished) else str(error)
        self._say(save, what, save.failure)

    def _judge_again(self, save: _Save, error: PublishdError) -> None:
        save.complete = None
        self._retry(save, error)

    def _give_up(self, save: _Save, error: PublishdError) -> None:
        save.hopeless, save.complete = True, True
        self._retry(save, error, "not published")

    def _say(self, save: _Save, what: str, reason: str) -> None:
        if reason not in save.said:
            save.said.add(reason)
            log.warning("%s: %s: %s", what, self._path(save), reason)

    def _path(self, save: _Save | None = None) -> str:
        folder = f"{self._store.root}/{self._folder}"
        return f"{folder}/{save.name}" if save else folder

    # Pruning, beside publishing and never before it

    async def _prune_forever(self) -> None:
        while True:
            await self._prunes.get()
            await self.prune(self._options.keep or 0)
            self._prunes.task_done()

    async def prune(self, keep: int) -> bool:
        """Prune the root as the command does, saying on stderr what went and what could not; False if something could not."""

        def note(what: str, which: str, cause: str) -> None:
            if (which, cause) not in self._noted:
                self._noted.add((which, cause))
                log.warning("prune: %s: %s: %s", what, which, cause)

        try:
            result = await prune(self._store, keep, note)
        except PublishdError as error:
            log.warning("prune: %s", error)
            return False
        for publication in result.removed:
            self._settled.pop(publication.path.removeprefix(f"{self._folder}/"), None)
            log.info("pruned: %s", f"{self._store.root}/{publication.path}")
        for failure in result.failed:
            log.warning("prune: %s (the next prune tries again)", failure)
        return not result.failed

    # The end

    async def _finish(self, scanner: asyncio.Task[None]) -> bool:
        """The last scan and the drain, within the time there is for it; what could not be published is named."""
        deadline = asyncio.get_running_loop().time() + self._options.drain
        self.in_time = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await scanner
                await self._drain()
                self.in_time = True
        drained = self._report()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._prunes.join()
        return drained

    async def _drain(self) -> None:
        """Scan and publish until nothing is left that trying again could mend."""
        while True:
            seen = await self._scan(last=True)
            await self._queue.join()
            again = [save for save in self._saves.values() if save.complete is not False and not save.hopeless]
            if seen and not again and not self._created:
                return
            await asyncio.sleep(_RETRY_INTERVAL)

    def _report(self) -> bool:
        """Name what is left; True if none of it is known to be complete."""
        drained = self.in_time
        if not self.in_time:
            cause = f": {self._trouble}" if self._trouble else " (a longer -drain gives more)"
            silent = self.scanning_for()
            if silent > _SILENT_SECONDS:
                cause = f": {self._store.root}: a scan has waited for an answer for {silent:.0f} s"
            log.error("time ran out after %g s%s", self._options.drain, cause)
        unconfirmed = set(self._created.values())
        for save in sorted({*self._saves.values(), *unconfirmed}, key=lambda save: save.step, reverse=True):
            if save in unconfirmed:
                save.failure = "its entry stands, but could not be looked at again: " + (
                    self._unconfirmable or self._trouble or "time ran out"
                )
            if save.complete is False:
                log.info("left as it is: %s: not complete: %s", self._path(save), save.reason)
            else:
                drained = False
                remedy = "watch -once with this attempt and epoch tries again"
                log.error("not published: %s: %s (%s)", self._path(save), save.failure or "time ran out", remedy)
        if drained and not self._met:
            what = "nothing found: %s: no %s<step>/ was there (does training write there, and is it %s?)"
            log.warning(what, self._path(), self._framework.prefix, self._framework.name)
        return drained
