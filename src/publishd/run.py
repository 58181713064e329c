"""COMMAND as a child with a Watcher around it: the whole job script in one line.

The child is started, told signals and waited for directly: it keeps stdin, stdout, stderr and whatever else was open,
stays in the process group of this process, and gets SIGTERM from the kernel should this process be killed.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import logging
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from publishd.errors import NotPublished, PublishdError
from publishd.fencing import REMEDY, check_room, conflicts, folder_of
from publishd.publications import read, resolve
from publishd.signals import HEARD
from publishd.watch import Watcher

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from publishd.frameworks import Framework
    from publishd.signals import Signals
    from publishd.stores import Store
    from publishd.watch import WatchOptions

T = TypeVar("T")

log = logging.getLogger(__name__)

_FAILED = 1
_CANNOT_START, _NOT_FOUND = 126, 127
_SIGNALLED = 128
_PR_SET_PDEATHSIG = 1
_LISTENING_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What to run."""

    command: tuple[str, ...]
    environ: Mapping[str, str] = field(repr=False)
    forward: Mapping[signal.Signals, signal.Signals | None]
    """What the child gets instead of a signal; nothing for None."""
    keep: int | None = None


async def run(store: Store, framework: Framework, watch: WatchOptions, options: RunOptions, signals: Signals) -> int:
    """The exit status: COMMAND's, 128+n after signal n, or 1 where that is 0 but a save stayed unpublished or prune failed.

    126 and 127 where COMMAND can't be started or found. Raises PublishdError, with nothing started, where there is no
    answer to resume from, or this execution may not publish.
    """
    resume = await _unless(_prepare(store, framework, watch), signals.stop.wait())
    if resume is None or signals.stop.is_set():
        raise PublishdError("not started", options.command[0], "a signal came before")
    variables = {"PUBLISHD_OUT": f"{store.root}/{folder_of(watch.attempt)}", "PUBLISHD_RESUME": resume}
    try:
        child = _start(options.command, {**options.environ, **variables})
    except OSError as error:
        log.error("%s", _why_not(error, options))
        return _NOT_FOUND if isinstance(error, FileNotFoundError) and not _found(options) else _CANNOT_START
    if resume:
        log.info("resuming from: %s", resume)
    else:
        log.info("nothing was published yet: %s: training begins anew", store.root)
    return await _around(child, store, framework, watch, options, signals)


async def _prepare(store: Store, framework: Framework, watch: WatchOptions) -> str:
    """The save to resume from, or ''; the execution's folder is there."""
    latest = await resolve(store)
    published = (await read(store)).publications
    for which, cause in conflicts(store.root, watch.attempt, watch.epoch, published):
        raise NotPublished("not started", which, cause, REMEDY)
    check_room(store.root, watch.attempt, framework, await store.name_limit())
    await store.make_folder(folder_of(watch.attempt))
    return f"{store.root}/{latest.path}" if latest else ""


async def _around(
    child: subprocess.Popen[bytes],
    store: Store,
    framework: Framework,
    watch: WatchOptions,
    options: RunOptions,
    signals: Signals,
) -> int:
    stop = asyncio.Event()
    answering = _Answering(store)
    watcher = Watcher(cast("Store", answering), framework, watch, stop)
    forwarding = asyncio.create_task(_forward(child, watcher, options, signals))
    watching = asyncio.create_task(watcher.run())
    ended = asyncio.create_task(_ended(child))
    await asyncio.wait((ended, watching), return_when=asyncio.FIRST_COMPLETED)
    if not ended.done():  # what it saved from now on would never be published
        log.critical("watching failed: sending SIGTERM to: %s", options.command[0])
        _send(child, signal.SIGTERM, options.command[0], "SIGTERM: sent")
    status = await ended
    how = f"exit status {status}" if status < _SIGNALLED else f"exit status {status}, as after {_signal_name(status)}"
    log.info("ended: %s: %s", options.command[0], how)
    stop.set()
    drained = await watching
    pruned = await _prune(watcher, options.keep, signals, answering, watch.drain) if options.keep else True
    forwarding.cancel()
    return status or (0 if drained and pruned else _FAILED)


async def _prune(watcher: Watcher, keep: int, signals: Signals, answering: _Answering, patience: float) -> bool:
    if signals.came or not watcher.in_time:
        log.info("not pruned: %s", "a signal came" if signals.came else "the last scan ran out of time")
        return True
    log.info("pruning: the %d latest stay", keep)
    pruned = await _unless(watcher.prune(keep), signals.stop.wait(), answering.falls_silent(patience))
    if pruned is None:
        why = "by a signal" if signals.came else f"after {patience:g} s without an answer"
        log.info("prune: ended early %s (the next prune finishes it)", why)
    return pruned is not False


