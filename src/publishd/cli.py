"""The command line: argv to one frozen options object to one coroutine to an exit code.

Nothing else reads the environment, prints to stdout, picks the event loop or exits.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from publishd import __version__
from publishd.errors import PublishdError, UsageError, printable
from publishd.flags import quotable
from publishd.frameworks import FRAMEWORKS
from publishd.log import StderrHandler, to_stderr, write_all
from publishd.options import (
    ACCESS,
    ATTEMPT,
    DRAIN,
    DRY_RUN,
    EPOCH,
    FORWARD,
    FRAMEWORK,
    INTERVAL,
    JSON,
    KEEP,
    KEEP_AT_END,
    KEEP_PUBLISHING,
    LINGER,
    NO_SYNC,
    ONCE,
    ROOT,
    SCHEDULER,
    VERIFY,
    WITH_PARENT,
    Options,
    parse_options,
)
from publishd.publications import Announced, Publication, present, publish, published, resolve, resolve_verified
from publishd.schedulers import SCHEDULERS
from publishd.stores import Verdict, open_store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from publishd.flags import Flag
    from publishd.signals import Signals
    from publishd.stores import Store
    from publishd.watch import WatchOptions

log = logging.getLogger(__name__)

DONE, FAILED, USAGE = 0, 1, 2
_LOG_SECONDS = 1.0
_THREADS = 5
"""Four for the store, and one that waits for run's COMMAND."""
_THREAD_SECONDS = 10.0
_CLEARING_SECONDS = 25.0
_ENDING_SECONDS = 10.0
"""How long a watch may need, beyond -linger and -drain, to end."""


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


async def _probe(options: Options, store: Store, _signals: Signals) -> int:
    from publishd.probe import probe

    failed = 0
    async for check, verdict, detail in probe(store):
        failed += verdict is Verdict.FAIL
        line = json.dumps({"check": check, "verdict": verdict.value, "detail": detail})
        await asyncio.to_thread(_answer, [line if options.json else printable(f"{verdict.value:4}  {check}: {detail}")])
    if failed:
        log.error("this root can't be used as it is: %s: %d of the checks failed", store.root, failed)
    return FAILED if failed else DONE


async def _watch(options: Options, store: Store, signals: Signals) -> int:
    from publishd.systemd import ServiceManager
    from publishd.watch import Watcher

    watcher = Watcher(store, FRAMEWORKS[options.framework], _watch_options(options), signals.stop)
    beside = [ServiceManager(options.environ).follow(watcher, signals.stop, options.linger + options.drain + _ENDING_SECONDS)]
    if options.with_parent:
        beside.append(_stop_without(signals))
    tasks = [asyncio.create_task(work) for work in beside]
    try:
        return DONE if await watcher.run(once=options.once) else FAILED
    finally:
        for task in tasks:
            task.cancel()


def _watch_options(options: Options) -> WatchOptions:
    from publishd.watch import WatchOptions

    return WatchOptions(options.attempt, options.epoch, options.interval, options.drain, options.linger, options.keep or None)


async def _run_command(options: Options, store: Store, signals: Signals) -> int:
    from publishd.run import RunOptions, run

    watch_options = replace(_watch_options(options), keep=None)  # it prunes once, at the end
    run_options = RunOptions(options.command, options.environ, options.forward, options.keep or None)
    return await run(store, FRAMEWORKS[options.framework], watch_options, run_options, signals)


async def _env(options: Options, _store: None, _signals: Signals) -> int:
    attempt, epoch = SCHEDULERS[options.scheduler](options.environ)
    await asyncio.to_thread(_answer, [f"export DISPATCH_ATTEMPT={attempt} DISPATCH_EPOCH={epoch}"])
    return DONE


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
    run: Callable[[Options, Any, Signals], Awaitable[int]]
    """It is given the store, or None where no root is asked for."""
    example: str
    arguments: tuple[str, ...] = ()
    publishes: bool = False
    """Needs the execution's attempt and epoch."""
    stays: bool = False
    """Runs beside training: stops when told to, and only a second SIGINT ends it at once."""
    runs: bool = False
    """Takes a command to run, behind `--`."""


