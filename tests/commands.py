"""The installed command as its users run it: in a process of its own, with real signals, exit codes and bytes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, Self

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

ATTEMPT = "1.4101.0"
EPOCH = 1_000_000
BIN = Path(sys.executable).parent
PUBLISHD = str(BIN / "publishd")

# Root may read and write everything; without these two capabilities it is subject to permissions like anybody.
ORDINARY_USER: tuple[str, ...] = (
    ("setpriv", "--bounding-set", "-dac_override,-dac_read_search,-fowner") if os.geteuid() == 0 else ()
)


def require(tool: str, why_not: str | None) -> None:
    """Skip the test with `why_not` unless None; a failure instead where PUBLISHD_REQUIRE names the tool."""
    if why_not is None:
        return
    if tool in os.environ.get("PUBLISHD_REQUIRE", "").split(","):
        pytest.fail(f"{tool} is required, but {why_not}")
    pytest.skip(why_not)


def require_program(tool: str, program: str) -> str:
    """The path of a program, or a skip."""
    found = shutil.which(program)
    require(tool, None if found else f"{program} is not installed")
    assert found
    return found


def environment(**changes: str | None) -> dict[str, str]:
    """The environment of the tests with the execution's attempt and epoch in it; None removes a variable."""
    env = {**os.environ, "DISPATCH_ATTEMPT": ATTEMPT, "DISPATCH_EPOCH": str(EPOCH)}
    for name, value in changes.items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    return env


