"""An S3 and a Vault that mean harm: every command ends in time, within bounds of memory, with one line, and sends nothing on."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from commands import PUBLISHD, Ran, environment
from services.proxies import Listener
from test_s3_faults import HURRIED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The command with patience for some seconds, of the Vault as of the store.
_HURRIED = f"""
import publishd.credentials.live, publishd.credentials.vault
publishd.credentials.live._PATIENCE = 3.0
publishd.credentials.vault._FETCH_SECONDS = 2.0
{HURRIED[2]}"""
SECRET = "geheim-4711-token"
MEGABYTES = 200
SECONDS = 30
OK = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n"
LISTING = b"<ListBucketResult><Name>bucket</Name><Prefix>p/pub/</Prefix><IsTruncated>false</IsTruncated>%b</ListBucketResult>"


def whole(kind: bytes, body: bytes, more: bytes = b"") -> bytes:
    return OK % kind + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


def bomb(depth: int = 30) -> bytes:
    """A billion laughs: entities of entities."""
    entities = b"".join(b'<!ENTITY a%d "%b">' % (level, b"&a%d;" % (level - 1) * 10) for level in range(1, depth))
    return b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a0 "ha">%b]>' % entities + LISTING % (b"<Key>&a%d;</Key>" % (depth - 1))


def once(answer: bytes) -> Callable[[socket.socket], None]:
    return lambda client: client.sendall(answer)


def endless(head: bytes, piece: bytes) -> Callable[[socket.socket], None]:
    def send(client: socket.socket) -> None:
        client.sendall(head)
        while True:
            client.sendall(piece)

    return send


def drip(answer: bytes) -> Callable[[socket.socket], None]:
    """A byte at a time, and never the last."""

    def send(client: socket.socket) -> None:
        for number in range(len(answer) - 1):
            client.sendall(answer[number : number + 1])
            time.sleep(0.2)

    return send


CHUNK = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"


def zipped(megabytes: int) -> bytes:
    packer = zlib.compressobj(1, wbits=31)
    return b"".join(packer.compress(b" " * (1 << 20)) for _ in range(megabytes)) + packer.flush()


ZIPPED = zipped(1024)


def answers(kind: bytes, deep: bytes) -> dict[str, Callable[[socket.socket], None]]:
    return {
        "endless body": endless(OK % kind + b"Transfer-Encoding: chunked\r\n\r\n", CHUNK),
        "endless body without a length": endless(OK % kind + b"Connection: close\r\n\r\n", b" " * (1 << 20)),
        "a terabyte announced": endless(OK % kind + b"Content-Length: 1000000000000\r\n\r\n", b" " * (1 << 20)),
        "endless headers": endless(OK % kind, b"X-More: " + b"x" * 1000 + b"\r\n"),
        "endless status": endless(b"HTTP/1.1 200 ", b"O" * 1000),
        "endless interim answers": endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        "a gigabyte, zipped": once(whole(kind, ZIPPED, b"Content-Encoding: gzip\r\n")),
        "nested": once(whole(kind, deep)),
        "drip": drip(whole(kind, deep[:2000])),
        "no HTTP": once(b"\x16\x03\x01 SSH-2.0-OpenSSH_9.2\r\n" * 10),
        "a negative length": once(OK % kind + b"Content-Length: -5\r\n\r\nxxxxx"),
        "two lengths": once(OK % kind + b"Content-Length: 2\r\nContent-Length: 500\r\n\r\n{}"),
        "a bad chunk": once(OK % kind + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n"),
        "cookies": once(whole(kind, b"{}", b"Set-Cookie: a=b\r\n" * 50)),
    }


S3 = answers(b"application/xml", b"<a>" * 200_000 + b"</a>" * 200_000) | {
    "entities of entities": once(whole(b"application/xml", bomb())),
    "an entity from a file": once(
        whole(
            b"application/xml",
            b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY f SYSTEM "file:///etc/hostname">]>' + LISTING % b"<Key>&f;</Key>",
        )
    ),
}
VAULT = answers(b"application/json", b'{"data":' * 200_000 + b"1" + b"}" * 200_000)


@contextmanager
def hostile(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that gives every request this answer."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    clients: list[socket.socket] = []

    def serve(client: socket.socket) -> None:
        try:
            while b"\r\n\r\n" not in client.recv(1 << 16):
                pass
            answer(client)
        except OSError:
            pass  # the client has had enough
        finally:
            client.close()

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            clients.append(client)
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for each in (listener, *clients):
            each.close()


def bounded(tmp_path: Path, *arguments: str, **variables: str) -> Ran:
    """The command, which must end in time and take no more memory than that."""
    out, err = tmp_path / "out", tmp_path / "err"
    most, deadline = 0, time.monotonic() + SECONDS
    with out.open("wb") as stdout, err.open("wb") as stderr:
        command = [sys.executable, "-c", _HURRIED, PUBLISHD, *arguments]
        with subprocess.Popen(command, env=environment(**variables), stdout=stdout, stderr=stderr) as process:
            try:
                while process.poll() is None:
                    status = Path(f"/proc/{process.pid}/status").read_text()
                    most = max(most, *map(int, re.findall(r"VmHWM:\s*(\d+)", status)), 0)
                    assert time.monotonic() < deadline, "it does not end"
                    assert most < MEGABYTES << 10, f"{most >> 10} MB"
                    time.sleep(0.01)
            finally:
                process.kill()
    assert most
    return Ran(process.returncode, out.read_bytes(), err.read_bytes())


@pytest.mark.parametrize("kind", S3)
def test_a_hostile_s3(tmp_path: Path, kind: str) -> None:
    """No answer, no "nothing yet": one line."""
    keys = {"AWS_ACCESS_KEY_ID": "AKIDX", "AWS_SECRET_ACCESS_KEY": SECRET}
    with hostile(S3[kind]) as endpoint:
        flags = ["-checkpoint", "s3://bucket/p", "-creds", "env", "-endpoint", endpoint, "-region", "us-east-1"]
        ran = bounded(tmp_path, "resolve", *flags, **keys)
    ran.failed("publishd resolve: cannot ", ": s3://bucket/p/pub: ")
    assert SECRET not in ran.err


@pytest.mark.parametrize("kind", VAULT)
def test_a_hostile_vault(tmp_path: Path, kind: str) -> None:
    """The token is shown to nobody."""
    with hostile(VAULT[kind]) as endpoint:
        source = f"vault:{endpoint}/team/s3?auth=token"
        flags = ["-checkpoint", "s3://bucket/p", "-creds", source, "-endpoint", "http://127.0.0.1:1", "-region", "us-east-1"]
        ran = bounded(tmp_path, "resolve", *flags, VAULT_TOKEN=SECRET)
    ran.failed("publishd resolve: ")
    assert SECRET not in ran.err


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_carries_a_token_on(tmp_path: Path, status: int) -> None:
    """Neither the Vault's token nor a signed request goes where a server points to."""
    with Listener() as trap:
        head = b"HTTP/1.1 %d Moved\r\nLocation: %b/x\r\nContent-Length: 0\r\n\r\n" % (status, trap.url.encode())
        with hostile(once(head)) as endpoint:
            for creds in ("env", f"vault:{endpoint}/team/s3?auth=token"):
                flags = ["-checkpoint", "s3://bucket/p", "-creds", creds, "-endpoint", endpoint, "-region", "us-east-1"]
                keys = {"AWS_ACCESS_KEY_ID": "AKIDX", "AWS_SECRET_ACCESS_KEY": SECRET, "VAULT_TOKEN": SECRET}
                ran = bounded(tmp_path, "resolve", *flags, **keys).failed("publishd resolve: ")
                assert SECRET not in ran.err
        assert trap.heads == []
