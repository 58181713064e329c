"""PID 1 of a container, as which `publishd run` may be started: whatever loses its parent there becomes its child."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from publishd.signals import HEARD

if TYPE_CHECKING:
    from types import FrameType

_SIGNALLED = 128


def work_in_a_child() -> None:
    """Return in a child of this process, which itself reaps, passes on what it is told, and ends with the child's status.

    To be called while there is one thread.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return

    def pass_on(number: int, _frame: FrameType | None) -> None:
        os.kill(child, number)

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in HEARD:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    ended = 0
    while ended != child:
        ended, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else _SIGNALLED - code)
