"""The command line: argv to one frozen options object to one coroutine to an exit code.

Nothing else reads the environment, prints to stdout, picks the event loop or exits.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from publishd import __version__
from publishd.errors import PublishdError, UsageError
from publishd.flags import Flag, count, duration, one_of, parse_flags, positive_duration, quotable, unsigned
from publishd.frameworks import FRAMEWORKS
from publishd.log import StderrHandler, to_stderr, write_all
from publishd.publications import Announced, Publication, present, publish, published, resolve, resolve_verified, unsafe
from publishd.stores import EXEC, open_store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from publishd.signals import Signals
    from publishd.stores import Store

log = logging.getLogger(__name__)

DONE, FAILED, USAGE = 0, 1, 2
_LOG_SECONDS = 1.0
_THREADS = 4
_THREAD_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line and the environment ask for; times in seconds."""

    root: str
    framework: str = ""
    interval: float = 10.0
    drain: float = 20.0
    linger: float = 0.0
    keep: int = 0
    once: bool = False
    with_parent: bool = False
    sync: bool = True
    attempt: str = ""
    epoch: int = 0
    verify: bool = False
    json: bool = False
    dry_run: bool = False
    save: str = ""
    step: int = 0


def _root(text: str) -> str:
    if not text:
        raise ValueError("must not be empty (is the variable it comes from set?)")
    if text.startswith("-"):
        raise ValueError("a folder is missing (one of that name is ./-…)")
    if re.search("[\x00-\x1f\x7f-\x9f]", text):
        raise ValueError("must not have a control character")
    return text


def _attempt(text: str) -> str:
    if not text or "/" in text or unsafe(f"{EXEC}/{text}/save"):
        raise ValueError("must be one path component, such as 1.4101.0")
    return text


ROOT = Flag("checkpoint", "the checkpoint root that all executions of the job share", "ROOT", _root, required=True)
JSON = Flag("json", "print one JSON object per line")
NO_SYNC = Flag("no-sync", "do not fsync saves and entries; after a crash an entry may outlive its save")
ATTEMPT = Flag("attempt", "the execution's name (default: DISPATCH_ATTEMPT)", "NAME", _attempt)
EPOCH = Flag("epoch", "the execution's fencing number (default: DISPATCH_EPOCH)", "NUMBER", unsigned)
KEEP = Flag("keep", "how many of the latest publications stay", "N", count, required=True)


# Commands. Each returns its exit status; what it could not do is raised, or logged where it did the rest.


async def _resolve(options: Options, store: Store, _signals: Signals) -> int:
    def passed_over(publication: Publication, reason: str) -> None:
        log.warning("passed over: %s/%s: %s", store.root, publication.path, reason)

    latest = await (resolve_verified(store, passed_over) if options.verify else resolve(store))
    if latest is None:
        log.info("nothing was published yet: %s: training begins anew", store.root)
    else:
        await asyncio.to_thread(_answer, [_json(store, latest, present=True) if options.json else f"{store.root}/{latest.path}"])
    return DONE


async def _list(options: Options, store: Store, _signals: Signals) -> int:
    publications = await published(store)
    there = await present(store, publications)
    lines = []
    for publication in publications:
        if options.json:
            lines.append(_json(store, publication, present=publication in there))
        else:
            presence = "present" if publication in there else "gone"
            lines.append(f"{publication.epoch}\t{publication.step}\t{publication.path}\t{presence}")
    await asyncio.to_thread(_answer, lines)
    return DONE


async def _publish(options: Options, store: Store, _signals: Signals) -> int:
    publication = Publication(options.epoch, options.step, await store.locate(options.save))
    announced = await publish(store, publication)
    which = f"{store.root}/{publication.path}: epoch {publication.epoch}, step {publication.step}"
    log.info("%s: %s", _SAID[announced], which)
    return DONE


_SAID = {
    Announced.CREATED: "published",
    Announced.EXISTED: "it already exists, nothing to do",
    Announced.EITHER: "it is published (an answer was lost, so whether by this call is not known)",
}


