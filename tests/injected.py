"""Commands whose N-th file system call below the root kills them, or fails: the library of `injected.c`, and how it is told."""

from __future__ import annotations

import atexit
import ctypes
import errno
import json
import mmap
import os
import select
import shutil
import signal
import subprocess
import sys
from enum import IntEnum
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, NamedTuple, Self

import pytest

from commands import Ran, environment, require_program

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

SOURCE = Path(__file__).with_name("injected.c")
SERVER = Path(__file__).with_name("warm.py")


class Kind(IntEnum):
    """The kinds of calls, in the order of `injected.c`; named as the kernel's calls."""

    CREATE = 0
    MKDIR = 1
    UNLINK = 2
    RENAME = 3
    FSYNC = 4
    WRITE = 5
    OPEN = 6
    READDIR = 7
    FSTAT = 8
    STAT = 9
    READ = 10
    CLOSE = 11
    FADVISE = 12
    STATFS = 13
    DUP = 14
    FDOPENDIR = 15
    LSEEK = 16
    ACCESS = 17
    READLINK = 18


CHANGING = (Kind.CREATE, Kind.MKDIR, Kind.UNLINK, Kind.RENAME, Kind.FSYNC, Kind.WRITE)
KILL = -1
ERRORS = tuple(getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EIO", "ESTALE", "EACCES", "EINTR", "ENOENT", "EMFILE"))


class Fault(NamedTuple):
    """What happens to the call of that number, from 1; 0 is none."""

    at: int = 0
    effect: int = KILL
    lasting: bool = False
    """All calls after it fail as well."""
    carried_out: bool = False
    """The call, if it changes something, is carried out before it fails: its answer was lost."""

    def __repr__(self) -> str:
        effect = "SIGKILL" if self.effect == KILL else errno.errorcode[self.effect]
        return f"<{effect} at {self.at}{' and after' * self.lasting}{', carried out' * self.carried_out}>"


UNTOUCHED = Fault()


class _Control(ctypes.Structure):
    _fields_ = (
        ("armed", ctypes.c_int),
        ("at", ctypes.c_int),
        ("effect", ctypes.c_int),
        ("lasting", ctypes.c_int),
        ("carried_out", ctypes.c_int),
        ("counted", ctypes.c_uint),
        ("count", ctypes.c_int),
        ("hits", ctypes.c_int),
        ("root", ctypes.c_char * 1024),
        ("hit", ctypes.c_char * 2048),
        ("seen", ctypes.c_ubyte * (1 << 16)),
    )


class Calls:
    """The calls of one process below a folder, and which of them is to go wrong: memory shared with that process."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with file.open("w+b") as opened:
            opened.truncate(ctypes.sizeof(_Control))
            self._control = _Control.from_buffer(mmap.mmap(opened.fileno(), ctypes.sizeof(_Control)))

    def arm(self, fault: Fault, root: Path, counted: Collection[Kind] = tuple(Kind)) -> None:
        """Count from now on, calls of these kinds only, and let the one that is meant go wrong."""
        self.disarm()
        control = self._control
        control.count = control.hits = 0
        control.hit, control.root = b"", os.fsencode(root)
        control.at, control.effect, control.lasting, control.carried_out = fault
        control.counted = sum(1 << kind for kind in counted)
        control.armed = 1

    def disarm(self) -> None:
        """Nothing goes wrong any more."""
        self._control.armed = 0

    @property
    def hits(self) -> int:
        """How many calls went wrong."""
        return int(self._control.hits)

    @property
    def seen(self) -> list[Kind]:
        """The calls since it was armed."""
        return [Kind(kind) for kind in self._control.seen[: self._control.count]]

    @property
    def hit(self) -> tuple[Kind | None, str]:
        """The first call that went wrong."""
        if not self.hits:
            return None, ""
        return Kind(self._control.seen[self._control.at - 1]), os.fsdecode(self._control.hit)


@cache
def shim() -> str:
    """The compiled library."""
    compiler = require_program("gcc", "gcc")
    folder = mkdtemp(prefix="publishd-injected-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = f"{folder}/injected.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, str(SOURCE), "-ldl"], check=True)
    return library


class Warm:
    """Runs commands in processes forked from one that has imported publishd: one at a time, or one in the background."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.calls = Calls(folder / "calls")
        self._out, self._err = folder / "out", folder / "err"
        self._server = subprocess.Popen(
            [sys.executable, "-B", str(SERVER)],
            env=environment(LD_PRELOAD=shim()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.kill()  # and its children die with it
        self._server.communicate()

    def _ask(self, **request: object) -> None:
        assert self._server.stdin
        self._server.stdin.write(json.dumps(request).encode() + b"\n")

    def _answered(self, seconds: float) -> int | None:
        assert self._server.stdout
        if not select.select([self._server.stdout], [], [], seconds)[0]:
            return None
        return int(json.loads(self._server.stdout.readline()))

    def start(self, *arguments: str, env: Mapping[str, str] | None = None, attached: bool = True) -> int:
        """Start a command, and return its process."""
        for file in (self._out, self._err):
            file.write_bytes(b"")  # what the last command said is not this one's
        files = {"out": str(self._out), "err": str(self._err), "control": str(self.calls.file) if attached else ""}
        self._ask(arguments=arguments, env=dict(environment() if env is None else env), **files)
        pid = self._answered(20)
        assert pid
        return pid

    @property
    def log(self) -> str:
        """What the last command has said so far."""
        return self._err.read_text("utf-8", "backslashreplace")

    def ended(self, pid: int, seconds: float = 40) -> Ran:
        """Wait for the end of what was started."""
        self._ask(wait=pid)
        code = self._answered(seconds)
        if code is None:
            os.kill(pid, signal.SIGKILL)
            self._answered(20)
            raise AssertionError(f"it did not end within {seconds} s:\n{self.log}")
        return Ran(code, self._out.read_bytes(), self._err.read_bytes())

    def run(self, *arguments: str, env: Mapping[str, str] | None = None) -> Ran:
        """Run a command to its end; whether its calls go wrong is up to `calls`."""
        return self.ended(self.start(*arguments, env=env))

    def suffer(
        self,
        fault: Fault,
        root: Path,
        *arguments: str,
        counted: Collection[Kind] = tuple(Kind),
        env: Mapping[str, str] | None = None,
    ) -> Ran:
        """Run a command under this fault."""
        self.calls.arm(fault, root, counted)
        try:
            return self.run(*arguments, env=env)
        finally:
            self.calls.disarm()


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: hundreds of runs need not wait for a disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    for left in memory.glob("publishd-test-*"):  # by tests that were killed
        if not Path("/proc", left.name.split("-")[2]).exists():
            shutil.rmtree(left, ignore_errors=True)
    with TemporaryDirectory(prefix=f"publishd-test-{os.getpid()}-", dir=memory) as folder:
        yield Path(folder)


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[Warm]:
    """Commands forked from a process that has imported publishd."""
    folder = tmp_path / "warm"
    folder.mkdir()
    with Warm(folder) as started:
        yield started
