"""Reasons on stderr, one line per event: `publishd <command>: …`.

A watch writes them from a thread of its own: the log may be a pipe nobody reads, or lie on the file system that hangs,
and neither may hold up the loop or the deadline.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading

from publishd.errors import printable

_STDERR = 2
_QUEUED_LINES = 10_000


class StderrHandler(logging.Handler):
    """Writes each record as one line; a line that can't be written is lost, and nothing else happens."""

    def __init__(self, command: str, *, threaded: bool) -> None:
        super().__init__(logging.INFO)
        self._prefix = f"publishd {command}: " if command else "publishd: "
        self._lines: queue.Queue[bytes | None] | None = None
        if threaded:
            self._lines = queue.Queue(_QUEUED_LINES)
            self._thread = threading.Thread(target=self._write_queued, args=(self._lines,), name="log", daemon=True)
            self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Write or queue one record; control characters in it are escaped."""
        text = self._prefix + printable(record.getMessage()) + "\n"
        if record.exc_info:
            text += logging.Formatter().formatException(record.exc_info) + "\n"
        line = text.encode("utf-8", "backslashreplace")
        if self._lines is None:
            _write(line)
        else:
            with contextlib.suppress(queue.Full):
                self._lines.put_nowait(line)

    def finish(self, seconds: float) -> None:
        """Wait until all is written, but at most so long."""
        if self._lines is not None:
            with contextlib.suppress(queue.Full):
                self._lines.put_nowait(None)
            self._thread.join(seconds)

    @staticmethod
    def _write_queued(lines: queue.Queue[bytes | None]) -> None:
        while (line := lines.get()) is not None:
            _write(line)


def _write(line: bytes) -> None:
    with contextlib.suppress(OSError):
        while line:
            line = line[os.write(_STDERR, line) :]


def to_stderr(command: str, *, threaded: bool) -> StderrHandler:
    """Send the log of publishd, and warnings of what it is built on, to stderr."""
    handler = StderrHandler(command, threaded=threaded)
    logging.getLogger().addHandler(handler)
    logging.getLogger("publishd").setLevel(logging.INFO)
    return handler