async def _prune(options: Options, store: Store, _signals: Signals) -> int:
    from publishd.prune import propose, prune

    def note(what: str, which: str, cause: str) -> None:
        log.warning("%s: %s: %s", what, which, cause)

    if options.dry_run:
        removed, failed = (await propose(store, options.keep, note)).doomed, []
    else:
        result = await prune(store, options.keep, note)
        removed, failed = result.removed, result.failed
    there = await present(store, removed) if options.json else set()
    await asyncio.to_thread(
        _answer,
        [
            _json(store, publication, present=publication in there) if options.json else f"{store.root}/{publication.path}"
            for publication in removed
        ],
    )
    for error in failed:
        log.error("%s", error)
    return FAILED if failed else DONE


async def _watch(options: Options, store: Store, signals: Signals) -> int:
    from publishd.watch import Watcher, WatchOptions

    watch_options = WatchOptions(
        options.attempt, options.epoch, options.interval, options.drain, options.linger, options.keep or None
    )
    watcher = Watcher(store, FRAMEWORKS[options.framework], watch_options, signals.stop)
    parent = asyncio.create_task(_stop_without(signals)) if options.with_parent else None
    try:
        return DONE if await watcher.run(once=options.once) else FAILED
    finally:
        if parent:
            parent.cancel()


async def _stop_without(signals: Signals) -> None:
    """Stop once the parent that started this process is gone: then nobody is left who could send a signal."""
    while os.getppid() == signals.parent:  # noqa: ASYNC110 - the kernel tells nobody
        await asyncio.sleep(1)
    log.info("the parent is gone: one last scan")
    signals.stop.set()


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand."""

    purpose: str
    flags: tuple[Flag, ...]
    run: Callable[[Options, Store, Signals], Awaitable[int]]
    example: str
    arguments: tuple[str, ...] = ()
    publishes: bool = False
    """Needs the execution's attempt and epoch."""
    stays: bool = False
    """Runs beside training: stops when told to, and only a second SIGINT ends it at once."""


COMMANDS = {
    "resolve": Command(
        "Print the save to resume from, or nothing if nothing was ever published.",
        (
            ROOT,
            Flag("verify", "print the newest publication whose save is there and complete, naming those passed over on stderr"),
            JSON,
        ),
        _resolve,
        'RESUME=$(publishd resolve -checkpoint "$CKPT") || exit 1',
    ),
    "watch": Command(
        "Publish this execution's saves as they complete, until SIGTERM, SIGINT or SIGHUP.",
        (
            ROOT,
            Flag("framework", f"who writes the saves: {' or '.join(FRAMEWORKS)}", "NAME", one_of(FRAMEWORKS), required=True),
            Flag("interval", "time between scans (default: 10s)", "DURATION", positive_duration),
            Flag(
                "drain", "time for the last scan and for publishing what it found (default: 20s)", "DURATION", positive_duration
            ),
            Flag("linger", "go on scanning every second for so long after the signal (default: 0)", "DURATION", duration),
            Flag("keep", "prune to the N latest after publishing (default: never)", "N", count),
            Flag("once", "scan once, publish, exit"),
            Flag("with-parent", "scan a last time and exit when the parent process is gone"),
            NO_SYNC,
            ATTEMPT,
            EPOCH,
        ),
        _watch,
        'publishd watch -checkpoint "$CKPT" -framework hf &',
        publishes=True,
        stays=True,
    ),
    "publish": Command(
        "Publish one save by hand: SAVE must exist and lie below the root.",
        (ROOT, NO_SYNC, ATTEMPT, EPOCH),
        _publish,
        'publishd publish -checkpoint "$CKPT" "$CKPT/exec/$DISPATCH_ATTEMPT/checkpoint-500" 500',
        ("SAVE", "STEP"),
        publishes=True,
    ),
    "prune": Command(
        "Remove all but the N latest publications, and the saves they named; print what was removed.",
        (ROOT, KEEP, Flag("dry-run", "print what would be removed, remove nothing"), JSON),
        _prune,
        'publishd prune -checkpoint "$CKPT" -keep 3',
    ),
    "list": Command(
        "Print every publication, latest last: epoch, step, path, and whether its save is present or gone.",
        (ROOT, JSON),
        _list,
        'publishd list -checkpoint "$CKPT"',
    ),
}

