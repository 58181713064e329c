"""SIGTERM, SIGINT and SIGHUP as two events: stop, and abandon (a second SIGINT).

Installing comes before every import that takes time, so this module imports next to nothing. The handlers stay for the
whole life of the process, without the event loop's own, which would fall back to the default action when it closes.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """What the process has been told so far; before `attach` it is only noted."""

    stop: asyncio.Event
    abandon: asyncio.Event

    def __init__(self) -> None:
        self.parent = os.getppid()
        self.last: signal.Signals | None = None
        self._interrupts = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def install(self) -> Signals:
        """Take the signals over. SIGINT and SIGHUP stay ignored where they were (`&` in a script, nohup); SIGTERM never does."""
        for number in _SIGNALS:
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        return self

    def hold(self) -> None:
        """Keep what was and will be received pending, over an exec, until `install` is called again."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        if self.last is not None:
            os.kill(os.getpid(), self.last)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make the two events of this loop follow the signals, those already received included."""
        import asyncio

        self.stop, self.abandon = asyncio.Event(), asyncio.Event()
        self._loop = loop
        self._tell()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.last = signal.Signals(number)
        self._interrupts += number == signal.SIGINT
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        if self.last is not None:
            self.stop.set()
        if self._interrupts > 1:
            self.abandon.set()
