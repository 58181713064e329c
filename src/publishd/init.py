"""PID 1 of a container, as which `publishd run` may be started: whatever loses its parent there becomes its child."""

from __future__ import annotations

import os
import signal

from publishd.signals import HEARD

_SIGNALLED = 128
_SI_KERNEL = 0x80
"""In si_code (sigaction(2)): sent by the kernel, as a terminal's Ctrl-C is, which all of its foreground get."""


def work_in_a_child() -> None:
    """Return in a child of this process, which itself reaps, passes on what it is told, and ends with the child's status.

    To be called while there is one thread.
    """
    # Blocked from here to the end, and taken one by one: there is no instant at which one could be lost or strike a
    # process that got the number of the child.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*HEARD, signal.SIGCHLD))
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    while True:
        told = signal.sigwaitinfo((*HEARD, signal.SIGCHLD))
        if told.si_signo == signal.SIGCHLD:
            _reap(child)
        elif told.si_code != _SI_KERNEL:
            os.kill(child, told.si_signo)


def _reap(child: int) -> None:
    """Reap all that have ended, and end with the child's status if it is among them."""
    while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
        pid, status = ended
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else _SIGNALLED - code)
