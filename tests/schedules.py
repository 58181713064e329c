"""Every order in which the store operations of several actors can take place: a scheduler for tests.

An actor is a coroutine over a store of its own view, which stops before each atomic step of an operation until it is that
actor's turn. All orders are gone through, depth first, by running anew from the beginning; what leads to the same contents
and has shown each actor the same is gone on with once. Time is virtual: it passes only when nobody can do a step.
"""

from __future__ import annotations

import asyncio
import selectors
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from publishd.errors import PublishdError
from publishd.stores import Entry

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Hashable

    from fakes import MemoryStore
    from publishd.stores import Finding, Store

    Actor = Callable[[Store], Coroutine[Any, Any, object]]
    """What it returns, or the PublishdError it raises, is its outcome."""


@dataclass(frozen=True)
class Scenario:
    """A beginning, and those who act upon it."""

    begin: Callable[[], MemoryStore]
    actors: dict[str, Actor]
    kills: int = 0
    """How many actors may be killed, each between any two steps."""
    interruptions: int = 10**9
    """How often an actor that could go on may have to wait for another."""
    beginning: tuple[str, ...] = ()
    """Who does the first steps; from then on everybody may."""


@dataclass
class Ending:
    """How one order came out."""

    contents: MemoryStore
    outcomes: dict[str, object]
    killed: tuple[str, ...]
    order: tuple[str, ...]
    """What was done, step by step, for people."""

    def __str__(self) -> str:
        return "\n".join((*self.order, f"outcomes: {self.outcomes}", f"killed: {self.killed}", *sorted(self.contents.contents)))


class _Clock(selectors.SelectSelector):
    """Waits no moment, but tells the loop that it did."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return []


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    @property
    def idle(self) -> bool:
        """Whether nothing can go on before time passes or somebody is given a turn."""
        return not self._ready  # type: ignore[attr-defined] # the loop's own, which nothing public tells


@dataclass
class _Step:
    """A step that an actor is about to do."""

    actor: str
    what: str
    turn: asyncio.Future[None] = field(repr=False)


class _Run:
    """One order, from the beginning: the given choices first, then always the first there is."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.store = scenario.begin()
        self.pending: list[_Step] = []
        self.seen: dict[str, list[Hashable]] = {name: [] for name in scenario.actors}
        self.outcomes: dict[str, object] = {}
        self.killed: list[str] = []
        self.order: list[str] = []
        self.last = ""
        self.interruptions = 0
        self.over = False

    async def act(self, name: str) -> None:
        try:
            self.outcomes[name] = await self.scenario.actors[name](_View(self, name))
        except PublishdError as error:
            self.outcomes[name] = error

    def options(self) -> list[tuple[str, str]]:
        alive = [step for step in self.pending if step.actor not in self.killed]
        if len(self.order) < len(self.scenario.beginning):
            first = self.scenario.beginning[len(self.order)]
            return [("does", f"{step.actor}: {step.what}") for step in alive if step.actor == first]
        kills = sorted({step.actor for step in alive}) if len(self.killed) < self.scenario.kills else []
        if self.interruptions >= self.scenario.interruptions:
            alive = [step for step in alive if step.actor == self.last] or alive
        return [("does", f"{step.actor}: {step.what}") for step in alive] + [("kill", actor) for actor in kills]

    def choose(self, option: tuple[str, str]) -> None:
        kind, what = option
        self.order.append(" ".join(option))
        if kind == "kill":
            self.killed.append(what)
            return
        step = next(step for step in self.pending if f"{step.actor}: {step.what}" == what)
        if len(self.order) > len(self.scenario.beginning):
            self.interruptions += step.actor != self.last and self.last not in self.killed and self._can_go_on(self.last)
        self.last = step.actor
        self.pending.remove(step)
        step.turn.set_result(None)

    def _can_go_on(self, actor: str) -> bool:
        return any(step.actor == actor for step in self.pending)

    @property
    def state(self) -> Hashable:
        seen = tuple(tuple(self.seen[name]) for name in self.scenario.actors)
        parked = tuple(sorted(f"{step.actor} {step.what}" for step in self.pending))
        bound = (self.last, self.interruptions) if self.scenario.interruptions < 10**9 else ()
        return (
            frozenset(self.store.contents.items()),
            seen,
            parked,
            tuple(self.killed),
            bound,
            len(self.order) < len(self.scenario.beginning),
        )

    def ending(self) -> Ending:
        return Ending(self.store, self.outcomes, tuple(self.killed), tuple(self.order))


