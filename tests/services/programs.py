"""Programs that tests start beside themselves, and the free ports that they are given."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_SETPRIV = shutil.which("setpriv")

# A test run that is killed takes its servers along; where that can't be had they are stopped by `stop` alone.
_DIES_WITH_US = [_SETPRIV, "--pdeathsig", "KILL"] if _SETPRIV else []

_BELOW_EPHEMERAL = range(15_000, 32_000)


def free_ports(count: int) -> list[int]:
    """Different ports on 127.0.0.1 that nobody listens on at this moment, and that no outgoing connection is given.

    Somebody else may take one before its program does, so a start that fails is tried again with others.
    """
    held: list[socket.socket] = []
    try:
        while len(held) < count:
            listener = socket.socket()
            held.append(listener)
            try:
                listener.bind(("127.0.0.1", random.choice(_BELOW_EPHEMERAL)))
            except OSError:
                held.pop().close()
        return [listener.getsockname()[1] for listener in held]
    finally:
        for listener in held:
            listener.close()


def installed(program: str) -> str:
    """The path of a program that belongs to the test dependencies: beside this Python, or else on the PATH."""
    beside = Path(sys.executable).with_name(program)
    found = str(beside) if beside.exists() else shutil.which(program)
    assert found, f"{program} is not installed: pip install 'publishd[test]'"
    return found


class Program:
    """A program in a process group of its own and an environment without proxies or credentials; its output goes to a file."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        self._log = folder / "log"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*_DIES_WITH_US, *arguments],
                env={"PATH": os.defpath, "HOME": str(folder), "TMPDIR": str(folder)},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", "backslashreplace")

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def stop(self, grace: float = 1) -> None:
        """Ask it to end, and after `grace` seconds no longer ask; what it started goes with it."""
        if not self.ended:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(grace)
        except subprocess.TimeoutExpired:
            pass  # the next signal is not a request
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing of it runs any more
        self.process.wait()