COMMANDS = {
    "resolve": Command(
        "Print the save to resume from, or nothing if nothing was ever published.",
        (ROOT, VERIFY, JSON),
        _resolve,
        'RESUME=$(publishd resolve -checkpoint "$CKPT") || exit 1',
    ),
    "watch": Command(
        "Publish this execution's saves as they complete, until SIGTERM, SIGINT or SIGHUP.",
        (ROOT, FRAMEWORK, INTERVAL, DRAIN, LINGER, KEEP_PUBLISHING, ONCE, WITH_PARENT, NO_SYNC, ATTEMPT, EPOCH),
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
        (ROOT, KEEP, DRY_RUN, JSON),
        _prune,
        'publishd prune -checkpoint "$CKPT" -keep 3',
    ),
    "list": Command(
        "Print every publication, latest last: epoch, step, path, and whether its save is present or gone.",
        (ROOT, JSON),
        _list,
        'publishd list -checkpoint "$CKPT"',
    ),
    "probe": Command(
        "Prove from this node that the root can be used; print one line per check, and leave nothing behind.",
        (ROOT, JSON),
        _probe,
        'publishd probe -checkpoint "$CKPT"',
    ),
    "run": Command(
        "Resolve, run COMMAND with the answer, publish its saves as they complete, prune, and exit with its status.",
        (ROOT, FRAMEWORK, KEEP_AT_END, FORWARD, INTERVAL, DRAIN, NO_SYNC, ATTEMPT, EPOCH),
        _run_command,
        """exec publishd run -checkpoint "$CKPT" -framework hf -keep 3 -- sh -c \\
    'exec python train.py --output_dir "$PUBLISHD_OUT" ${PUBLISHD_RESUME:+--resume_from_checkpoint "$PUBLISHD_RESUME"}'""",
        publishes=True,
        stays=True,
        runs=True,
    ),
    "env": Command(
        "Print attempt and epoch of a scheduler's job, for a shell to evaluate.",
        (SCHEDULER,),
        _env,
        'EXECUTION=$(publishd env) || exit 1; eval "$EXECUTION"',
    ),
}

_EXIT_STATUS = "EXIT STATUS\n  0  done\n  1  failed; the reason is on stderr\n  2  usage: nothing was done\n"
_RUN_EXIT_STATUS = (
    "EXIT STATUS\n  COMMAND's own, or 128+n where signal n ended it\n"
    "  1    COMMAND's was 0, but a save stayed unpublished or prune failed; or nothing was started\n"
    "  2    usage: nothing was done\n  126  COMMAND cannot be started\n  127  COMMAND was not found\n"
)


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
    arguments = " -- COMMAND…" if command.runs else "".join(f" {argument}" for argument in command.arguments)
    width = max(len(_flag(flag)) for flag in (*command.flags, *ACCESS)) + 2
    access = f"With an s3:// root (-creds is required there):\n{_described(ACCESS, width)}\n" if ROOT in command.flags else ""
    return (
        f"{command.purpose}\n\nusage: publishd {name}{needed} [FLAG…]{arguments}\n\n{_described(command.flags, width)}\n"
        f"{access}Example:\n  {command.example}\n\n{_RUN_EXIT_STATUS if command.runs else _EXIT_STATUS}"
    )


def _described(flags: Sequence[Flag], width: int) -> str:
    return "".join(f"  {_flag(flag):<{width}}{flag.help}\n" for flag in flags)


