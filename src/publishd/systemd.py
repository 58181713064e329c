"""What a service manager is told of a watch: sd_notify(3), for a unit of Type=notify.

The watchdog is fed from the event loop, and only while no scan has been at it for too long: not for a loop that is
stuck, nor for a store that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from publishd.watch import Watcher

log = logging.getLogger(__name__)

_MICROSECONDS = re.compile("[0-9]{1,18}")
_TELL_INTERVAL = 10.0
_BEATS = 4
"""How often the watchdog is fed in its time."""
_SCAN_SHARE = 3
"""A scan that takes longer than this part of the watchdog's time is not fed for: longer than a space between two beats,
lest a beat just misses the beginnings of scans that are slow, and no more."""


class ServiceManager:
    """Whoever set NOTIFY_SOCKET; where nobody did, all that it is told is lost."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._deaf = False
        watchdog = environ.get("WATCHDOG_USEC", "")
        is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        microseconds = int(watchdog) if is_ours and _MICROSECONDS.fullmatch(watchdog) else 0
        self._watched = microseconds > 0
        time = microseconds / 1e6
        self._interval = min(_TELL_INTERVAL, time / _BEATS) if self._watched else _TELL_INTERVAL
        self._scan_limit = time / _SCAN_SHARE

    async def follow(self, watcher: Watcher, stop: asyncio.Event, seconds: float) -> None:
        """Tell how the watch is doing for as long as it goes on; from `stop` on it may take so many more seconds."""
        if not self._address:
            return
        stopping = asyncio.create_task(stop.wait())
        ready = asyncio.create_task(watcher.scanned.wait())
        await asyncio.wait((ready, stopping), return_when=asyncio.FIRST_COMPLETED)
        self._tell("READY=1")
        while not stopping.done():
            alive = ["WATCHDOG=1"] if self._watched and watcher.scanning_for() < self._scan_limit else []
            self._tell(*alive, f"STATUS={watcher.status()}")
            await asyncio.wait((stopping,), timeout=self._interval)
        self._tell("STOPPING=1", f"EXTEND_TIMEOUT_USEC={seconds * 1e6:.0f}")
        while True:
            self._tell(f"STATUS=stopping: {watcher.status()}")
            await asyncio.sleep(1)

    def _tell(self, *lines: str) -> None:
        message = "\n".join(line.replace("\n", " ") for line in lines).encode("utf-8", "backslashreplace")
        try:
            with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)) as notify:
                notify.connect(self._address)
                notify.send(message)
        except OSError as error:
            if not self._deaf:
                log.warning("cannot tell the service manager: NOTIFY_SOCKET: %s", error.strerror or error)
            self._deaf = True
