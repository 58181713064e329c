"""An HTTP server on loopback that does what a script says: it answers, lies, stalls or hangs up, and records every request.

    server.queue += [Answer(503)] * 5                                    # the next five requests, whatever they are
    server.script("PUT", "pub/*", [Answer(409), PASS, after(Fate.DROP)]) # the first, second and third such request
    server.script("GET", "*", itertools.repeat(Answer(403)))             # every one
    assert [request.key for request in server.requests] == [...]

What no script speaks of is answered by the server's behaviour, by default a `SmallS3`. As a forward proxy it answers, too,
in the place of whatever host is asked for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

import pytest

from services.exchanges import Answer, Behaviour, Fate, Request, Step, error, xml
from services.places import REGION, Keys
from services.small_s3 import SmallS3

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable, Iterator

    from services.certificates import Certificate


__all__ = ["PASS", "Answer", "Behaviour", "Fate", "Request", "Scripted", "ScriptedS3", "Step", "after", "error", "xml"]


def PASS(request: Request, behave: Behaviour) -> Answer:  # noqa: N802 - a step of a script, beside the others
    """This request is answered as usual."""
    return behave(request)


def after(what: Answer | Fate) -> Step:
    """The request takes effect, and yet this is what comes back."""

    def step(request: Request, behave: Behaviour) -> Answer | Fate:
        behave(request)
        return what

    return step


class Scripted:
    """The server. Leaving the `with` block closes every connection and raises what a behaviour or a step raised."""

    def __init__(self, behaviour: Behaviour, certificate: Certificate | None = None) -> None:
        self.behaviour = behaviour
        self.queue: deque[Step] = deque()
        """What becomes of the next requests, whatever they are; comes before all scripts."""
        self.requests: list[Request] = []
        self.connections = 0
        self.failures: list[BaseException] = []
        self.closing = threading.Event()
        self._scripts: list[tuple[str, str, Iterator[Step]]] = []
        self._lock = threading.Lock()
        self._server = _Server(self, certificate)
        scheme, host = ("https", "localhost") if certificate else ("http", "127.0.0.1")
        self.endpoint = f"{scheme}://{host}:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.hang_up()
        self._server.server_close()
        if self.failures:
            raise self.failures[0]

    def script(self, method: str, key: str, steps: Iterable[Step]) -> Self:
        """The first request of this method (or `*`) whose key fits the pattern meets the first step, and so on.

        A pattern is one of shells, and has to fit the end of the key. When the steps are used up, so is the script; the
        first script that fits is the one that counts.
        """
        with self._lock:
            self._scripts.append((method, key, iter(steps)))
        return self

    def seen(self, method: str = "*", key: str = "*") -> list[Request]:
        """The recorded requests of this method and key, chosen as `script` does."""
        with self._lock:
            return [request for request in self.requests if _fits(request, method, key)]

    def outcome(self, request: Request) -> Answer | Fate:
        """Record the request, and decide what becomes of it."""
        with self._lock:
            self.requests.append(request)
            step = self._step(request)
        if isinstance(step, Answer | Fate):
            return step
        return step(request, self.behaviour)

    def _step(self, request: Request) -> Step:
        if self.queue:
            return self.queue.popleft()
        for method, key, steps in self._scripts:
            if _fits(request, method, key) and (step := next(steps, None)) is not None:
                return step
        return PASS

    def drops_unread(self) -> bool:
        """Whether the queue says that the next request is not even read."""
        with self._lock:
            if drops := bool(self.queue) and self.queue[0] is Fate.DROP_UNREAD:
                self.queue.popleft()
            return drops

    def new_connection(self) -> int:
        with self._lock:
            self.connections += 1
            return self.connections - 1


def _fits(request: Request, method: str, key: str) -> bool:
    return method in ("*", request.method) and (fnmatchcase(request.key, key) or fnmatchcase(request.key, f"*/{key}"))


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    request_queue_size = 128

    def __init__(self, scripted: Scripted, certificate: Certificate | None) -> None:
        self.scripted = scripted
        self._context = certificate.context() if certificate else None
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _Connection)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        connection.settimeout(60)
        if self._context:  # the handshake is made by the connection's own thread, when it first reads
            connection = self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        self._open.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        """Wake every thread that still waits for its client."""
        for connection in list(self._open):
            try:
                connection.shutdown(2)
            except OSError:
                pass  # the client was faster

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away, or does not like the certificate, is no failure."""


class _Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_version, sys_version = "scripted", ""
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.number = self.server.scripted.new_connection()

    def log_message(self, *_: object) -> None:
        pass

    def handle_one_request(self) -> None:
        if not self.rfile.peek(1) or self.server.scripted.drops_unread():  # type: ignore[attr-defined]
            self.close_connection = True
            return
        super().handle_one_request()

    def _serve(self) -> None:
        target = self.requestline.split()[1]  # self.path is not what came: `//` is made `/` there
        request = Request(self.command, target, self.headers, self._content(), time.monotonic(), self.number)
        try:
            outcome = self.server.scripted.outcome(request)
        except Exception as failure:
            self.server.scripted.failures.append(failure)
            outcome = Answer(500, b"the test's own behaviour failed")
        if isinstance(outcome, Answer):
            self._answer(outcome)
        else:
            if outcome is Fate.SILENCE:
                self.server.scripted.closing.wait()
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_CONNECT = _serve  # noqa: N815

    def _content(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _answer(self, answer: Answer) -> None:
        if answer.delay and self.server.scripted.closing.wait(answer.delay):
            self.close_connection = True
            return
        given = {name.lower() for name in answer.headers}
        self.send_response_only(answer.status)
        if "date" not in given:
            self.send_header("Date", self.date_time_string())
        if not given & {"content-length", "transfer-encoding"}:
            self.send_header("Content-Length", str(len(answer.body)))
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self._send(answer)

    def _send(self, answer: Answer) -> None:
        body = answer.body if answer.cut is None else answer.body[: answer.cut]
        if answer.pause:
            for number in range(len(body)):
                self.wfile.write(body[number : number + 1])
                if self.server.scripted.closing.wait(answer.pause):
                    break
        else:
            self.wfile.write(body)
        if answer.cut is not None:
            self.close_connection = True


class ScriptedS3(Scripted):
    """A scripted server whose behaviour is a small S3; `s3` is what it holds."""

    def __init__(self, certificate: Certificate | None = None, **options: Any) -> None:
        self.s3 = SmallS3(**options)
        super().__init__(self.s3, certificate)
        self.keys = Keys("AKIDSMALL", "secret-of-the-small-one")

    @property
    def flags(self) -> list[str]:
        """What every command needs beside `-checkpoint`, with `environ` in its environment."""
        return ["-creds", "env", "-endpoint", self.endpoint, "-region", REGION]

    @property
    def environ(self) -> dict[str, str]:
        return self.keys.environ


@pytest.fixture
def scripted() -> Iterator[ScriptedS3]:
    """A scripted server with an empty small S3 behind it."""
    with ScriptedS3() as server:
        yield server


@pytest.fixture
def scripted_https(loopback_certificate: Certificate) -> Iterator[ScriptedS3]:
    """The same over TLS, with a certificate of the private CA."""
    with ScriptedS3(loopback_certificate) as server:
        yield server