_EXIT_STATUS = "EXIT STATUS\n  0  done\n  1  failed; the reason is on stderr\n  2  usage: nothing was done\n"


def _help() -> str:
    width = max(map(len, COMMANDS)) + 2
    commands = "".join(f"  {name:<{width}}{command.purpose}\n" for name, command in COMMANDS.items())
    return (
        "Publish, resolve and prune the complete checkpoints of a training job.\n\n"
        f"usage: publishd COMMAND [FLAG…]  (or: publish COMMAND …)\n\n{commands}\n"
        f"publishd COMMAND --help describes a command, publishd --version prints the version.\n\n{_EXIT_STATUS}"
    )


def _command_help(name: str, command: Command) -> str:
    needed = "".join(f" -{flag.name} {flag.metavar}" for flag in command.flags if flag.required)
    arguments = "".join(f" {argument}" for argument in command.arguments)
    left = [f"-{flag.name} {flag.metavar}".rstrip() for flag in command.flags]
    width = max(map(len, left)) + 2
    flags = "".join(f"  {text:<{width}}{flag.help}\n" for text, flag in zip(left, command.flags, strict=True))
    return (
        f"{command.purpose}\n\nusage: publishd {name}{needed} [FLAG…]{arguments}\n\n{flags}\n"
        f"Example:\n  {command.example}\n\n{_EXIT_STATUS}"
    )


def _options(command: Command, argv: list[str]) -> Options:
    flags, positional = parse_flags(command.flags, argv)
    if len(positional) != len(command.arguments):
        wanted = " and ".join(command.arguments) or "no arguments"
        raise UsageError("bad arguments", "", f"{wanted} wanted, {len(positional)} given", "see --help")
    values: dict[str, Any] = {name.replace("-", "_"): value for name, value in flags.items()}
    values["root"] = values.pop("checkpoint")
    values["sync"] = not values.pop("no_sync", False)
    if command.publishes:
        _from_environment(values, "attempt", "DISPATCH_ATTEMPT", _attempt)
        _from_environment(values, "epoch", "DISPATCH_EPOCH", unsigned)
    if command.arguments:
        values["save"] = positional[0]
        if not positional[0]:
            raise UsageError("bad argument", "SAVE", "must not be empty (is the variable it comes from set?)")
        try:
            values["step"] = unsigned(positional[1])
        except ValueError as error:
            raise UsageError("bad argument", "STEP", str(error)) from None
    return Options(**values)


def _from_environment(values: dict[str, Any], name: str, variable: str, parse: Callable[[str], Any]) -> None:
    if name in values:
        return
    text = os.environ.get(variable)
    if text is None:
        raise UsageError("missing variable", variable, "it is not set", f"set it, or give -{name}")
    try:
        values[name] = parse(text)
    except ValueError as error:
        raise UsageError("bad variable", variable, str(error)) from None


def _json(store: Store, publication: Publication, *, present: bool) -> str:
    epoch, step, path = publication
    return json.dumps({"epoch": epoch, "step": step, "path": path, "save": f"{store.root}/{path}", "present": present})


def _answer(lines: list[str]) -> None:
    """Write the answer to stdout, byte for byte as the file system has its names."""
    if not lines:
        return
    content = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
    try:
        if sys.stdout is None:
            raise OSError(0, "it is closed")
        write_all(sys.stdout.fileno(), content)
    except OSError as error:
        raise PublishdError("cannot write the answer", "stdout", error.strerror or str(error)) from error


