"""Failed at every step: whichever file system call of a command fails, and how, it says so in one line or gets by without.

A step is a file system call below the root. In CI each of them (of those that are many, every third) fails once, with the
errors in turn, and each kind of call with each error; with PUBLISHD_SOAK ≥ 5 each call fails with each error, once, from then
on, and after it was carried out.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from typing import TYPE_CHECKING

import pytest

from commands import Ran, Root, eventually
from injected import CHANGING, ERRORS, UNTOUCHED, Fault, Kind, Warm
from scenes import SCENES, Stage, Tree, inside, tree
from soaking import soak

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EVERYTHING = soak(100) >= 500
pytestmark = pytest.mark.timeout(3600 if EVERYTHING else 300)
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
MANY = (Kind.CLOSE, Kind.READDIR, Kind.DUP, Kind.FDOPENDIR, Kind.FADVISE, Kind.FSTAT, Kind.LSEEK)
WORSE = ERRORS if EVERYTHING else (errno.EIO, errno.ENOSPC, errno.ENOENT)


def faults(seen: list[Kind]) -> Iterator[Fault]:
    """Those to try on a command that makes these calls."""
    tried: set[tuple[Kind, int]] = set()
    for at, kind in enumerate(seen, 1):
        if kind in MANY and at % 3 and not EVERYTHING:
            continue
        for number in ERRORS if EVERYTHING else (ERRORS[at % len(ERRORS)],):
            tried.add((kind, number))
            yield Fault(at, number)
            if EVERYTHING:
                yield from _worse(at, kind, number)
    for kind in dict.fromkeys(seen):
        places = [at for at, other in enumerate(seen, 1) if other == kind]
        for turn, number in enumerate(ERRORS):
            at = places[turn % len(places)]
            if (kind, number) not in tried:
                yield Fault(at, number)
            if not EVERYTHING and kind in CHANGING and number in WORSE:
                yield from _worse(at, kind, number)


def _worse(at: int, kind: Kind, number: int) -> Iterator[Fault]:
    """The same for good, and the same where only the answer was lost."""
    if number != errno.EINTR:  # which Python answers by trying again
        yield Fault(at, number, lasting=True)
    if kind in CHANGING:
        yield Fault(at, number, carried_out=True)


class Case:
    """One command that suffers one fault.

    Where a call says that something is not there, who wants it gone has no more to do, and who looks for a marker finds none:
    after such a lie less is done, but nothing else.
    """

    def __init__(self, warm: Warm, stage: Stage, fault: Fault, reference: bytes) -> None:
        self.warm, self.scene, self.before, self.fault, self.reference = warm, stage.scene, stage.before, fault, reference
        self.root = stage.root()
        self.lies = fault.effect == errno.ENOENT
        self.less = fault.carried_out or self.lies or (fault.lasting and fault.effect in NO_SPACE)
        """A prune may do less than it says, and leave a save that no record names."""

    def play(self) -> None:
        """Run it, look at what it said and left, and run it again without a fault."""
        drain = ("-drain", "200ms") if self.scene.command in ("watch", "run") and self.fault.lasting else ()
        ran = self.warm.suffer(self.fault, self.root.path, *self.scene.line(self.root, *drain))
        try:
            now = tree(self.root.path)
            self._check_said(ran)
            if not self.fault.lasting:
                self._check_call(ran, now)
            if self.scene.command == "probe":
                now = self._without_what_is_named(now, ran)
            self.scene.check(self.before, now, recorded=not self.less)
            if ran.code == 0 and self.scene.command != "probe":
                self._check_done(ran, now)
            self._finish()
        except AssertionError as error:
            error.add_note(f"{self.fault} on {self.warm.calls.hit}: {ran}")
            raise

    def _check_said(self, ran: Ran) -> None:
        said = ran.err.splitlines()
        assert all(line.startswith(f"publishd {self.scene.command}: ") for line in said), "something else was said"
        assert ran.code in (0, 1)
        if self.scene.answers:
            assert ran.code == 0 or (ran.out, len(said)) == (b"", 1), "an answer and a failure, or no line, or several"
        if self.scene.command == "probe":
            assert (b"FAIL" in ran.out, len(said)) == (ran.code == 1, ran.code)
        # access(2) is asked by Python's os.access, which does not tell why not.
        if ran.code == 1 and not self.lies and self.warm.calls.hit[0] != Kind.ACCESS:
            assert os.strerror(self.fault.effect) in ran.err + ran.out.decode(), "the cause is not named"

    def _check_call(self, ran: Ran, now: Tree) -> None:
        """What is known of the one call that failed."""
        if self.scene.command == "probe":  # which tries some things more than once
            return
        kind, path = self.warm.calls.hit
        silent = os.strerror(self.fault.effect) not in ran.err + ran.out.decode()
        if kind == Kind.FSYNC and self.fault.effect != errno.EINTR:
            assert not silent, "an fsync failed in silence"
            if self.scene.command == "publish":
                assert ran.code == 1
                assert not any(entry in now for entry in self.scene.adds), "published, although an fsync failed"
        if kind == Kind.FADVISE or (kind == Kind.CLOSE and "/pub/" not in path):
            assert ran.code == 0, "failed for a call that does not matter"

    def _check_done(self, ran: Ran, now: Tree) -> None:
        where = os.fsencode(self.root.path)
        answer, reference = ({line.removeprefix(where) for line in out.split(b"\n")} for out in (ran.out, self.reference))
        if self.scene.removes:
            assert answer <= reference
        else:
            assert answer == reference
        if any("left as it is: " in line and "checkpoint-7: " not in line for line in ran.err.splitlines()):
            assert self.fault.effect in (errno.ENOENT, errno.EACCES), "that says nothing of a marker"
        elif not (self.less and self.scene.removes) and not self.scene.finish:
            assert now == self.scene.done(self.before), "it says that it is done, but it is not"

    def _without_what_is_named(self, now: Tree, ran: Ran) -> Tree:
        """What probe says that it left behind; of several it names the first."""
        left = [path for path in now if path.startswith("probe-")]
        for path in left:
            assert path in ran.out.decode() or "probe-…" in ran.out.decode(), "left behind and not named"
            (self.root.path / path).unlink()
        return {path: content for path, content in now.items() if path not in left}

    def _finish(self) -> None:
        self.warm.run(*self.scene.line(self.root)).succeeded()
        if self.scene.finish:
            self.warm.run(*self.scene.finish, "-checkpoint", str(self.root.path)).succeeded()
        now, done = tree(self.root.path), self.scene.done(self.before)
        if self.less:
            orphaned = [save for save in self.scene.removes if save in now and save.startswith("exec/")]
            now = {path: content for path, content in now.items() if not any(inside(path, save) for save in orphaned)}
        assert now == done, "a later run does not finish it"


@pytest.mark.parametrize(
    "name", [name for name in SCENES if EVERYTHING or name not in ("publish, the first", "watch -once -keep")]
)
def test_every_call_fails(name: str, memory_path: Path, warm: Warm) -> None:
    stage = Stage(SCENES[name], memory_path)
    root = stage.root()
    ran = warm.suffer(UNTOUCHED, root.path, *stage.scene.line(root)).succeeded()
    assert tree(root.path) == stage.scene.done(stage.before)
    reference = ran.out.replace(os.fsencode(root.path), b"")
    for fault in faults(warm.calls.seen):
        Case(warm, stage, fault, reference).play()


# A watch that lives on


class Living:
    """A watch in the background, whose calls fail; what it has given up for good, as it must after a failed fsync."""

    def __init__(self, warm: Warm, root: Root) -> None:
        self.warm, self.root = warm, root
        self.given_up: list[int] = []
        self._last = 0

    def start(self) -> None:
        arguments = ("watch", "-checkpoint", str(self.root.path), "-framework", "hf", "-interval", "20ms")
        self._process = self.warm.start(*arguments)

    def save(self) -> int:
        self._last += 1
        self.root.hf(self._last)
        return self._last

    def settled(self, step: int) -> None:
        """Wait until the save is published, or given up where an fsync failed."""

        def is_settled() -> bool:
            if f"/checkpoint-{step}: epoch " in self.warm.log:  # looked at again, so that it stays
                return step in self.root.steps
            calls = self.warm.calls
            if f"not published: {self.root.execution}/checkpoint-{step}: cannot sync: " not in self.warm.log:
                return False
            assert calls.hit[0] == Kind.FSYNC, "given up without need"
            assert step not in self.root.steps
            self.given_up.append(step)
            return True

        eventually(is_settled, f"step {step}, after {self.warm.calls.hit}: {self.warm.log[-2000:]}")

    def stop(self) -> None:
        """It ends with 0, or 1 where it gave something up; and names just that. Another watch publishes the rest."""
        os.kill(self._process, signal.SIGTERM)
        ran = self.warm.ended(self._process)
        assert all(line.startswith("publishd watch: ") for line in ran.err.splitlines()), ran
        assert (ran.code, ran.out) == (1 if self.given_up else 0, b""), ran
        named = {int(step) for step in re.findall(r"not published: \S+/checkpoint-(\d+): cannot sync: .* tries again\)", ran.err)}
        assert named == set(self.given_up), ran
        assert self.root.steps == [step for step in range(1, self._last + 1) if step not in self.given_up]
        self.warm.run("watch", "-checkpoint", str(self.root.path), "-framework", "hf", "-once").succeeded()
        assert self.root.steps == list(range(1, self._last + 1))


def test_a_watch_lives_on_and_publishes_once_the_fault_is_over(memory_path: Path, warm: Warm) -> None:
    root = Root(memory_path / "root").make()
    watch = Living(warm, root)
    watch.start()
    watch.settled(watch.save())
    for turn in range(soak(100)):
        number, at = ERRORS[turn % len(ERRORS)], 1 + turn * 7 % 180
        warm.calls.arm(Fault(at, number), root.path)
        step = watch.save()
        eventually(lambda: warm.calls.hits, "the fault")
        watch.settled(step)
    for number in ERRORS:
        if number != errno.EINTR:
            warm.calls.arm(Fault(1, number, lasting=True), root.path)
            step = watch.save()
            eventually(lambda: warm.calls.hits > 20, "the fault")
            assert step not in root.steps
            warm.calls.disarm()
            watch.settled(step)
    watch.stop()


@pytest.mark.parametrize("turn", range(len(ERRORS) if EVERYTHING else 1))
def test_a_watch_that_begins_amid_a_fault_lives_on(turn: int, memory_path: Path, warm: Warm) -> None:
    for at in range(1, 70):
        root = Root(memory_path / f"root-{at}").make()
        watch = Living(warm, root)
        step = watch.save()
        warm.calls.arm(Fault(at, ERRORS[(at + turn) % len(ERRORS)]), root.path)
        watch.start()
        eventually(lambda: warm.calls.hits, "the fault")
        watch.settled(step)
        warm.calls.disarm()
        watch.stop()
