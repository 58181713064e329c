"""A way to a server on which answers are lost, late, cut off, doubled or overtaken, at random or as a script says."""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import socketserver
import threading
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FAULTS = ("lost request", "lost answer", "late", "cut off", "request twice", "answer twice", "overtaken", "busy", "empty")
BUSY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class Unreliable:
    """Stands before an http endpoint. `fault(number, method, target)` names what becomes of a request, or nothing."""

    def __init__(self, endpoint: str, fault: Callable[[int, str, str], str]) -> None:
        self._upstream = endpoint.removeprefix("http://")
        self._fault = fault
        self._lock = threading.Lock()
        self.requests: list[tuple[str, str, str]] = []
        """Method, target and fault of each."""
        way = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    way.serve(self)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def serve(self, client: socketserver.StreamRequestHandler) -> None:
        """The requests of one connection, until something ends it."""
        client.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        upstream = http.client.HTTPConnection(self._upstream, timeout=30)
        try:
            while line := client.rfile.readline(1 << 16).decode("latin-1"):
                method, target, _ = line.split()
                headers = http.client.parse_headers(client.rfile)
                body = client.rfile.read(int(headers.get("Content-Length", "0")))
                with self._lock:
                    fault = self._fault(len(self.requests), method, target)
                    self.requests.append((method, target, fault))
                if not self._answer(client, upstream, (method, target, dict(headers), body), fault):
                    return
        finally:
            upstream.close()

    def _answer(
        self,
        client: socketserver.StreamRequestHandler,
        upstream: http.client.HTTPConnection,
        request: tuple[str, str, Mapping[str, str], bytes],
        fault: str,
    ) -> bool:
        """Whether the connection goes on."""
        method = request[0]
        if fault == "lost request":
            return False
        if fault == "busy":
            client.wfile.write(
                _head(503, "Slow Down", {"Content-Type": "application/xml"}, len(BUSY)) + BUSY * (method != "HEAD")
            )
            return True
        answer = _asked(upstream, request)
        if fault == "request twice":
            answer = _asked(upstream, request)
        if fault == "lost answer":
            return False
        if fault == "late":
            time.sleep(random.uniform(0.05, 0.5))
        elif fault == "overtaken":
            before, deadline = len(self.requests), time.monotonic() + 0.5
            while len(self.requests) < before + 2 and time.monotonic() < deadline:
                time.sleep(0.005)
        if fault == "cut off":
            client.wfile.write(answer[: random.randrange(len(answer))])
            return False
        if fault == "empty":  # a header, and a body that never comes
            client.wfile.write(answer[: answer.index(b"\r\n\r\n") + 4])
            return False
        client.wfile.write(answer * (2 if fault == "answer twice" else 1))
        return True


def _asked(upstream: http.client.HTTPConnection, request: tuple[str, str, Mapping[str, str], bytes]) -> bytes:
    method, target, headers, body = request
    upstream.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
    for name, value in headers.items():
        upstream.putheader(name, value)
    upstream.endheaders(body or None)
    answer = upstream.getresponse()
    content = answer.read()
    kept = {
        name: value
        for name, value in answer.getheaders()
        if name.lower() not in ("transfer-encoding", "content-length", "connection")
    }
    length = int(answer.getheader("Content-Length") or 0) if method == "HEAD" else len(content)
    return _head(answer.status, answer.reason, kept, length) + content


def _head(status: int, reason: str, headers: Mapping[str, str], length: int) -> bytes:
    lines = [f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in headers.items()), f"Content-Length: {length}"]
    return "\r\n".join((*lines, "", "")).encode("latin-1")