def _flag(flag: Flag) -> str:
    return f"-{flag.name} {flag.metavar}".rstrip()


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
    store = open_store(options.root, sync=options.sync, access=options.access) if options.root else None
    work = asyncio.ensure_future(command.run(options, store, signals))
    ended = asyncio.create_task((signals.abandon if command.stays else signals.stop).wait())
    await asyncio.wait((work, ended), return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        assert signals.last
        if not command.stays:  # it may have something to clear away, for as long as nobody insists
            work.cancel()
            insisted = asyncio.create_task(signals.abandon.wait())
            await asyncio.wait((work, insisted), timeout=_CLEARING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        raise PublishdError("ended early", "", f"by {signals.last.name}")
    if store:
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


def _loop_factory(command: Command, options: Options) -> Callable[[], asyncio.AbstractEventLoop] | None:
    # With sockets uvloop starts threads of its own, and aborts the process where there are none to be had.
    if not command.stays or options.access:
        return None
    import uvloop

    return uvloop.new_event_loop


def _expected(error: BaseException) -> PublishdError | None:
    """The expected failure that ended a command, taken out of the task group it came through; None for a bug."""
    if isinstance(error, BaseExceptionGroup):
        expected = [_expected(inner) for inner in error.exceptions]
        return expected[0] if all(expected) else None
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):  # it is out of them at an import
        return PublishdError("cannot start", "files", error.strerror or "", "see ulimit -n")
    return error if isinstance(error, PublishdError) else None


def _execute(name: str, argv: list[str], environ: Mapping[str, str], signals: Signals) -> int:
    command = COMMANDS[name]
    handler = to_stderr(name)
    if not command.stays:
        gc.disable()  # a command that ends in a moment gains nothing from looking for cycles among 100,000 entries
    try:
        options = parse_options(
            argv,
            environ,
            flags=command.flags,
            arguments=command.arguments,
            publishes=command.publishes,
            runs=command.runs,
        )
        # The runner is never closed: that would wait for threads that the file system holds.
        runner = asyncio.Runner(loop_factory=_loop_factory(command, options))
        try:
            runner.run(asyncio.sleep(0))  # uvloop opens what it needs at its first run
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


def _dispatch(argv: list[str], environ: Mapping[str, str], signals: Signals) -> int:
    name = argv[0] if argv else ""
    wants_help = any(argument in ("-h", "-help", "--help") for argument in argv[: argv.index("--") if "--" in argv else None])
    if name in COMMANDS and not wants_help:
        return _execute(name, argv[1:], environ, signals)
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


def _isolate() -> dict[str, str]:
    """The environment as it was given; this process's own loses whatever would lead its libraries elsewhere.

    Proxies are named by flags, credentials by -creds, certificates by -ca; what a site sets for other programs is not
    meant for a checkpoint's keys.
    """
    given = _as_given(dict(os.environ))
    for name in given:
        if _MISLEADING.fullmatch(name):
            del os.environ[name]
    return given


def _as_given(environ: dict[str, str]) -> dict[str, str]:
    """Without what Python itself has set: where there is no locale it makes LC_CTYPE one (PEP 538)."""
    name = "LC_CTYPE"
    try:
        with open("/proc/self/environ", "rb") as file:
            given = dict(entry.partition(b"=")[::2] for entry in file.read().split(b"\0"))
    except OSError:
        return environ  # no /proc
    environ.pop(name, None)
    return {**environ, name: os.fsdecode(given[name.encode()])} if name.encode() in given else environ


_MISLEADING = re.compile(
    r".*_proxy|(AWS|BOTO|VAULT|BAO)_.*|BOTO_.*|(REQUESTS|CURL)_CA_BUNDLE|SSL_CERT_(FILE|DIR)|NETRC", re.I | re.S
)


def main(argv: list[str], signals: Signals) -> NoReturn:
    """Run one command and end the process, whatever its threads are stuck in."""
    if os.getpid() == 1 and argv[:1] == ["run"]:
        from publishd.init import work_in_a_child

        work_in_a_child()
    environ = _isolate()
    _open_standard_streams()
    os._exit(_dispatch(argv, environ, signals))