class Ran:
    """How a command ended."""

    def __init__(self, code: int, out: bytes, err: bytes) -> None:
        self.code, self.out, self.err = code, out, err.decode("utf-8", "backslashreplace")

    def __repr__(self) -> str:
        return f"<exit {self.code}, stdout {self.out!r}, stderr {self.err!r}>"

    @property
    def json(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    def succeeded(self, out: bytes | None = None) -> Self:
        """Assert exit 0 and, if given, the exact bytes of stdout."""
        assert self.code == 0, self
        assert "Traceback" not in self.err, self
        if out is not None:
            assert self.out == out, self
        return self

    def failed(self, *said: str, code: int = 1) -> Self:
        """Assert the exit code, an empty stdout, and a single line on stderr that has all of `said`."""
        assert (self.code, self.out) == (code, b""), self
        self.said_one_line(*said)
        return self

    def said_one_line(self, *said: str) -> Self:
        lines = self.err.splitlines()
        assert len(lines) == 1, self
        assert lines[0].startswith("publishd"), self
        for text in said:
            assert text in lines[0], self
        return self


def run(
    *arguments: str | bytes | os.PathLike[str],
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    prefix: Sequence[str] = (),
    program: str = PUBLISHD,
    timeout: float = 60,
    **options: Any,
) -> Ran:
    """Run the command to its end; `prefix` goes before it (strace, setpriv …)."""
    ended = subprocess.run(
        [*prefix, program, *arguments],
        env=environment() if env is None else env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=options.pop("stderr", subprocess.PIPE),
        timeout=timeout,
        check=False,
        **options,
    )
    return Ran(ended.returncode, ended.stdout or b"", ended.stderr or b"")


def eventually(condition: Callable[[], Any], what: str = "the condition", seconds: float = 20) -> Any:
    """Wait until `condition()` is true, and return what it returned; fail when the deadline has passed."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{what} did not come about within {seconds} s"
        time.sleep(0.01)
    return result


def whole_lines(log: Path) -> Iterator[str]:
    """The lines of strace's log, each call that another thread's interrupted put together where it ended."""
    begun: dict[str, str] = {}
    for line in log.read_text().splitlines():
        thread, _, call = line.partition(" ")
        if call.endswith("<unfinished ...>"):
            begun[thread] = call.removesuffix("<unfinished ...>")
        elif resumed := re.match(r" *<\.\.\. \w+ resumed>(.*)", call):
            yield begun.pop(thread) + resumed[1]
        else:
            yield call


class Watchable(Protocol):
    """A root, wherever it lives, as far as a watch of it and its tests must know it."""

    @property
    def path(self) -> Path | str: ...
    @property
    def flags(self) -> Sequence[str]:
        """What every command on it needs beside `-checkpoint`."""
        ...

    @property
    def environ(self) -> Mapping[str, str]:
        """What every command on it needs in its environment."""
        ...

    @property
    def steps(self) -> list[int]: ...
    def hf(self, step: int) -> Path | str: ...
    def dcp(self, step: int) -> Path | str: ...


class Background:
    """A command in the background. Leaving the `with` block kills one that still runs."""

    def __init__(self, *arguments: str, env: Mapping[str, str], prefix: Sequence[str] = (), **options: Any) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self.process = subprocess.Popen(
            [*prefix, PUBLISHD, *arguments],
            env=env,
            stdin=options.pop("stdin", subprocess.DEVNULL),
            stdout=options.pop("stdout", subprocess.PIPE),
            stderr=options.pop("stderr", self._log),
            **options,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()
        self._log.close()

    @property
    def log(self) -> str:
        return os.pread(self._log.fileno(), 1 << 24, 0).decode("utf-8", "backslashreplace")

    def says(self, text: str, *, times: int = 1, seconds: float = 20) -> Self:
        """Wait until it has said this so often."""

        def said() -> bool:
            assert self.process.poll() is None or self.log.count(text) >= times, (
                f"it ended ({self.process.returncode}):\n{self.log}"
            )
            return self.log.count(text) >= times

        eventually(said, f"{text!r} in the log", seconds)
        return self

    def send(self, number: int = signal.SIGTERM) -> Self:
        self.process.send_signal(number)
        return self

    def stop(self, number: int = signal.SIGTERM, seconds: float = 40) -> Ran:
        """Send the signal and wait for the end."""
        return self.send(number).ended(seconds)

    def interrupt_again(self, seconds: float = 10) -> int:
        """Send SIGINTs, until one is far enough from the first to count as a second one; the exit status."""

        def ended() -> bool:
            if self.process.poll() is None:
                self.send(signal.SIGINT)
            return self.process.poll() is not None

        eventually(ended, "the end", seconds)
        assert self.process.returncode is not None
        return self.process.returncode

    def ended(self, seconds: float = 40) -> Ran:
        out, _ = self.process.communicate(timeout=seconds)
        return Ran(self.process.returncode, out or b"", self.log.encode())


class Watch(Background):
    """A watch in the background."""

    def __init__(
        self,
        root: Watchable,
        framework: str = "hf",
        *flags: str,
        interval: str = "100ms",
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self._make_save = root.hf if framework == "hf" else root.dcp
        self._root, self._scans = root, 0
        arguments = ["watch", "-checkpoint", str(root.path), "-framework", framework, "-interval", interval]
        super().__init__(*arguments, *root.flags, *flags, env=environment(**root.environ) if env is None else env, **options)

    def watching(self) -> Self:
        """Wait until it has begun."""
        return self.says("watching: ")

    def scanned(self) -> Self:
        """Wait for a whole scan that begins after this call: until a save older than all others (step 1, 2 …) is published."""
        self._scans += 1
        self._make_save(self._scans)
        eventually(lambda: self._scans in self._root.steps, "a whole scan")
        return self


class Root:
    """A checkpoint root on disk, seen behind publishd's back."""

    flags: Sequence[str] = ()
    environ: Mapping[str, str] = MappingProxyType({})

    def __init__(self, path: Path, attempt: str = ATTEMPT) -> None:
        self.path = path
        self.attempt = attempt

    def make(self) -> Self:
        self.execution.mkdir(parents=True)
        return self

    @property
    def execution(self) -> Path:
        return self.path / "exec" / self.attempt

    def hf(self, step: int, stated: object = None, *, folder: str | None = None) -> Path:
        """A complete Trainer save: the weights, then trainer_state.json with `stated` (default: the step)."""
        save = self.execution / (folder or f"checkpoint-{step}")
        save.mkdir(parents=True, exist_ok=True)
        (save / "model.safetensors").write_bytes(b"weights of %d" % step)
        (save / "trainer_state.json").write_text('{"global_step": %s}' % (step if stated is None else stated))
        return save

    def dcp(self, step: int, *, folder: str | None = None) -> Path:
        """A complete torch DCP save."""
        save = self.execution / (folder or f"step-{step}")
        save.mkdir(parents=True, exist_ok=True)
        (save / "__0_0.distcp").write_bytes(b"shard of %d" % step)
        (save / ".metadata").touch()
        return save

    def publish(self, save: Path | str, step: int, epoch: int = EPOCH) -> str:
        """Make an entry by hand, without publishd; returns its name."""
        from publishd.publications import Publication

        path = os.path.relpath(save, self.path) if os.path.isabs(save) else str(save)
        name = Publication(epoch, step, path).name
        (self.path / "pub").mkdir(exist_ok=True)
        (self.path / "prune").mkdir(exist_ok=True)
        (self.path / "pub" / name).touch()
        return name

    def _names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self.path / folder))
        except FileNotFoundError:
            return []

    @property
    def pub(self) -> list[str]:
        """Names in pub/, oldest first."""
        return self._names("pub")

    @property
    def records(self) -> list[str]:
        return self._names("prune")

    @property
    def steps(self) -> list[int]:
        """The published steps, oldest first."""
        return [int(name.split("-")[1]) for name in self.pub]

    def tree(self) -> dict[str, tuple[int, int, bytes]]:
        """Everything below the root: path to mode, inode and content."""
        found = {}
        for folder, folders, files in os.walk(self.path):
            for name in folders + files:
                path = Path(folder) / name
                status = path.lstat()
                content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
                found[str(path.relative_to(self.path))] = (status.st_mode, status.st_ino, content)
        return found

    def run(self, command: str, *arguments: str | os.PathLike[str], **options: Any) -> Ran:
        """`publishd COMMAND -checkpoint ROOT ARGUMENTS…`"""
        return run(command, "-checkpoint", self.path, *arguments, **options)

    def resolved(self) -> str:
        """What resolve prints, without the newline and the root; it must succeed."""
        out = self.run("resolve").succeeded().out.decode("utf-8", "surrogateescape")
        return os.path.relpath(out.removesuffix("\n"), self.path) if out else ""