async def _run(command: Command, options: Options, signals: Signals) -> int:
    """The command's exit status, or an error if a signal ends it first."""
    loop = asyncio.get_running_loop()
    signals.attach(loop)
    loop.set_default_executor(_started_threads())
    store = open_store(options.root, sync=options.sync)
    work = asyncio.ensure_future(command.run(options, store, signals))
    ended = asyncio.create_task((signals.abandon if command.stays else signals.stop).wait())
    await asyncio.wait((work, ended), return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        assert signals.last
        raise PublishdError("ended early", "", f"by {signals.last.name}")
    await store.aclose()
    return work.result()


def _started_threads() -> ThreadPoolExecutor:
    """Threads for what may block, all started now: later there may be none to be had."""
    threads = ThreadPoolExecutor(_THREADS)
    met = threading.Barrier(_THREADS)
    try:
        for _ in range(_THREADS):
            threads.submit(met.wait, _THREAD_SECONDS)
    except RuntimeError as error:
        raise PublishdError("cannot start", "threads", str(error), "see ulimit -u and the cgroup's pids.max") from error
    return threads


def _loop_factory(command: Command) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if not command.stays:
        return None
    import uvloop

    return uvloop.new_event_loop


def _expected(error: BaseException) -> PublishdError | None:
    """The expected failure that ended a command, taken out of the task group it came through; None for a bug."""
    if isinstance(error, BaseExceptionGroup):
        expected = [_expected(inner) for inner in error.exceptions]
        return expected[0] if all(expected) else None
    return error if isinstance(error, PublishdError) else None


def _execute(name: str, argv: list[str], signals: Signals) -> int:
    command = COMMANDS[name]
    handler = to_stderr(name)
    if not command.stays:
        gc.disable()  # a command that ends in a moment gains nothing from looking for cycles among 100,000 entries
    try:
        options = _options(command, argv)
        # The runner is never closed: that would wait for threads that the file system holds.
        runner = asyncio.Runner(loop_factory=_loop_factory(command))
        try:
            runner.get_loop()
        except OSError as error:
            raise PublishdError("cannot start", "event loop", error.strerror or str(error), "see ulimit -n") from error
        return runner.run(_run(command, options, signals))
    except BaseException as error:
        expected = _expected(error)
        if expected is None:
            log.critical("this is a bug in publishd %s", __version__, exc_info=error)
            return FAILED
        log.error("%s", expected)
        return USAGE if isinstance(expected, UsageError) else FAILED
    finally:
        _finish_log(handler, signals, patiently=not command.stays)


def _finish_log(handler: StderrHandler, signals: Signals, *, patiently: bool) -> None:
    """Wait for the reader of stderr: beside training only a moment, else until all is read or a signal comes."""
    while not handler.finish(_LOG_SECONDS) and patiently and signals.last is None:
        pass


def _open_standard_streams() -> None:
    """Stand something in for closed standard streams, lest a checkpoint's file gets their number and a message."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _dispatch(argv: list[str], signals: Signals) -> int:
    name = argv[0] if argv else ""
    wants_help = any(argument in ("-h", "-help", "--help") for argument in argv[: argv.index("--") if "--" in argv else None])
    if name in COMMANDS and not wants_help:
        return _execute(name, argv[1:], signals)
    handler = to_stderr(name if name in COMMANDS else "")
    try:
        if wants_help:
            _answer([(_command_help(name, COMMANDS[name]) if name in COMMANDS else _help()).rstrip("\n")])
        elif name in ("-version", "--version"):
            _answer([f"publishd {__version__}"])
        else:
            raise UsageError(
                "unknown command" if name else "missing command",
                quotable(name),
                f"there are {', '.join(COMMANDS)}",
                "see publishd --help",
            )
    except PublishdError as error:
        log.error("%s", error)
        return USAGE if isinstance(error, UsageError) else FAILED
    finally:
        _finish_log(handler, signals, patiently=True)
    return DONE


def main(argv: list[str], signals: Signals) -> NoReturn:
    """Run one command and end the process, whatever its threads are stuck in."""
    _open_standard_streams()
    os._exit(_dispatch(argv, signals))
