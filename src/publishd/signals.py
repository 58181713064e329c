"""What the process is told by signals: as two events, stop and abandon (a further SIGINT), and one by one.

Installing comes before every import that takes time, so this module imports next to nothing. The handlers stay for the
whole life of the process, without the event loop's own, which would fall back to the default action when it closes.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from types import FrameType

_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HEARD = (*_STOPPING, signal.SIGUSR1, signal.SIGUSR2)
"""Those that are taken over. SIGUSR1 and SIGUSR2 only so that they kill nobody: schedulers send them to all of a job."""
SAME_INTERRUPT_SECONDS = 0.5
"""SIGINTs this close to the first are one: a Ctrl-C, say, that a terminal tells all and a program between (timeout) again."""


class Signals:
    """What the process has been told so far; before `attach` it is only noted."""

    stop: asyncio.Event
    abandon: asyncio.Event
    told: asyncio.Queue[signal.Signals]
    """Each signal, once however often it comes, in their order."""

    def __init__(self) -> None:
        self.parent = os.getppid()
        self.last: signal.Signals | None = None
        """The last one that means stop."""
        self._interrupted_at = 0.0
        self._insisted = False
        self._noted: list[signal.Signals] = []
        self._passed_on = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def came(self) -> bool:
        """Whether there was any."""
        return bool(self._noted)

    def install(self) -> Signals:
        """Take the signals over. All but SIGTERM stay ignored where they were (`&` in a script, nohup)."""
        for number in HEARD:
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
        return self

    def hold(self) -> None:
        """Keep what was and will be received pending, over an exec, until `install` is called again."""
        signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
        for number in self._noted:
            os.kill(os.getpid(), number)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make events and queue of this loop follow the signals, those already received included."""
        import asyncio

        self.stop, self.abandon, self.told = asyncio.Event(), asyncio.Event(), asyncio.Queue()
        self._loop = loop
        self._tell()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number not in self._noted:
            if number == signal.SIGINT:
                self._interrupted_at = time.monotonic()
            self._noted.append(signal.Signals(number))
        elif number != signal.SIGINT or self._insisted or time.monotonic() < self._interrupted_at + SAME_INTERRUPT_SECONDS:
            return  # at once: in a flood each interrupts this for the one before
        else:
            self._insisted = True
        if number in _STOPPING:
            self.last = signal.Signals(number)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        while self._passed_on < len(self._noted):
            self.told.put_nowait(self._noted[self._passed_on])
            self._passed_on += 1
        if self.last is not None:
            self.stop.set()
        if self._insisted:
            self.abandon.set()
