"""What runs in each guest of `services.nfs`: it calls what the tests name, and answers.

Questions and answers are lines of JSON on the guest's second console. Questions are answered side by side, each in a thread.
"""

from __future__ import annotations

import ctypes
import json
import os
import pkgutil
import subprocess
import tempfile
import threading
import tty
from pathlib import Path
from typing import Any

_FINIT_MODULE = 313  # on x86-64, the only machine that these guests' kernel is built for
_MODULES = Path("/usr/lib/uml/modules", os.uname().release)
_PIECE = 1024  # more at once than the console takes would be cut

_programs: dict[int, tuple[subprocess.Popen[bytes], int]] = {}
_writing = threading.Lock()


def load(module: str) -> None:
    """Load a module of the kernel, after those it needs."""
    loaded = {line.split()[0] for line in Path("/proc/modules").read_text().splitlines()}
    for line in (_MODULES / "modules.dep").read_text().splitlines():
        path, _, needed = line.partition(":")
        if _name(path) == module:
            for each in (*reversed(needed.split()), path):
                if _name(each) not in loaded:
                    _insert(_MODULES / each)


def _name(path: str) -> str:
    return Path(path).name.partition(".")[0].replace("-", "_")


def _insert(file: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with file.open("rb") as module:
        if libc.syscall(_FINIT_MODULE, module.fileno(), b"", 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(file))


def start(arguments: list[str], environ: dict[str, str]) -> int:
    """Start a program; all it says is kept."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            arguments, env={**os.environ, **environ}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said
        )
        _programs[process.pid] = process, os.dup(said.fileno())
    return process.pid


def said(pid: int) -> str:
    """What it has written to its standard error so far."""
    return os.pread(_programs[pid][1], 1 << 20, 0).decode("utf-8", "backslashreplace")


def send(pid: int, number: int) -> None:
    _programs[pid][0].send_signal(number)


def ended(pid: int, seconds: float) -> tuple[int, str, str]:
    """Its exit status, and what it wrote; raises TimeoutExpired where it goes on."""
    process, log = _programs[pid]
    out, _ = process.communicate(timeout=seconds)
    answer = process.returncode, out.decode("utf-8", "backslashreplace"), said(pid)
    os.close(log)
    del _programs[pid]
    return answer


def write(path: str, content: str) -> None:
    Path(path).write_text(content)


def read(path: str) -> str:
    return Path(path).read_text()


def _answer(console: int, question: dict[str, Any]) -> None:
    call = question["call"]
    answer: dict[str, Any] = {"id": question["id"]}
    try:
        function = globals().get(call) or pkgutil.resolve_name(call)
        answer["result"] = function(*question["arguments"])
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    _send(console, answer)


def _send(console: int, answer: dict[str, Any]) -> None:
    line = json.dumps(answer).encode() + b"\n"
    with _writing:
        while line:
            line = line[os.write(console, line[:_PIECE]) :]


def main() -> None:
    console = os.open("/dev/tty1", os.O_RDWR | os.O_NOCTTY)
    tty.setraw(console)
    _send(console, {"id": 0, "result": None})
    with open(console, "rb", closefd=False) as questions:
        for line in questions:
            threading.Thread(target=_answer, args=(console, json.loads(line)), daemon=True).start()


if __name__ == "__main__":
    main()
