"""Publishers, watches and prunes in every order of their store operations: what rules 5 and 12 promise holds in each."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from commands import ATTEMPT, EPOCH
from fakes import MemoryStore
from publishd.errors import NotFound, NotPublished
from publishd.frameworks import FRAMEWORKS
from publishd.prune import Result, prune
from publishd.publications import Announced, Publication, Saves, parse, publish
from publishd.stores import PRUNE, PUB
from publishd.watch import Watcher, WatchOptions
from schedules import Ending, Scenario, explore
from soaking import soaking

if TYPE_CHECKING:
    from collections.abc import Callable

    from publishd.stores import Entry, Store
    from schedules import Actor

FILES = ("model", "trainer_state.json")
OLD, NEW = f"exec/{ATTEMPT}/checkpoint-1", f"exec/{ATTEMPT}/checkpoint-2"
UNPUBLISHED = f"exec/{ATTEMPT}/checkpoint-9-copy"


def save(store: MemoryStore, path: str) -> None:
    step = path.rpartition("-")[2]
    store.write(f"{path}/model", b"weights")
    store.write(f"{path}/trainer_state.json", b'{"global_step": %s}' % step.encode())


class Folders(MemoryStore):
    """As on a file system `pub/` and `prune/` stay, empty or not."""

    async def list(self, folder: str, prefix: str = "") -> list[Entry]:
        try:
            return await super().list(folder, prefix)
        except NotFound:
            if folder in (PUB, PRUNE):
                return []
            raise


def two_published(
    *, two_step: bool, consistent: bool, records: tuple[int, ...] = (), extra: tuple[str, ...] = ()
) -> Callable[[], MemoryStore]:
    """Saves 1 and 2, published; the entries of `records` are withdrawn, by a prune that was killed then."""

    def begin() -> MemoryStore:
        store = (MemoryStore if consistent else Folders)(two_step_move=two_step, consistent=consistent)
        for step, path in ((1, OLD), (2, NEW)):
            save(store, path)
            publication = Publication(EPOCH, step, path)
            store.write(publication.record if step in records else publication.key)
        for path in (*extra, UNPUBLISHED):
            save(store, path)
        return store

    return begin


async def prunes(store: Store) -> object:
    return await prune(store, 1, lambda *_: None)


def publishes(path: str, step: int) -> Actor:
    return partial(_publish, publication=Publication(EPOCH, step, path))


async def _publish(store: Store, *, publication: Publication) -> object:
    return await publish(store, publication)


async def watches(store: Store) -> object:
    options = WatchOptions(ATTEMPT, EPOCH, drain=3.0)
    return await Watcher(store, FRAMEWORKS["hf"], options, asyncio.Event()).run(once=True)


def state_of(store: MemoryStore, path: str) -> str:
    there = set(store.names(path))
    return "whole" if there == set(FILES) else "half" if there else "gone"


def check(ending: Ending, *, stands: tuple[Publication, ...] = ()) -> None:
    """What must be so once all have ended, at once and after one more prune."""
    store, outcomes = ending.contents, ending.outcomes
    for name, outcome in outcomes.items():
        assert not isinstance(outcome, Result) or outcome.failed == [], f"{name} failed"
    told_yes = any(outcome in (Announced.CREATED, Announced.EXISTED) for outcome in outcomes.values())
    told_no = any(isinstance(outcome, NotPublished) for outcome in outcomes.values()) and not ending.killed
    for publication in stands:
        assert not told_yes or publication.key in store.contents, "a publication that was reported is not there"
        assert told_yes or not told_no or publication.key not in store.contents, "a publication that was refused is there"
    prunes_ = sum("prune" in name for name in (*outcomes, *ending.killed))
    # What is withdrawn is not lost: resolve refuses to call it nothing, and the next prune publishes it again.
    assert store.names("pub") or (store.names("prune") and prunes_ > 1), "nothing is published any more"
    latest = (store.names("pub") or store.names("prune"))[-1]
    assert state_of(store, parse(latest).path) != "half", "the latest publication names half a save"
    publisher_died = any("publish" in name or "watch" in name for name in ending.killed)
    if not ending.killed and prunes_ == 1:  # of two, one may return an entry while the other removes its save
        check_entries(store, publisher_died=False)
    finish(store)
    check_entries(store, publisher_died=publisher_died)
    standing = Saves(parse(name).path for name in store.names("pub"))
    for name in store.names("prune"):
        assert standing.touch(parse(name).path), "a record is left that nothing needs"
    assert state_of(store, UNPUBLISHED) == "whole", "what nobody published was touched"


def check_entries(store: MemoryStore, *, publisher_died: bool) -> None:
    """One that died between its create and its second look could not take its entry back: it may name what is gone."""
    assert store.names("pub"), "nothing is published any more"
    for name in store.names("pub"):
        state = state_of(store, parse(name).path)
        assert state == "whole" or (state == "gone" and publisher_died), f"{parse(name)} names a save that is {state}"


def finish(store: MemoryStore) -> None:
    """One more prune, undisturbed."""
    result = asyncio.run(prune(store, 1, lambda *_: None))
    assert result.failed == []


KINDS: dict[str, dict[str, Any]] = {
    "one-step": {"two_step": False, "consistent": False},
    "two-step": {"two_step": True, "consistent": False},
    "two-step, consistent": {"two_step": True, "consistent": True},
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
kills = pytest.mark.parametrize("kill", [0, 1], ids=["", "one is killed"])


def go_through(scenario: Scenario, check_: Callable[[Ending], None]) -> None:
    assert explore(scenario, check_).endings > 1


@kinds
@kills
def test_a_publication_at_a_higher_step_while_prune_removes_that_save(kind: dict[str, Any], kill: int) -> None:
    """Either the publisher is told no, and the save goes, or its entry stands and the save is whole."""
    scenario = Scenario(two_published(**kind), {"prune": prunes, "publish": publishes(OLD, 7)}, kill)
    go_through(scenario, partial(check, stands=(Publication(EPOCH, 7, OLD),)))


@kinds
@kills
def test_a_prune_killed_after_its_first_move_then_a_publication_and_the_next_prune(kind: dict[str, Any], kill: int) -> None:
    """The publisher is told no while the record stands; the save goes, or its entry stands and it is whole."""
    begin = two_published(**kind, records=(1,))
    scenario = Scenario(begin, {"prune": prunes, "publish": publishes(OLD, 7)}, kill)
    go_through(scenario, partial(check, stands=(Publication(EPOCH, 7, OLD),)))


@kinds
@kills
def test_two_prunes_at_once(kind: dict[str, Any], kill: int) -> None:
    """Both succeed, and the latest stays."""
    go_through(Scenario(two_published(**kind), {"prune": prunes, "second prune": prunes}, kill), check)


LATER = f"exec/{ATTEMPT}/checkpoint-3"
PUBLISHED_LATER = partial(check, stands=(Publication(EPOCH, 3, LATER),))


@kinds
@kills
def test_a_watch_beside_a_prune(kind: dict[str, Any], kill: int) -> None:
    """The watch has a complete save to publish, later than all; the prune may or may not count it."""
    actors: dict[str, Actor] = {"prune": prunes, "watch": watches}
    interruptions = (4 if kill == 0 else 3) if soaking() else 2
    go_through(Scenario(two_published(**kind, extra=(LATER,)), actors, kill, interruptions), PUBLISHED_LATER)


@kinds
@pytest.mark.parametrize("prunes_too", [False, True], ids=["", "two prunes"])
def test_two_watches_beside_prunes(kind: dict[str, Any], prunes_too: bool) -> None:
    """One entry comes of two watches, whatever prunes do meanwhile."""
    actors: dict[str, Actor] = {"prune": prunes, "watch": watches, "second watch": watches}
    if prunes_too:
        actors["second prune"] = prunes
    go_through(Scenario(two_published(**kind, extra=(LATER,)), actors, 0, 2 if soaking() else 1), PUBLISHED_LATER)


@kinds
def test_two_prunes_and_a_publication_at_a_higher_step(kind: dict[str, Any]) -> None:
    """What one prune counts as later may be taken back because of the other's record: nothing is lost for good."""
    actors: dict[str, Actor] = {"prune": prunes, "second prune": prunes, "publish": publishes(OLD, 7)}
    go_through(Scenario(two_published(**kind), actors, 0, 3 if soaking() else 2), check)


