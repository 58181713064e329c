"""Forward proxies: one that works, one that never answers, and a trap that nothing may ever reach."""

from __future__ import annotations

import socket
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest

from commands import eventually
from services.programs import Program

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.certificates import Certificate


# The proxy's own children outlive it unless they ask not to (PR_SET_PDEATHSIG is 1, SIGKILL 9; Linux).
_PROXY = """
import ctypes, os, proxy, sys
if sys.platform == "linux":
    os.register_at_fork(after_in_child=lambda: ctypes.CDLL(None).prctl(1, 9))
proxy.entry_point()
"""


class Listener:
    """Accepts connections and records the first bytes of each, then closes it, or with `hold` never answers and keeps it."""

    def __init__(self, *, hold: bool = False) -> None:
        self.heads: list[bytes] = []
        """What came first on each connection; what came within a second, which may be nothing."""
        self._hold = hold
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._held: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept; close alone would not
        self._thread.join()
        for connection in (self._listener, *self._held):
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.settimeout(1)
            try:
                self.heads.append(connection.recv(1 << 16))
            except OSError:
                self.heads.append(b"")
            if self._hold:
                self._held.append(connection)
            else:
                connection.close()


class ForwardProxy:
    """A real forward proxy for http and, by CONNECT, https; `log` has a line per connection when it is closed."""

    def __init__(self, folder: Path, certificate: Certificate | None = None) -> None:
        port_file = folder / "port"
        arguments = ["--hostname", "127.0.0.1", "--port", "0", "--port-file", str(port_file), "--num-acceptors", "1"]
        arguments += ["--num-workers", "1", "--timeout", "60", "--log-level", "INFO", "--data-dir", str(folder)]
        if certificate:
            arguments += ["--cert-file", str(certificate.chain), "--key-file", str(certificate.key)]
        self.program = Program([sys.executable, "-c", _PROXY, *arguments], folder)
        try:
            eventually(lambda: self.program.ended or (port_file.exists() and port_file.read_text().strip()), "a proxy", 30)
            assert not self.program.ended, self.program.log
        except BaseException:
            self.program.stop()
            raise
        scheme, host = ("https", "localhost") if certificate else ("http", "127.0.0.1")
        self.url = f"{scheme}://{host}:{int(port_file.read_text())}"

    @property
    def log(self) -> str:
        return self.program.log

    def passed(self, text: str) -> int:
        """How many connections went through it, and were closed, whose line in the log has this text, say a host and port."""
        return sum(text in line and " bytes - " in line for line in self.log.splitlines())


@contextmanager
def _started(certificate: Certificate | None = None) -> Iterator[ForwardProxy]:
    with tempfile.TemporaryDirectory(prefix="proxy-", ignore_cleanup_errors=True) as folder:
        proxy = ForwardProxy(Path(folder), certificate)
        try:
            yield proxy
        finally:
            proxy.program.stop(grace=0.2)


@pytest.fixture(scope="session")
def forward_proxy() -> Iterator[ForwardProxy]:
    """One proxy per test process."""
    with _started() as proxy:
        yield proxy


@pytest.fixture(scope="session")
def https_forward_proxy(loopback_certificate: Certificate) -> Iterator[ForwardProxy]:
    """One proxy per test process that is itself spoken to over TLS."""
    with _started(loopback_certificate) as proxy:
        yield proxy


@pytest.fixture
def trap() -> Iterator[Listener]:
    """Where environment variables point that nothing may heed; `heads` has to stay empty."""
    with Listener() as listener:
        yield listener


@pytest.fixture
def silent_proxy() -> Iterator[Listener]:
    """Accepts, reads, and never answers CONNECT."""
    with Listener(hold=True) as listener:
        yield listener
