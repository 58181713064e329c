"""Reasons on stderr, one line per event: `publishd <command>: …`.

They are written from a thread of their own: the log may be a pipe nobody reads, or lie on the file system that hangs,
and neither may hold up the loop, a signal or a deadline.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import threading
import traceback

from publishd.errors import printable

_STDERR = 2
_QUEUED_LINES = 10_000
_SPEAKERS = {"publishd", "asyncio", "root"}


class StderrHandler(logging.Handler):
    """Writes each record as one line; a line that can't be written is lost, and nothing else happens."""

    def __init__(self, command: str) -> None:
        super().__init__(logging.INFO)
        self._prefix = f"publishd {command}: " if command else "publishd: "
        self._lines: queue.Queue[bytes | None] = queue.Queue(_QUEUED_LINES)
        self._finishing = False
        self._thread: threading.Thread | None = threading.Thread(target=self._write_queued, name="log", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no thread is to be had: better a line that may block than none
            self._thread = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop what libraries log on their own: their failures are publishd's to report, and their texts may hold secrets."""
        return record.name.partition(".")[0] in _SPEAKERS and super().filter(record) is not False

    def emit(self, record: logging.LogRecord) -> None:
        """Write or queue one record; control characters in it are escaped."""
        text = self._prefix + printable(record.getMessage()) + "\n"
        if record.exc_info and record.exc_info[1]:
            text += "".join(_traced(record.exc_info[1]))
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(text.encode("utf-8", "backslashreplace"))

    def finish(self, seconds: float) -> bool:
        """Wait until all is written, but at most so long; False if it is not. Nothing is logged any more."""
        if not self._finishing:
            try:
                self._lines.put(None, timeout=seconds)
            except queue.Full:
                return False
            self._finishing = True
        if self._thread is None:
            self._write_queued()
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _write_queued(self) -> None:
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(OSError):
                write_all(_STDERR, line)


def _traced(error: BaseException, *, words: bool = True) -> list[str]:
    """The traceback of a bug. What it came after is shown by its place and type only: libraries put requests into words."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    lines = [*_traced(before, words=False), "\nand then:\n\n"] if before else []
    lines += ["Traceback (most recent call last):\n", *traceback.format_tb(error.__traceback__)]
    lines.append(f"{type(error).__qualname__}{f': {printable(str(error))}' if words else ''}\n")
    for inner in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        lines += _traced(inner, words=words)
    return lines


def write_all(fd: int, content: bytes) -> None:
    """Write all of it, however long that takes, also to a pipe that somebody has made non-blocking. Raises OSError."""
    while content:
        try:
            content = content[os.write(fd, content) :]
        except BlockingIOError:
            select.select([], [fd], [])


def to_stderr(command: str) -> StderrHandler:
    """Send the log of publishd, and of the event loop, to stderr."""
    handler = StderrHandler(command)
    logging.getLogger().addHandler(handler)
    logging.getLogger("publishd").setLevel(logging.INFO)
    return handler
