"""The Watcher over a store in memory that waits, fails and changes where a script says so: no clocks, no luck."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

import pytest

from fakes import FaultyStore, MemoryStore, after, before, fails, loses_reply, passes, waits
from publishd.errors import Denied, NoSpace, NotPublished, StoreError, SyncFailed, Unavailable
from publishd.frameworks import FRAMEWORKS
from publishd.publications import Publication
from publishd.stores import Kind
from publishd.watch import Watcher, WatchOptions

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from fakes import Effect

FOLDER = "exec/a"
SECONDS = 20.0
"""How long a test waits for what must come about, and a watch for what may."""


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses of a drain and of a linger, short enough for a test."""
    monkeypatch.setattr("publishd.watch._RETRY_INTERVAL", 0.001)
    monkeypatch.setattr("publishd.watch._URGENT_INTERVAL", 0.001)


class Scene(FaultyStore):
    """A root in memory with one execution's folder, whose calls follow a script."""

    def __init__(self, *script: tuple[str, str, Effect]) -> None:
        super().__init__(MemoryStore(), script)
        self.memory: MemoryStore = self.inner  # type: ignore[assignment]
        self.memory.write("exec/other/keep", b"")

    def dcp(self, *steps: int) -> Self:
        """Complete DCP saves."""
        for step in steps:
            self.memory.write(f"{FOLDER}/step-{step}/.metadata")
        return self

    def hf(self, *steps: int) -> Self:
        """Complete Trainer saves."""
        for step in steps:
            self.memory.write(f"{FOLDER}/checkpoint-{step}/trainer_state.json", b'{"global_step": %d}' % step)
        return self

    @property
    def steps(self) -> list[int]:
        return [int(name.split("-")[1]) for name in self.memory.names("pub")]

    @property
    def created(self) -> list[int]:
        """The steps whose entries were tried to create, in that order."""
        return [int(key.split("-")[1]) for operation, key in self.calls if operation == "create"]

    @property
    def scans(self) -> int:
        return self.count("list", FOLDER)


def entry(step: int, epoch: int = 1, path: str = "") -> Publication:
    return Publication(epoch, step, path or f"{FOLDER}/step-{step}")


async def until(condition: Callable[[], object]) -> None:
    """Let the others run until the condition holds."""
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0)


class Watching:
    """A Watcher that runs beside the test."""

    def __init__(self, scene: Scene, framework: str, once: bool, **options: Any) -> None:
        self._scene, self._stop = scene, asyncio.Event()
        watch_options = WatchOptions("a", 1, **{"interval": 0.001, "drain": SECONDS, **options})
        self._watcher = Watcher(scene, FRAMEWORKS[framework], watch_options, self._stop)
        self.task = asyncio.create_task(self._watcher.run(once=once))

    async def until(self, condition: Callable[[], object]) -> None:
        """As `until`, but it must not end before."""

        def holds() -> object:
            if self.task.done():
                self.task.result()
            return condition()

        await until(holds)

    async def published(self, *steps: int) -> None:
        await self.until(lambda: self._scene.steps == list(steps))

    async def scanned(self, times: int = 1) -> None:
        """Wait for so many whole scans that begin after this call."""
        before = self._scene.scans
        await self.until(lambda: self._scene.scans > before + times)

    def stop(self) -> None:
        self._stop.set()

    async def ended(self) -> bool:
        async with asyncio.timeout(SECONDS):
            return await self.task

    async def drained(self) -> bool:
        """Stop it; True if it says that all that is complete is published."""
        self.stop()
        return await self.ended()


@asynccontextmanager
async def watching(scene: Scene, *, framework: str = "dcp", once: bool = False, **options: Any) -> AsyncGenerator[Watching, None]:
    """A watch beside the block, cancelled when that is left."""
    watch = Watching(scene, framework, once, **options)
    try:
        yield watch
    finally:
        watch.task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await watch.task


async def once(scene: Scene, *, framework: str = "dcp", **options: Any) -> bool:
    """One scan and its drain."""
    async with watching(scene, framework=framework, once=True, **options) as watch:
        return await watch.ended()