class _View:
    """The store as one actor sees it; of each operation the steps that MemoryStore takes, each in its turn."""

    def __init__(self, run: _Run, actor: str) -> None:
        self._run, self._actor, self._inner = run, actor, run.store
        self.root, self.consistent, self.concurrency = run.store.root, run.store.consistent, run.store.concurrency

    async def _stepwise(self, what: str, operation: Coroutine[Any, Any, Any]) -> Any:
        try:
            operation.send(None)  # to where its first step is to be done
            number = 0
            while True:
                number += 1
                await self._turn(f"{what} ({number})")
                operation.send(None)
        except StopIteration as done:
            self._saw(what, done.value)
            return done.value
        except PublishdError as error:
            self._saw(what, type(error).__name__)
            raise
        finally:
            operation.close()

    async def _turn(self, what: str) -> None:
        if self._run.over:
            raise asyncio.CancelledError
        step = _Step(self._actor, what, asyncio.get_running_loop().create_future())
        self._run.pending.append(step)
        await step.turn

    def _saw(self, what: str, value: object) -> None:
        if isinstance(value, list):  # inodes are numbered by who looked first, which is nothing to tell states by
            value = tuple(tuple(entry[:2]) if isinstance(entry, Entry) else entry for entry in value)
        self._run.seen[self._actor].append((what, value))

    async def list(self, folder: str, prefix: str = "") -> list[Entry]:
        found: list[Entry] = await self._stepwise(f"list {folder}", self._inner.list(folder, prefix))
        return found

    async def exists(self, key: str) -> bool:
        found: bool = await self._stepwise(f"exists {key}", self._inner.exists(key))
        return found

    async def read(self, key: str, limit: int) -> bytes:
        content: bytes = await self._stepwise(f"read {key}", self._inner.read(key, limit))
        return content

    async def stream(self, key: str) -> AsyncGenerator[bytes, None]:
        yield await self._stepwise(f"read {key}", self._inner.read(key, 1 << 20))

    async def create(self, key: str) -> None:
        await self._stepwise(f"create {key}", self._inner.create(key))

    async def make_folder(self, folder: str) -> None:
        await self._stepwise(f"make {folder}", self._inner.make_folder(folder))

    async def move(self, key: str, to: str) -> None:
        await self._stepwise(f"move {key}", self._inner.move(key, to))

    async def delete(self, key: str) -> None:
        await self._stepwise(f"delete {key}", self._inner.delete(key))

    async def delete_tree(self, key: str, first: Collection[str] = ()) -> None:
        await self._stepwise(f"delete_tree {key}", self._inner.delete_tree(key, first))

    # Nobody else can tell that or when these were done.

    async def sync(self, key: str, *, recursive: bool) -> None:
        await self._inner.sync(key, recursive=recursive)

    async def locate(self, save: str) -> str:
        return await self._inner.locate(save)

    async def name_limit(self) -> int:
        return await self._inner.name_limit()

    async def diagnose(self) -> list[Finding]:  # type: ignore[valid-type] # list is a method here
        return []

    async def aclose(self) -> None:
        pass


@dataclass
class Explored:
    """What was gone through."""

    endings: int = 0
    states: int = 0


def explore(
    scenario: Scenario,
    check: Callable[[Ending], None],
    *,
    always: Callable[[MemoryStore], None] | None = None,
    limit: int = 10**9,
) -> Explored:
    """Run every order and check each ending, and with `always` each state on the way.

    Raises AssertionError, with the order, where a check does; also where there are more states than `limit`.
    """
    visited: set[Hashable] = set()
    todo: list[tuple[tuple[str, str], ...]] = [()]
    explored = Explored()
    loop = _Loop()
    try:
        while todo:
            run = loop.run_until_complete(_one(loop, scenario, todo.pop(), visited, todo, always))
            if run:
                explored.endings += 1
                _checked(run, lambda run=run: check(run.ending()))  # type: ignore[misc]
            assert len(visited) <= limit, f"more than {limit} states"
    finally:
        loop.close()
    explored.states = len(visited)
    return explored


async def _one(
    loop: _Loop,
    scenario: Scenario,
    prefix: tuple[tuple[str, str], ...],
    visited: set[Hashable],
    todo: list[tuple[tuple[str, str], ...]],
    always: Callable[[MemoryStore], None] | None,
) -> _Run | None:
    """The run, if it came to an end that no other came to."""
    run = _Run(scenario)
    tasks = {name: loop.create_task(run.act(name)) for name in scenario.actors}
    chosen: list[tuple[str, str]] = []
    try:
        while await _settled(loop, run, tasks):
            if len(chosen) < len(prefix):
                option = prefix[len(chosen)]
            else:
                if run.state in visited:
                    return None
                visited.add(run.state)
                option, *others = run.options()
                todo += [(*chosen, other) for other in others]
            chosen.append(option)
            run.choose(option)
            if always and option[0] == "does":
                while not loop.idle:
                    await asyncio.sleep(0)
                _checked(run, lambda: always(run.store))
        for name, task in tasks.items():
            if name not in run.killed:
                task.result()  # a bug is raised here
        return run
    finally:
        run.over = True
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def _settled(loop: _Loop, run: _Run, tasks: dict[str, asyncio.Task[None]]) -> bool:
    """Let everybody go on until there is a choice; False if all are done or killed."""
    while True:
        while not loop.idle:
            await asyncio.sleep(0)
        if run.options():
            return True
        if all(task.done() for name, task in tasks.items() if name not in run.killed):
            return False
        await asyncio.sleep(1)


def _checked(run: _Run, check: Callable[[], None]) -> None:
    try:
        check()
    except AssertionError as error:
        raise AssertionError(f"{error}\n{run.ending()}") from error
