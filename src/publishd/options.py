"""What the command line and the environment ask for: the flags, and one frozen options object made of them."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from publishd.errors import UsageError
from publishd.flags import Flag, count, duration, one_of, parse_flags, positive_duration, unsigned
from publishd.frameworks import FRAMEWORKS
from publishd.publications import unsafe
from publishd.schedulers import SCHEDULERS
from publishd.signals import HEARD
from publishd.stores import EXEC

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from publishd.credentials import SourceSpec
    from publishd.stores.s3 import Access

S3 = "s3://"


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line and the environment ask for; times in seconds."""

    root: str = ""
    access: Access | None = None
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
    forward: Mapping[signal.Signals, signal.Signals | None] = field(default_factory=dict)
    scheduler: str = "slurm"
    command: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The environment as it was given; it may hold secrets."""


# Values. Each parser raises ValueError saying what the value must be, and never repeats it.


def _root(text: str) -> str:
    if not text:
        raise ValueError("must not be empty (is the variable it comes from set?)")
    if text.startswith("-"):
        raise ValueError("a folder is missing (one of that name is ./-…)")
    if re.search("[\x00-\x1f\x7f-\x9f]", text):
        raise ValueError("must not have a control character")
    if text.startswith(S3):
        from publishd.stores.s3 import split_root

        split_root(text)
    elif re.match("[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise ValueError("must be a folder or s3://BUCKET/PREFIX (a folder of such a name is ./…)")
    return text


def _attempt(text: str) -> str:
    if not text or "/" in text or unsafe(f"{EXEC}/{text}/save"):
        raise ValueError("must be one path component, such as 1.4101.0")
    return text


def _source(text: str) -> SourceSpec:
    from publishd.credentials import parse_source

    return parse_source(text)


def _proxy(text: str) -> str:
    from publishd.credentials.urls import parse_proxy

    return parse_proxy(text)


def _endpoint(text: str) -> str:
    from publishd.credentials.urls import parse_endpoint

    return parse_endpoint(text)


def _region(text: str) -> str:
    if not re.fullmatch("[A-Za-z0-9-]{1,63}", text, re.ASCII):
        raise ValueError("must be a region's name, such as eu-west-1")
    return text


def _ca(text: str) -> str:
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(text)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise ValueError("must be a readable file of PEM certificates") from error
    return text


def _forward(text: str) -> dict[signal.Signals, signal.Signals | None]:
    forward = {}
    for pair in text.split(","):
        came, equals, wanted = pair.partition("=")
        number = _signal(came)
        if not equals or number not in HEARD:
            raise ValueError(f"must be FROM=TO, FROM one of {', '.join(_short(heard) for heard in HEARD)}")
        forward[number] = None if wanted == "none" else _signal(wanted)
    return forward


def _signal(text: str) -> signal.Signals:
    try:
        return signal.Signals[f"SIG{text.removeprefix('SIG')}"]
    except KeyError:
        raise ValueError("must name signals as TERM=USR1 does, or none: TERM=none") from None


def _short(number: signal.Signals) -> str:
    return number.name.removeprefix("SIG")


_ADDRESSING = dict.fromkeys(("auto", "path", "virtual"))

ROOT = Flag(
    "checkpoint", "the checkpoint root of all the job's executions: a folder or s3://BUCKET/PREFIX", "ROOT", _root, required=True
)
JSON = Flag("json", "print one JSON object per line")
VERIFY = Flag("verify", "print the newest publication whose save is there and complete, naming those passed over on stderr")
NO_SYNC = Flag("no-sync", "do not fsync saves and entries; after a crash an entry may outlive its save")
ATTEMPT = Flag("attempt", "the execution's name (default: DISPATCH_ATTEMPT)", "NAME", _attempt)
EPOCH = Flag("epoch", "the execution's fencing number (default: DISPATCH_EPOCH)", "NUMBER", unsigned)
KEEP = Flag("keep", "how many of the latest publications stay", "N", count, required=True)
DRY_RUN = Flag("dry-run", "print what would be removed, remove nothing")
FRAMEWORK = Flag("framework", f"who writes the saves: {' or '.join(FRAMEWORKS)}", "NAME", one_of(FRAMEWORKS), required=True)
INTERVAL = Flag("interval", "time between scans (default: 10s)", "DURATION", positive_duration)
DRAIN = Flag("drain", "time for the last scan and for publishing what it found (default: 20s)", "DURATION", positive_duration)
LINGER = Flag("linger", "go on scanning every second for so long after the signal (default: 0)", "DURATION", duration)
KEEP_PUBLISHING = Flag("keep", "prune to the N latest after publishing (default: never)", "N", count)
KEEP_AT_END = Flag("keep", "prune to the N latest at the end, unless a signal came (default: never)", "N", count)
ONCE = Flag("once", "scan once, publish, exit")
WITH_PARENT = Flag("with-parent", "scan a last time and exit when the parent process is gone")
FORWARD = Flag(
    "forward", "what COMMAND gets instead of a signal: TERM=USR1, TERM=none (default: the same)", "FROM=TO", _forward, adds=True
)
SCHEDULER = Flag("scheduler", f"whose job this is: {', '.join(SCHEDULERS)} (default: slurm)", "NAME", one_of(SCHEDULERS))
ACCESS = (
    Flag("creds", "where credentials come from: env, file:PATH, web-identity, instance, container, vault:URL", "SOURCE", _source),
    Flag("proxy", "the only proxy that is used, http(s)://HOST:PORT (default: none)", "URL", _proxy),
    Flag("endpoint", "the store's address, http(s)://HOST:PORT (default: Amazon's)", "URL", _endpoint),
    Flag("region", "the region that requests are signed for (default: AWS_REGION, else us-east-1)", "NAME", _region),
    Flag("ca", "certificates to trust instead of the public ones, for the store and the proxy", "FILE", _ca),
    Flag("addressing", f"how a bucket is addressed: {', '.join(_ADDRESSING)} (default: auto)", "HOW", one_of(_ADDRESSING)),
)


def parse_options(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    flags: Sequence[Flag],
    arguments: Sequence[str] = (),
    publishes: bool = False,
    runs: bool = False,
) -> Options:
    """The options of a command with these flags and arguments; `publishes`: attempt and epoch may come from `environ`.

    With `runs` everything behind the first `--` is a command to run, which must be there. Raises UsageError.
    """
    command: tuple[str, ...] = ()
    if runs:
        argv, command = _split(argv)
    rooted = ROOT in flags
    values, positional = parse_flags((*flags, *ACCESS) if rooted else flags, argv)
    if len(positional) != len(arguments):
        wanted = " and ".join(arguments) or "no arguments"
        raise UsageError("bad arguments", "", f"{wanted} wanted, {len(positional)} given", "see --help")
    values |= {"environ": environ, "command": command, "sync": not values.pop("no-sync", False)}
    if rooted:
        values["root"] = values.pop("checkpoint")
        values["access"] = _access(values, environ)
    if publishes:
        _from_environment(values, environ, "attempt", "DISPATCH_ATTEMPT", _attempt)
        _from_environment(values, environ, "epoch", "DISPATCH_EPOCH", unsigned)
        if values.get("access") and re.search("[\ud800-\udfff]", values["attempt"]):
            raise UsageError("bad attempt", "-attempt or DISPATCH_ATTEMPT", "it must be UTF-8, as all keys of S3 are")
    if arguments:
        values["save"] = positional[0]
        if not positional[0]:
            raise UsageError("bad argument", "SAVE", "must not be empty (is the variable it comes from set?)")
        try:
            values["step"] = unsigned(positional[1])
        except ValueError as error:
            raise UsageError("bad argument", "STEP", str(error)) from None
    return Options(**{name.replace("-", "_"): value for name, value in values.items()})


def _split(argv: Sequence[str]) -> tuple[Sequence[str], tuple[str, ...]]:
    end = argv.index("--") if "--" in argv else len(argv)
    command = tuple(argv[end + 1 :])
    if not command or not command[0]:
        raise UsageError("missing command", "COMMAND", "what to run stands at the end: -- COMMAND…", "see --help")
    return argv[:end], command


def _access(values: dict[str, Any], environ: Mapping[str, str]) -> Access | None:
    given = {flag.name: values.pop(flag.name) for flag in ACCESS if flag.name in values}
    if not values["root"].startswith(S3):
        for name in given:
            raise UsageError("bad flag", f"-{name}", "it is for s3:// roots only", "leave it out")
        return None
    if "creds" not in given:
        raise UsageError("missing flag", "-creds", "it is required for an s3:// root", "see --help")
    from publishd.stores.s3 import Access, S3Settings

    return Access(given.pop("creds"), environ, S3Settings(**given))


def _from_environment(
    values: dict[str, Any], environ: Mapping[str, str], name: str, variable: str, parse: Callable[[str], Any]
) -> None:
    if name in values:
        return
    text = environ.get(variable)
    if text is None:
        raise UsageError("missing variable", variable, "it is not set", f"set it, or give -{name}")
    try:
        values[name] = parse(text)
    except ValueError as error:
        raise UsageError("bad variable", variable, str(error)) from None
