"""What a watch tells the service manager (sd_notify), heard on a socket of the test's own; see test_systemd for a real one."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, Self

import pytest

from commands import ORDINARY_USER, Root, Watch, environment, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Manager:
    """A service manager that only listens."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        self._socket.setblocking(False)
        self._heard: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    @property
    def heard(self) -> list[str]:
        """All lines so far."""
        try:
            while True:
                self._heard += self._socket.recv(4096).decode().split("\n")
        except BlockingIOError:
            return self._heard

    def hears(self, text: str) -> str:
        """Wait for a line that has this in it."""
        return str(eventually(lambda: next((line for line in self.heard if text in line), None), f"{text!r} in {self._heard}"))


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    with Manager(str(tmp_path / "notify")) as listening:
        yield listening


def told(manager: Manager, **changes: str) -> dict[str, str]:
    return environment(NOTIFY_SOCKET=manager.address, **changes)


def test_ready_comes_after_the_first_scan_and_stopping_with_the_time_it_may_take(root: Root, manager: Manager) -> None:
    """READY, STATUS with the counts, STOPPING with linger and drain and some more, in this order."""
    root.hf(500)
    (root.execution / "checkpoint-600").mkdir()
    with Watch(root, "hf", "-drain", "70s", "-linger", "1s", env=told(manager)) as watch:
        manager.hears("READY=1")
        watch.says("published: ")
        assert watch.stop().code == 0
    heard = manager.heard
    assert heard[0] == "READY=1"
    assert "EXTEND_TIMEOUT_USEC=81000000" in heard
    assert heard.index("STOPPING=1") > heard.index("READY=1")
    assert "WATCHDOG=1" not in heard
    assert "2 saves seen, 1 published, 1 pending; last publication" in heard[-1]


def test_the_watchdog_is_fed_between_scans_too(root: Root, manager: Manager) -> None:
    """A long interval is no sign of death."""
    with Watch(root, interval="1h", env=told(manager, WATCHDOG_USEC="400000")):
        eventually(lambda: manager.heard.count("WATCHDOG=1") >= 8)
    assert manager.hears("no publication by this watch yet")


def test_the_watchdog_is_fed_while_scans_only_fail(tmp_path: Path, manager: Manager) -> None:
    """A store that says no is not one that hangs; the status tells what it says."""
    with Watch(Root(tmp_path / "missing"), env=told(manager, WATCHDOG_USEC="400000")):
        eventually(lambda: manager.heard.count("WATCHDOG=1") >= 8)
        assert "No such file" in manager.hears("missing")


def test_what_cannot_be_published_is_in_the_status(root: Root, manager: Manager) -> None:
    """An operator sees why something is pending, without the journal."""
    for folder in ("pub", "prune"):
        (root.path / folder).mkdir(mode=0o555)
    root.hf(500)
    with Watch(root, env=told(manager, WATCHDOG_USEC="400000"), prefix=ORDINARY_USER):
        assert "1 pending" in manager.hears("Permission denied")


@pytest.mark.parametrize("value", ["9" * 5_000, "-1", "²", "0", "1e6", ""])
def test_a_watchdog_time_that_is_none_is_not_fed(root: Root, manager: Manager, value: str) -> None:
    """And ends nothing."""
    with Watch(root, env=told(manager, WATCHDOG_USEC=value)) as watch:
        manager.hears("STATUS=")
        watch.scanned().stop().succeeded(b"")
    assert "WATCHDOG=1" not in manager.heard


def test_the_watchdog_of_another_process_is_not_fed(root: Root, manager: Manager) -> None:
    """What a parent was told to feed is not this watch's."""
    env = told(manager, WATCHDOG_USEC="400000", WATCHDOG_PID=str(os.getpid()))
    with Watch(root, env=env) as watch:
        manager.hears("STATUS=")
        watch.scanned()
    assert "WATCHDOG=1" not in manager.heard


def test_an_abstract_address_is_one(root: Root) -> None:
    """`@` stands for the zero byte of Linux's abstract names."""
    with Manager(f"@publishd-{os.getpid()}-{time.monotonic_ns()}") as manager, Watch(root, env=told(manager)):
        manager.hears("READY=1")


@pytest.mark.parametrize("address", ["/nowhere/notify", "relative", "\x01", "/" + "x" * 200])
def test_a_manager_that_cannot_be_told_is_said_once_and_changes_nothing(root: Root, address: str) -> None:
    """The watch goes on as if nobody had asked to be told."""
    with Watch(root, env=environment(NOTIFY_SOCKET=address, WATCHDOG_USEC="40000")) as watch:
        watch.scanned()
        ended = watch.stop()
    assert ended.code == 0
    assert ended.err.count("cannot tell the service manager") == 1
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("watchdog", ["", "0", "-5", "soon", "٣"])
def test_a_watchdog_that_is_none_is_not_fed(root: Root, manager: Manager, watchdog: str) -> None:
    """Nothing but a positive number is a time."""
    with Watch(root, env=told(manager, WATCHDOG_USEC=watchdog)) as watch:
        manager.hears("READY=1")
        watch.scanned()
        assert watch.stop().code == 0
    assert "WATCHDOG=1" not in manager.heard


def test_a_manager_that_does_not_read_holds_up_nothing(root: Root, manager: Manager) -> None:
    """Its full socket is no reason to wait."""
    with Watch(root, env=told(manager, WATCHDOG_USEC="4000")) as watch:
        for _ in range(20):
            watch.scanned()
        assert watch.stop().code == 0
