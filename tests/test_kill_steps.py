"""Killed at every step: whatever publish, prune and a watch had done by then, resolve is right and the next run finishes it.

A step is a file system call below the root. In CI those are counted that change something, for between two of them the disk
is the same; with PUBLISHD_SOAK ≥ 5 all are.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from commands import Root, environment, eventually, require_program, run, whole_lines
from injected import CHANGING, UNTOUCHED, Fault, Kind, Warm
from scenes import SCENES, Scene, Stage, Tree, latest, tree
from soaking import soak

if TYPE_CHECKING:
    from pathlib import Path

STEPS = tuple(Kind) if soak(100) >= 500 else CHANGING
KILLED = -signal.SIGKILL
pytestmark = pytest.mark.timeout(3600 if len(STEPS) > len(CHANGING) else 300)


@pytest.fixture
def stage(request: pytest.FixtureRequest, memory_path: Path) -> Stage:
    return Stage(SCENES[request.param], memory_path)


def check_and_finish(warm: Warm, scene: Scene, root: Root, before: Tree, at: int) -> None:
    """In what a kill left behind all is in order, resolve answers rightly, and the same command again finishes it."""
    now = tree(root.path)
    try:
        scene.check(before, now)
        answer = latest(now)
        warm.run("resolve", "-checkpoint", str(root.path)).succeeded(f"{root.path}/{answer}\n".encode() if answer else b"")
        assert tree(root.path) == now, "resolve changed something"
        warm.run(*scene.line(root)).succeeded()
        if scene.finish:
            warm.run(*scene.finish, "-checkpoint", str(root.path)).succeeded()
        assert tree(root.path) == scene.done(before)
    except AssertionError as error:
        error.add_note(f"killed at {at}")
        raise


@pytest.mark.parametrize(
    "stage", ["publish", "publish, the first", "prune", "watch -once", "watch -once -keep"], indirect=True, ids=str
)
def test_killed_at_every_call(stage: Stage, warm: Warm) -> None:
    scene, before = stage.scene, stage.before
    for at in itertools.count(1):
        root = stage.root()
        ran = warm.suffer(Fault(at), root.path, *scene.line(root), counted=STEPS)
        if not warm.calls.hits:
            break
        assert ran.code == KILLED, ran
        check_and_finish(warm, scene, root, before, at)
    ran.succeeded()
    assert tree(root.path) == scene.done(before)
    assert at > 10, "hardly anything was counted"


@pytest.mark.parametrize("stage", ["watch -once"], indirect=True)
def test_a_watch_that_was_told_to_end_is_killed_at_every_call(stage: Stage, warm: Warm) -> None:
    """What it had not seen yet, for its interval is long, is published after SIGTERM: newest first, and whole."""
    scene, before = stage.scene, stage.before
    for at in itertools.count(1):
        root = stage.root()
        hidden = root.path.parent / "execution"
        root.execution.rename(hidden)
        watch = warm.start("watch", "-checkpoint", str(root.path), "-framework", "hf", "-interval", "1h")
        eventually(lambda: "watching: " in warm.log, "the watch")
        root.execution.parent.mkdir(exist_ok=True)
        hidden.rename(root.execution)
        warm.calls.arm(Fault(at), root.path, STEPS)
        os.kill(watch, signal.SIGTERM)
        ran = warm.ended(watch)
        warm.calls.disarm()
        if not warm.calls.hits:
            break
        assert ran.code == KILLED, ran
        created = set(tree(root.path)) - set(before)
        assert created in (set(), {scene.adds[-1]}, set(scene.adds)), "a newer one was left for an older one"
        check_and_finish(warm, scene, root, before, at)
    ran.succeeded()
    assert tree(root.path) == scene.done(before)
    assert at > 10, "hardly anything was counted"


# The same, seen by the kernel: the installed command under strace


KERNEL_CALLS = "mkdir,mkdirat,unlink,unlinkat,rmdir,rename,renameat,renameat2,fsync,fdatasync"


@pytest.mark.parametrize("stage", ["publish, the first", "prune", "watch -once"], indirect=True)
def test_the_installed_command_is_killed_at_every_call_that_changes_something(stage: Stage, warm: Warm) -> None:
    """Strace counts for each thread, so that this finds fewer instants; but it kills in the kernel, whatever libc was called."""
    strace = require_program("strace", "strace")
    scene, before = stage.scene, stage.before
    for at in itertools.count(1):
        root = stage.root()
        fault = f"inject={KERNEL_CALLS}:signal=SIGKILL:when={at}"
        prefix = (strace, "-f", "-qq", "-o", "/dev/null", "-e", f"trace={KERNEL_CALLS}", "-e", fault)
        ran = run(*scene.line(root), prefix=prefix, env=environment(PYTHONDONTWRITEBYTECODE="1"))
        if ran.code == 0:
            break
        assert ran.code == KILLED, ran
        check_and_finish(warm, scene, root, before, at)
    assert tree(root.path) == scene.done(before)
    assert at > 2, "nothing was hit"


COUNTED = {
    "mkdir": Kind.MKDIR,
    "mkdirat": Kind.MKDIR,
    "unlink": Kind.UNLINK,
    "unlinkat": Kind.UNLINK,
    "rmdir": Kind.UNLINK,
    "rename": Kind.RENAME,
    "renameat": Kind.RENAME,
    "renameat2": Kind.RENAME,
    "fsync": Kind.FSYNC,
    "fdatasync": Kind.FSYNC,
    "fadvise64": Kind.FADVISE,
    "read": Kind.READ,
}
CHANGES_OTHERWISE = "link,linkat,symlink,symlinkat,truncate,ftruncate,chmod,fchmod,fchmodat,chown,fchown,utimensat,mknod,mknodat"


@pytest.mark.parametrize("stage", sorted(SCENES.keys() - {"run"}), indirect=True, ids=str)
def test_no_call_below_the_root_goes_uncounted(stage: Stage, warm: Warm) -> None:
    """The kernel sees as many calls of each kind below the root as the library does. (What COMMAND does is not run's.)"""
    strace = require_program("strace", "strace")
    root = stage.root()
    log = root.path.parent / "strace"
    traced = f"trace=openat,open,creat,{','.join(COUNTED)},{CHANGES_OTHERWISE}"
    prefix = (strace, "-f", "-y", "-s", "1000", "-o", str(log), "-e", traced)
    run(*stage.scene.line(root), prefix=prefix).succeeded()
    kernel = Counter(kind for line in whole_lines(log) if (kind := kind_of(line, root.path)) is not None)
    root = stage.root()
    warm.suffer(UNTOUCHED, root.path, *stage.scene.line(root)).succeeded()
    assert kernel == Counter(kind for kind in warm.calls.seen if kind in kernel or (kind in CHANGING and kind != Kind.WRITE))


def kind_of(line: str, root: Path) -> Kind | None:
    """The kind of the call on a line of a trace, if it is about something below the root."""
    match = re.match(r" *(?:\d+ +)?(\w+)\((.*)\) += ", line)
    if match is None or not re.search(rf'[<"]{re.escape(str(root))}[/>"]', match[2]):
        return None
    if match[1] in ("open", "openat", "creat"):
        return Kind.CREATE if "O_CREAT" in match[2] else Kind.OPEN
    return COUNTED[match[1]]
