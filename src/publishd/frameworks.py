"""The table of frameworks: is this folder a save, is it complete, and if not, why not.

A framework is a row of `FRAMEWORKS`; the watcher knows none by name. What each writes, and in which order, is described
in `docs/reference.md` (Frameworks).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from publishd.errors import Denied, Linked, NotAFile, NotAFolder, NotFound, TooLarge, Unavailable
from publishd.stores import Kind

if TYPE_CHECKING:
    from publishd.stores import Entry, Store

MAX_STEP = 2**64 - 1

IN_PROCESS_LIMIT = 8 << 20
"""Bytes of marker decoded in this process; a larger one is decoded in a child of its own."""

_CHILD_SECONDS = 600
_SMALL = 64 << 10  # bytes that decode faster than a thread can be asked to
# The child ignores what terminals and schedulers send to everybody: its parent decides what to finish.
_CHILD = """
import json, signal, sys
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
try:
    state = json.load(sys.stdin.buffer)
except (ValueError, RecursionError, MemoryError) as error:
    sys.exit(f"does not decode ({type(error).__name__})")
step = state.get("global_step") if isinstance(state, dict) else None
print(step if type(step) is int else "null")
"""


@dataclass(frozen=True, slots=True)
class Framework:
    """One row: how a framework names its saves, and by which file it shows that one is complete."""

    name: str
    prefix: str
    """What stands before the step in a save folder's name."""
    marker: str
    """The completion marker: a file in the save folder that is written last."""
    states_step: bool = False
    """Whether the marker must be JSON whose `global_step` is the folder's step; otherwise its being there is enough."""
    unfinished: str | None = None
    """The framework's own sign that a save is being written, or was torn; while it stands the save is not complete."""

    def step(self, folder: str) -> int | None:
        """The step of a save folder by its name; None where the name is not one of this framework's saves."""
        digits = folder.removeprefix(self.prefix)
        if digits == folder or not re.fullmatch("0|[1-9][0-9]{0,19}", digits, re.ASCII):
            return None
        step = int(digits)
        return step if step <= MAX_STEP else None

    @property
    def unmarked(self) -> str:
        """The reason of a save whose marker is not written yet, as every save is for a while."""
        return f"no {self.marker} yet"


FRAMEWORKS = {
    framework.name: framework
    for framework in (
        # transformers ≥ 4.39, Trainer._save_checkpoint; the sign is trainer_jit_checkpoint.py's, transformers ≥ 5.
        Framework("hf", "checkpoint-", "trainer_state.json", states_step=True, unfinished="checkpoint-is-incomplete.txt"),
        # torch.distributed.checkpoint, FileSystemWriter.finish: .metadata.tmp renamed once every rank has written.
        Framework("dcp", "step-", ".metadata"),
    )
}


def framework_of(save: str) -> Framework | None:
    """The framework whose saves are named as this one is; None for a save that was published by hand under another name."""
    name = save.rpartition("/")[2]
    return next((framework for framework in FRAMEWORKS.values() if framework.step(name) is not None), None)


async def incomplete(store: Store, framework: Framework, save: str) -> str | None:
    """Why the save is not complete; None if it is.

    As `seems_incomplete`, and then another listing for the framework's sign, which must not stand after the marker was
    read.
    """
    return await seems_incomplete(store, framework, save) or await unfinished(store, framework, save)


async def seems_incomplete(store: Store, framework: Framework, save: str) -> str | None:
    """Why the save is not complete, by one listing of it and one read of its marker; None if they show no reason.

    Of a consistent store the marker is read at once, without a listing. Nothing is remembered between calls. Raises
    StoreError where the store failed in a way that says nothing about the save.
    """
    if store.consistent and framework.states_step:
        return await _misstates(store, framework, save)
    prefix = "" if framework.unfinished else framework.marker
    children = {child.name: child for child in await store.list(save, prefix)}
    reason = _sign(framework, children) or _misses(framework, children)
    if reason or not framework.states_step:
        return reason
    return await _misstates(store, framework, save)


async def unfinished(store: Store, framework: Framework | None, save: str) -> str | None:
    """The framework's own sign that this save is being written or was torn, looked for in a fresh listing."""
    if framework is None or framework.unfinished is None:
        return None
    try:
        return _sign(framework, {child.name: child for child in await store.list(save, framework.unfinished)})
    except NotAFolder:
        return None


def _sign(framework: Framework, children: dict[str, Entry]) -> str | None:
    return f"{framework.unfinished} stands in it" if framework.unfinished in children else None


def _misses(framework: Framework, children: dict[str, Entry]) -> str | None:
    marker = children.get(framework.marker)
    if marker is None:
        return framework.unmarked
    return None if marker.kind is Kind.FILE else f"{framework.marker} is not a regular file"


async def _misstates(store: Store, framework: Framework, save: str) -> str | None:
    marker = f"{save}/{framework.marker}"
    try:
        stated = await _stated_step(store, marker)
    except NotFound:
        return framework.unmarked if store.consistent else f"{framework.marker} vanished"
    except (NotAFile, Linked):
        return f"{framework.marker} is not a regular file"
    except Denied as error:
        # To those who may not list a whole bucket, S3 denies what is not there.
        if store.consistent and framework.marker not in {child.name for child in await store.list(save, framework.marker)}:
            return framework.unmarked
        return f"{framework.marker} cannot be read: {error.cause}"
    except ValueError as error:
        return f"{framework.marker} {error}"
    if stated is None:
        return f"{framework.marker} has no integer global_step"
    return None if stated == framework.step(save.rpartition("/")[2]) else f"{framework.marker} says global_step {stated}"


async def _stated_step(store: Store, marker: str) -> int | None:
    try:
        content = await store.read(marker, IN_PROCESS_LIMIT)
    except TooLarge:
        return await _stated_step_by_child(store, marker)
    return _decode(content) if len(content) < _SMALL else await asyncio.to_thread(_decode, content)


def _decode(content: bytes) -> int | None:
    """`global_step` as Python's json reads it: NaN counts, the last of doubled keys wins; None unless it is an integer."""
    if not content:
        raise ValueError("is empty")
    try:
        state = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"does not decode ({type(error).__name__})") from error
    step = state.get("global_step") if isinstance(state, dict) else None
    return step if type(step) is int else None


async def _stated_step_by_child(store: Store, marker: str) -> int | None:
    pipe = asyncio.subprocess.PIPE
    try:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-c", _CHILD, stdin=pipe, stdout=pipe, stderr=pipe
        )
    except OSError as error:
        raise Unavailable("cannot decode", marker, f"no child for it: {error.strerror}") from error
    assert child.stdin
    try:
        async with asyncio.timeout(_CHILD_SECONDS), aclosing(store.stream(marker)) as pieces:
            with contextlib.suppress(ConnectionError):
                async for piece in pieces:
                    child.stdin.write(piece)
                    await child.stdin.drain()
            child.stdin.close()
            answer, complaint = await child.communicate()
    except TimeoutError:
        raise ValueError(f"takes longer than {_CHILD_SECONDS} s to decode") from None
    finally:
        if child.returncode is None:
            child.kill()
    if child.returncode != 0:
        raise ValueError(
            complaint.decode(errors="replace").strip().partition("\n")[0] or "does not decode (its child was killed)"
        )
    return json.loads(answer)  # type: ignore[no-any-return]