JOB_SCRIPT = Path(__file__).parent.parent / "examples" / "job.sh"
STAND_IN = JOB_SCRIPT.with_name("train.py")


class Job:
    """The job script as one execution, with `trainer` as its train.py. Leaving the `with` block kills what still runs of it."""

    def __init__(
        self, root: Root, trainer: Path = STAND_IN, *, script: Path = JOB_SCRIPT, epoch: int = EPOCH, **changes: str
    ) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._folder = tempfile.TemporaryDirectory()
        Path(self._folder.name, "train.py").symlink_to(trainer)
        execution = {"CKPT": str(root.path), "DISPATCH_ATTEMPT": root.attempt, "DISPATCH_EPOCH": str(epoch)}
        self.process = subprocess.Popen(
            ["bash", str(script)],
            env=environment(**execution, PATH=f"{BIN}:{os.environ['PATH']}", **changes),
            cwd=self._folder.name,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing of it runs any more
        self.process.communicate()
        self._log.close()
        self._folder.cleanup()

    @property
    def log(self) -> str:
        return os.pread(self._log.fileno(), 1 << 24, 0).decode("utf-8", "backslashreplace")

    def child(self, argument: str) -> int:
        """Wait until the script has started a program with this argument, and return its process."""

        def find() -> int:
            assert self.process.poll() is None, f"it ended ({self.process.returncode}):\n{self.log}"
            return next((pid for pid in _children(self.process.pid) if argument in _arguments(pid)), 0)

        found = eventually(find, f"a child with {argument}", 60)
        assert isinstance(found, int)
        return found

    def ended(self, seconds: float = 60) -> Ran:
        out, _ = self.process.communicate(timeout=seconds)
        return Ran(self.process.returncode, out, self.log.encode())


def _children(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text("utf-8", "replace")
        except OSError:
            continue  # it has just ended
        if int(status.rpartition(")")[2].split()[1]) == pid:
            found.append(int(folder.name))
    return found


def _arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text("utf-8", "surrogateescape").split("\0")
    except OSError:
        return []