async def empty(operation: Callable[[], Awaitable[Any]]) -> Any:
    """A listing in which nothing stands."""
    await operation()
    return []


# The order of publications


async def test_the_newest_save_is_published_first() -> None:
    """One scan that finds many saves publishes the greatest step first, by number and not by text."""
    scene = Scene().dcp(9, 10, 100, 2, 30)
    assert await once(scene)
    assert scene.created == [100, 30, 10, 9, 2]


async def test_a_newer_save_overtakes_those_that_wait() -> None:
    """What completes while a publication takes its time comes next, before older ones that waited longer."""
    go = asyncio.Event()
    scene = Scene(("create", "pub/*", waits(go))).dcp(1, 2, 3)
    async with watching(scene) as watch:
        await watch.until(lambda: scene.created == [3])
        scene.dcp(9)
        await watch.scanned(2)
        go.set()
        await watch.published(1, 2, 3, 9)
    assert scene.created == [3, 9, 2, 1]


async def test_a_save_is_not_queued_again_while_its_publication_hangs() -> None:
    """Scans that go on meanwhile neither judge nor publish it a second time."""
    go, reached = asyncio.Event(), asyncio.Event()
    scene = Scene(("create", "pub/*", waits(go, reached=reached))).dcp(1)
    async with watching(scene) as watch:
        await watch.until(reached.is_set)
        judged = scene.count("list", f"{FOLDER}/step-1")
        await watch.scanned(5)
        assert scene.count("list", f"{FOLDER}/step-1") == judged
        go.set()
        assert await watch.drained()
    assert scene.created == [1]


async def test_a_hanging_publication_does_not_stop_the_scans() -> None:
    """While an entry can't be made, what is new is still seen, and its reason told."""
    scene = Scene(("sync", f"{FOLDER}/*", waits(asyncio.Event()))).dcp(1)
    async with watching(scene) as watch:
        await watch.scanned(3)


# Rule 15: what fails is tried again