# A prune makes its plan in three steps and moves its victim in the fourth; a publisher creates its entry in its fourth.
FOUND = {
    "a stale prune's record is met by the publisher of what another prune counts": (
        *("prune",) * 3,
        *("publish",) * 4,
        *("second prune",) * 3,
    ),
    "what is counted bears a record already": (*("prune",) * 3, *("publish",) * 4, "prune", *("second prune",) * 3),
    "one prune is about to delete when another finds its record": (
        *("prune",) * 3,
        *("publish",) * 3,
        *("prune",) * 3,
        "publish",
    ),
}


@pytest.mark.parametrize("beginning", FOUND.values(), ids=FOUND)
def test_orders_that_once_lost_a_save(beginning: tuple[str, ...]) -> None:
    """What was found by going through far more orders, and all that can follow it within three interruptions."""
    actors: dict[str, Actor] = {"prune": prunes, "second prune": prunes, "publish": publishes(OLD, 7)}
    begin = two_published(two_step=False, consistent=False)
    go_through(Scenario(begin, actors, 0, 4 if soaking() else 3, beginning), partial(check, stands=(Publication(EPOCH, 7, OLD),)))


def test_what_bears_a_record_by_now_supersedes_nothing() -> None:
    """It was counted before another prune made the record; where its publisher takes it back the older one is the latest."""

    def check_(ending: Ending) -> None:
        if isinstance(ending.outcomes["publish"], NotPublished):
            assert state_of(ending.contents, NEW) == "whole"
            assert Publication(EPOCH, 2, NEW).key in ending.contents.contents
        check(ending)

    actors: dict[str, Actor] = {"prune": prunes, "second prune": prunes, "publish": publishes(OLD, 7)}
    beginning = (*("prune",) * 3, *("publish",) * 4, *("second prune",) * 3, "prune", "publish")
    go_through(Scenario(two_published(two_step=False, consistent=False), actors, 0, 1, beginning), check_)