class _Answering:
    """A store that counts its answers."""

    def __init__(self, store: Store) -> None:
        self._store, self._answers = store, 0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._store, name)
        if not inspect.iscoroutinefunction(attribute):
            return attribute

        async def call(*arguments: Any, **options: Any) -> Any:
            try:
                return await attribute(*arguments, **options)
            finally:
                self._answers += 1

        return call

    async def falls_silent(self, seconds: float) -> None:
        """Return once there was no answer for so long."""
        loop = asyncio.get_running_loop()
        answers, since = self._answers, loop.time()
        while loop.time() < since + seconds:
            await asyncio.sleep(min(seconds, _LISTENING_SECONDS))
            if answers != self._answers:
                answers, since = self._answers, loop.time()


async def _unless(work: Coroutine[None, None, T], *endings: Coroutine[None, None, Any]) -> T | None:
    """The result of the work, or None if one of the endings comes first."""
    working, *coming = (asyncio.create_task(task) for task in (work, *endings))
    await asyncio.wait((working, *coming), return_when=asyncio.FIRST_COMPLETED)
    for ending in coming:
        ending.cancel()
    if working.done():
        return cast("T", working.result())
    working.cancel()
    return None


# The child


def _start(command: tuple[str, ...], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the command. Raises OSError.

    To be called on the main thread: the kernel sends the child SIGTERM when the thread that started it ends (prctl(2)).
    """
    prctl, this = ctypes.CDLL(None).prctl, os.getpid()
    # Where it was ignored, as a parent's setting, no child's status would ever be known.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Until it is COMMAND the child has this process's handlers, which would swallow a signal, or take it for this process's.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)

    def begin() -> None:
        for number in HEARD:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != this:
            os.kill(os.getpid(), signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        # What Python opened is closed at the exec; whatever else is open was given, and meant for COMMAND.
        return subprocess.Popen(command, env=environ, close_fds=False, preexec_fn=begin)  # noqa: S603 - as asked for
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


async def _ended(child: subprocess.Popen[bytes]) -> int:
    """The status of the child as a shell tells it, once it has ended."""
    # Reaped on the loop's thread, where signals are sent, lest one goes to another process that got its number.
    await asyncio.to_thread(os.waitid, os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    status = child.wait()
    return status if status >= 0 else _SIGNALLED - status


async def _forward(child: subprocess.Popen[bytes], watcher: Watcher, options: RunOptions, signals: Signals) -> None:
    while True:
        number = await signals.told.get()
        watcher.hurry()
        if child.returncode is not None:
            continue
        wanted = options.forward.get(number, number)
        if wanted is None:
            log.info("%s: not forwarded to: %s", number.name, options.command[0])
        elif wanted is number is signal.SIGINT and _terminal_told(child):
            log.info("%s: not forwarded, the terminal sends it to both: %s", number.name, options.command[0])
        else:
            how = f"{number.name}: forwarded" if wanted is number else f"{number.name}: forwarded as {wanted.name}"
            _send(child, wanted, options.command[0], how)


def _send(child: subprocess.Popen[bytes], number: signal.Signals, command: str, how: str) -> None:
    """Send the child, which has not been reaped, a signal."""
    try:
        os.kill(child.pid, number)
    except PermissionError as error:  # it has become another user's
        log.warning("%s cannot be sent to: %s: %s", number.name, command, error.strerror)
    else:
        log.info("%s to: %s", how, command)


def _terminal_told(child: subprocess.Popen[bytes]) -> bool:
    """Whether this process and the child are in the foreground of a terminal, where a Ctrl-C is for all."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp() == os.getpgid(child.pid)
    except OSError:
        return False
    finally:
        os.close(terminal)


def _found(options: RunOptions) -> str | None:
    return shutil.which(options.command[0], os.F_OK, options.environ.get("PATH"))


def _why_not(error: OSError, options: RunOptions) -> PublishdError:
    cause = error.strerror or str(error)
    if isinstance(error, FileNotFoundError) and _found(options):
        cause = "the interpreter that its first line names is missing"
    return PublishdError("cannot start", options.command[0], cause)


def _signal_name(status: int) -> str:
    try:
        return signal.Signals(status - _SIGNALLED).name
    except ValueError:
        return f"signal {status - _SIGNALLED}"