@pytest.mark.parametrize("error", [Unavailable, NoSpace, Denied])
@pytest.mark.parametrize("operation", ["create", "sync", "list", "name_limit"])
async def test_rule_15_what_failed_is_tried_again(
    operation: str, error: type[StoreError], caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever call fails three times running, the save is published by a later scan, and the failure is said once."""
    scene = Scene(*[(operation, "*", fails(error)) for _ in range(3)]).dcp(1)
    async with watching(scene) as watch:
        await watch.published(1)
        assert await watch.drained()
    assert caplog.text.count("the script says so") == 1


async def test_rule_15_a_lost_reply_is_no_failure() -> None:
    """An entry that was made although the store said otherwise counts as published."""
    scene = Scene(("create", "pub/*", loses_reply())).dcp(1)
    assert await once(scene)
    assert scene.created == [1]


async def test_rule_16_the_drain_tries_again_until_it_succeeds() -> None:
    """After the stop a publication that fails several times is tried again, and in the end nothing is left."""
    scene = Scene(*[("create", "pub/*", fails()) for _ in range(5)]).dcp(1, 2)
    assert await once(scene)
    assert scene.steps == [1, 2]


async def test_rule_16_the_drain_ends_at_its_deadline(caplog: pytest.LogCaptureFixture) -> None:
    """What fails for ever is tried again until the time is up, then named; what could be published is."""
    scene = Scene(*[("create", entry(2).key, fails(Denied)) for _ in range(1000)]).dcp(1, 2)
    assert not await once(scene, drain=0.2)
    assert scene.steps == [1]
    assert "not published: /memory/exec/a/step-2: " in caplog.text
    assert len(scene.created) > 3


@pytest.mark.parametrize(("operation", "key"), [("list", FOLDER), ("list", f"{FOLDER}/step-1"), ("name_limit", "*")])
async def test_rule_16_a_scan_that_hangs_does_not_outlast_the_drain(operation: str, key: str) -> None:
    """Stopped while a scan hangs, the watch ends at the deadline without having published, and says no."""
    reached = asyncio.Event()
    scene = Scene((operation, key, waits(asyncio.Event(), reached=reached))).dcp(1)
    async with watching(scene, drain=0.05) as watch:
        await watch.until(reached.is_set)
        assert not await watch.drained()
    assert scene.steps == []


async def test_rule_16_a_scan_that_hung_is_followed_by_the_last_one() -> None:
    """Released within the drain, the scan that hung gives way to a last one, which goes on with what is newest then."""
    go, reached = asyncio.Event(), asyncio.Event()
    scene = Scene(("list", f"{FOLDER}/step-1", waits(go, reached=reached))).dcp(0, 1)
    async with watching(scene) as watch:
        await watch.until(reached.is_set)
        watch.stop()
        scene.dcp(9)
        go.set()
        assert await watch.ended()
    assert scene.created == [1, 9, 0]


async def test_rule_16_linger_goes_on_scanning() -> None:
    """With a linger a save that completes after the stop is published before the last scan."""
    scene = Scene()
    async with watching(scene, linger=SECONDS) as watch:
        watch.stop()
        await watch.scanned(3)
        await watch.published(*scene.dcp(1).steps, 1)
        assert not watch.task.done()


# Rule 2: what could not be made durable


async def test_rule_2_a_failed_sync_is_remembered_and_named_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """A save whose sync failed once is never published by this watch; it is said once, and named at the end."""
    scene = Scene(("sync", f"{FOLDER}/step-1", fails(SyncFailed))).dcp(1, 2)
    async with watching(scene) as watch:
        await watch.published(2)
        await watch.scanned(3)
        said = caplog.text.count("the script says so")
        assert not await watch.drained()
    assert (scene.steps, said) == ([2], 1)
    assert "not published: /memory/exec/a/step-1" in caplog.text


async def test_rule_2_a_failed_sync_is_remembered_while_the_save_is_out_of_sight() -> None:
    """Nor is it published after listings that did not show it: a later sync that succeeds proves nothing."""
    scene = Scene(("sync", f"{FOLDER}/step-1", fails(SyncFailed))).dcp(1)
    async with watching(scene) as watch:
        await watch.until(lambda: scene.count("sync", f"{FOLDER}/step-1") == 1)
        await watch.scanned()
        scene.script += [("list", FOLDER, empty)]
        await watch.until(lambda: not scene.script)
        await watch.scanned(3)
        assert not await watch.drained()
    assert scene.created == []


async def test_rule_2_pub_is_synced_once_when_the_watch_starts() -> None:
    """Entries that an earlier watch made just before it died are made durable first."""
    scene = Scene()
    scene.memory.write(entry(7).key)
    async with watching(scene) as watch:
        await watch.scanned(3)
    assert scene.count("sync", "pub") == 1


# Rule 5: looking again


async def test_rule_5_an_entry_is_withdrawn_when_its_save_is_gone() -> None:
    """A save that vanished before the create leaves no entry; made anew, it is published."""
    scene = Scene().dcp(1)
    scene.script = [("create", "pub/*", before(lambda: scene.memory.remove(f"{FOLDER}/step-1")))]
    async with watching(scene) as watch:
        await watch.until(lambda: scene.count("delete", entry(1).key))
        await watch.published()
        scene.dcp(1)
        await watch.published(1)
        assert await watch.drained()


@pytest.mark.parametrize("path", [f"{FOLDER}/step-1", f"{FOLDER}/step-1/inside"])
async def test_rule_5_an_entry_is_withdrawn_when_a_prune_recorded_its_save(path: str) -> None:
    """A record that a prune made meanwhile takes the entry back; once it is gone the save is published."""
    scene = Scene().dcp(1)
    record = entry(1, path=path).record
    scene.script = [("create", "pub/*", after(lambda: scene.memory.write(record)))]
    async with watching(scene) as watch:
        await watch.until(lambda: scene.count("delete", entry(1).key))
        await watch.scanned(3)
        assert (scene.steps, scene.created) == ([], [1])
        scene.memory.remove(record)
        await watch.published(1)
        assert await watch.drained()


async def test_rule_12_a_recorded_save_is_never_published() -> None:
    """While a prune has the save in prune/, no entry is made, by no scan and no drain."""
    scene = Scene().dcp(1)
    scene.memory.write(entry(1).record)
    async with watching(scene, drain=0.05) as watch:
        await watch.scanned(3)
        await watch.drained()
    assert scene.created == []


async def test_rule_16_a_save_whose_record_is_dropped_during_the_drain_is_published() -> None:
    """A prune that leaves the save after all gives it back, complete and unpublished: the drain tries again."""
    scene = Scene().dcp(1)
    scene.memory.write(entry(1).record)
    scene.script = [("list", "prune", after(lambda: scene.memory.remove(entry(1).record)))]
    assert await once(scene)
    assert scene.steps == [1]


async def test_rule_5_an_entry_that_was_taken_back_is_not_settled() -> None:
    """Scanner and publisher look again at once: where one sees the save gone and takes the entry back, it is published anew."""
    go, withdraw, reached = asyncio.Event(), asyncio.Event(), asyncio.Event()
    scene = Scene().dcp(1)
    looks: list[tuple[str, str, Effect]] = [
        ("list", FOLDER, waits(go)),
        ("list", FOLDER, empty),
        ("delete", entry(1).key, waits(withdraw, reached=reached)),
    ]
    scene.script = [("create", "pub/*", after(lambda: scene.script.extend(looks)))]
    async with watching(scene) as watch:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.2):  # it is as well if the two never look at once
                await reached.wait()
        go.set()
        for _ in range(100):
            await asyncio.sleep(0)  # the one that saw the save is done
        withdraw.set()
        await watch.scanned(10)
        assert scene.steps == [1]


# Settled saves


async def test_a_save_published_by_hand_at_another_step_is_settled() -> None:
    """A publication at whatever step and epoch names the save; it gets no second one, found before or after the start."""
    scene = Scene().dcp(1)
    scene.memory.write(entry(77, epoch=5, path=f"{FOLDER}/step-1").key)
    async with watching(scene) as watch:
        await watch.scanned(2)
        scene.memory.write(entry(78, path=f"{FOLDER}/step-2").key)
        scene.dcp(2)
        await watch.scanned(2)
        assert await watch.drained()
    assert scene.steps == [78, 77]


async def test_a_folder_made_anew_under_the_name_of_a_settled_one_is_judged_again() -> None:
    """Another inode is another save: not published before it is complete, and published then."""
    scene = Scene().dcp(1)
    async with watching(scene) as watch:
        await watch.published(1)
        scene.memory.remove(f"{FOLDER}/step-1")
        scene.memory.remove(entry(1).key)
        scene.memory.write(f"{FOLDER}/step-1/shard", b"")
        await watch.scanned(3)
        assert scene.steps == []
        scene.dcp(1)
        await watch.published(1)


@pytest.mark.parametrize("watches", [2, 5])
async def test_rule_1_many_watches_of_one_folder_are_harmless(watches: int, caplog: pytest.LogCaptureFixture) -> None:
    """Each save gets one entry, and every watch says that all is published, with nothing to complain about."""
    caplog.set_level("WARNING")
    scene = Scene().dcp(1, 2, 3)
    assert await asyncio.gather(*[once(scene) for _ in range(watches)]) == [True] * watches
    assert scene.steps == [1, 2, 3]
    assert caplog.text == ""


# Pruning beside it


async def test_keep_never_delays_a_publication() -> None:
    """While a prune hangs, further saves are published; when it goes on, N are left at the end."""
    go, reached = asyncio.Event(), asyncio.Event()
    scene = Scene(("delete_tree", "*", waits(go, reached=reached))).dcp(1, 2)
    async with watching(scene, keep=1) as watch:
        await watch.until(reached.is_set)
        scene.dcp(3, 4)
        await watch.until(lambda: {3, 4} <= set(scene.steps))
        go.set()
        assert await watch.drained()
    assert scene.steps == [4]
    assert scene.memory.names(FOLDER) == ["step-4"]


async def test_a_prune_that_hangs_does_not_outlast_the_drain() -> None:
    """All is published, which is what the exit status tells; the next prune finishes what this one could not."""
    scene = Scene(("delete_tree", "*", waits(asyncio.Event()))).dcp(1, 2)
    assert await once(scene, keep=1, drain=0.1)
    assert scene.steps == [2]


async def test_with_keep_a_watch_begins_by_finishing_a_prune_that_was_killed() -> None:
    """A save that it withdrew is neither to be published nor waited for: it goes, although nothing new is published."""
    scene = Scene().dcp(1, 2)
    scene.memory.write(entry(2).key)
    scene.memory.write(entry(1).record)
    assert await once(scene, keep=1)
    assert scene.steps == [2]
    assert scene.memory.names(FOLDER) == ["step-2"]
    assert scene.memory.names("prune") == []


async def test_without_keep_nothing_is_pruned() -> None:
    """A watch that was given no -keep removes nothing."""
    scene = Scene().dcp(*range(20))
    assert await once(scene)
    assert (scene.count("move"), scene.count("delete"), scene.count("delete_tree")) == (0, 0, 0)


# Rule 14: what a scan costs


def between_scans(scene: Scene) -> list[tuple[str, str]]:
    """The calls of the last whole scan."""
    starts = [number for number, call in enumerate(scene.calls) if call == ("list", FOLDER)]
    return scene.calls[starts[-2] : starts[-1]]


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_rule_14_a_steady_scan_is_one_listing(framework: str) -> None:
    """Whatever is settled costs nothing, found published or published by this watch, and so does what is no save."""
    scene = Scene().dcp(*range(50)).hf(*range(50))
    scene.memory.write(entry(7).key)
    async with watching(scene, framework=framework) as watch:
        await watch.until(lambda: len(scene.steps) >= 50)
        await watch.until(lambda: between_scans(scene) == [("list", FOLDER)])
        await watch.scanned(3)
        assert between_scans(scene) == [("list", FOLDER)]
    assert len(scene.steps) >= 50


@pytest.mark.parametrize(("framework", "content", "calls"), [("hf", b"{", 2), ("dcp", None, 1)])
async def test_rule_14_an_unsettled_save_costs_a_listing_and_a_marker_read(
    framework: str, content: bytes | None, calls: int
) -> None:
    """Per incomplete save a scan lists it once and reads its marker once, where the framework's marker has to be read."""
    scene = Scene()
    for step in (1, 2, 3):
        row = FRAMEWORKS[framework]
        scene.memory.write(f"{FOLDER}/{row.prefix}{step}/{row.marker if content else 'shard'}", content or b"")
    async with watching(scene, framework=framework) as watch:
        await watch.scanned(3)
        assert len(between_scans(scene)) == 1 + 3 * calls


# Bugs end it


BUGS = [
    ("scanner", "list", FOLDER),
    ("scanner", "name_limit", "*"),
    ("publisher", "create", "pub/*"),
    ("publisher", "sync", f"{FOLDER}/*"),
    ("pruner", "move", "pub/*"),
]


@pytest.mark.parametrize(("who", "operation", "key"), BUGS)
async def test_rule_15_a_bug_ends_the_watch_with_its_error(who: str, operation: str, key: str) -> None:
    """An error that is not the store's ends the whole watch at once, whichever of its tasks it strikes."""
    bug = RuntimeError(f"a bug in the {who}")
    scene = Scene((operation, key, fails(bug))).dcp(1, 2)
    async with watching(scene, keep=1) as watch:
        await until(watch.task.done)
        with pytest.raises(ExceptionGroup) as raised:
            watch.task.result()
    assert raised.value.subgroup(lambda error: error is bug)


async def test_rule_15_a_bug_ends_a_watch_whose_other_tasks_wait() -> None:
    """Nor does a publication that hangs keep a watch whose scanner is broken."""
    reached = asyncio.Event()
    scene = Scene(("create", "pub/*", waits(asyncio.Event(), reached=reached))).dcp(1)
    async with watching(scene) as watch:
        await watch.until(reached.is_set)
        scene.script = [("list", FOLDER, fails(RuntimeError("a bug")))]
        await until(watch.task.done)
        assert watch.task.exception()


async def test_rule_15_a_bug_in_the_drain_ends_it_too() -> None:
    """The last scan is no exception."""
    scene = Scene(("list", FOLDER, passes), ("list", FOLDER, fails(RuntimeError("a bug"))))
    async with watching(scene, interval=1000) as watch:
        await watch.until(lambda: scene.scans == 1)
        watch.stop()
        await until(watch.task.done)
        assert watch.task.exception()


# Rule 3


async def test_rule_3_an_attempt_too_long_for_any_save_ends_the_watch() -> None:
    """Where not even step 0 would fit, the watch ends at its start."""
    scene = Scene()
    scene.inner = scene.memory = MemoryStore(name_limit=60)
    scene.dcp(1)
    async with watching(scene) as watch:
        await until(watch.task.done)
        with pytest.raises((NotPublished, ExceptionGroup)) as raised:
            watch.task.result()
    assert "names on this store can carry" in repr(raised.value)


# Saves that are replaced, and inodes that are used again


async def test_a_save_replaced_by_a_half_one_while_it_waits_is_not_published() -> None:
    """What was complete when it was found is judged again just before its entry is made."""
    go, reached = asyncio.Event(), asyncio.Event()
    scene = Scene(("sync", f"{FOLDER}/step-9", waits(go, reached=reached))).dcp(1, 9)
    async with watching(scene) as watch:
        await reached.wait()
        await watch.scanned()
        scene.memory.remove(f"{FOLDER}/step-1")
        scene.memory.write(f"{FOLDER}/step-1/__0_0.distcp")
        go.set()
        await watch.published(9)
        assert await watch.drained()
    assert scene.steps == [9]


async def test_rule_16_a_settled_save_that_nothing_names_any_more_is_published_at_the_end() -> None:
    """Its inode is no proof: a save made anew under its name may have got the same one."""
    scene = Scene().dcp(1)
    async with watching(scene) as watch:
        await watch.published(1)
        await watch.scanned()
        scene.memory.remove(entry(1).key)
        await watch.scanned(2)
        assert scene.steps == []
        assert await watch.drained()
    assert scene.steps == [1]


async def test_rule_12_a_settled_save_that_a_prune_withdrew_is_left_alone_at_the_end() -> None:
    """A record names it, so that it is no save that somebody forgot to publish."""
    scene = Scene().dcp(1)
    async with watching(scene) as watch:
        await watch.published(1)
        await watch.scanned()
        scene.memory.remove(entry(1).key)
        scene.memory.write(entry(1).record)
        assert await watch.drained()
    assert scene.steps == []


async def as_links(operation: Callable[[], Awaitable[Any]]) -> Any:
    """A listing in which every folder is a link with the same inode."""
    return [child._replace(kind=Kind.LINK) for child in await operation()]


async def test_a_link_that_becomes_a_folder_of_the_same_inode_is_a_save() -> None:
    """A folder made where a link was removed may get its inode."""
    scene = Scene(("list", FOLDER, as_links)).dcp(1)
    async with watching(scene) as watch:
        await watch.published(1)


async def test_rule_16_a_save_whose_folder_may_not_be_listed_is_no_incomplete_one() -> None:
    """Only an unreadable marker means "not complete yet": here the drain tries again, and publishes."""
    scene = Scene(("list", f"{FOLDER}/step-1", fails(Denied))).dcp(1)
    async with watching(scene, once=True) as watch:
        async with asyncio.timeout(SECONDS):
            assert await watch.task
    assert scene.steps == [1]
