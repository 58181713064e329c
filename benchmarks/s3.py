"""Rows of roots in an S3-compatible store: a real SeaweedFS on loopback."""

from __future__ import annotations

import re
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measuring import Row, of_values, process, take_turns, timed
from benchmarks.places import PYTHON, peer_program
from benchmarks.posix import Watching
from commands import PUBLISHD, environment
from publishd.publications import Publication
from services.certificates import LOOPBACK_NAMES, Authority
from services.seaweed import started

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from services.places import Place

# One listing, as by hand: what any asyncio program pays that asks an S3 once.
BARE = """
import asyncio, sys
from aiobotocore.session import get_session
async def main(endpoint, bucket, prefix):
    async with get_session().create_client("s3", endpoint_url=endpoint, region_name="us-east-1") as client:
        token = {}
        while True:
            page = await client.list_objects_v2(Bucket=bucket, Prefix=prefix, **token)
            last = page["Contents"][-1]["Key"]
            if not page["IsTruncated"]:
                return last
            token = {"ContinuationToken": page["NextContinuationToken"]}
print(asyncio.run(main(*sys.argv[1:])))
"""
EXECUTION = "exec/1.4101.0"


@contextmanager
def store() -> Iterator[Place]:
    """An empty place of a server of its own."""
    with tempfile.TemporaryDirectory(prefix="publishd-bench-") as folder:
        authority = Authority(Path(folder))
        with started(authority, authority.certificate(*LOOPBACK_NAMES)) as server:
            yield server.place()


class Counting:
    """A port that hands every byte on to the server, and counts the requests among them."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("http://").partition(":")
        self._server = (host, int(port))
        self.requests = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(self._server)
            threading.Thread(target=self._hand_on, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._hand_on, args=(server, client, False), daemon=True).start()

    def _hand_on(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        try:
            while received := source.recv(1 << 16):
                if counts:
                    self.requests += len(re.findall(rb"^[A-Z]+ \S+ HTTP/1.1\r$", received, re.M))
                sink.sendall(received)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # one side has gone, and so does the other

    def of(self, work: Callable[[], object]) -> int:
        """The requests that some work makes."""
        before = self.requests
        work()
        return self.requests - before


def entries(place: Place, count: int) -> None:
    """Entries of saves of which the latest is there."""
    for step in range(1, count + 1):
        place.put(f"pub/{Publication(1_000_000, step, f'{EXECUTION}/checkpoint-{step}').name}")
    place.hf(count)


def flags(place: Place, endpoint: str = "") -> list[str]:
    """Those that name the place, perhaps by another endpoint."""
    given = list(place.flags)
    if endpoint:
        given[given.index("-endpoint") + 1] = endpoint
    return ["-checkpoint", place.root, *given]


def environ(place: Place) -> dict[str, str]:
    """The keys, and the execution."""
    return environment(**place.environ, AWS_DEFAULT_REGION="us-east-1", AWS_REGION="us-east-1")


def resolving(quick: bool) -> Iterator[Row]:
    """The whole process against one listing by hand, and what people use; and its requests."""
    with store() as place:
        entries(place, 1_000)
        endpoint, env = place.service.endpoint, environ(place)
        bucket, _, prefix = place.root.removeprefix("s3://").partition("/")
        pub = f"{prefix}/pub/".lstrip("/")
        command = [PUBLISHD, "resolve", *flags(place)]
        bare = "a bare aiobotocore script"
        peers = {bare: process([PYTHON, "-c", BARE, endpoint, bucket, pub], env=env)}
        yield from take_turns(3 if quick else 15, process(command, env=env), peers).rows(
            "resolve, S3, 1,000 entries", {bare: 1.15}
        )
        peers = programs(endpoint, f"s3://{bucket}/{pub}", env)
        if peers:
            yield from take_turns(2 if quick else 5, process(command, env=env), peers).rows("resolve, S3, 1,000 entries", {})
        counting = Counting(endpoint)
        counted = [PUBLISHD, "resolve", *flags(place, counting.endpoint)]
        made = counting.of(lambda: subprocess.run(counted, env=env, check=True, capture_output=True))
        yield Row("resolve, S3, 1,000 entries: one page and", made - 1, "requests", target=2)


def programs(endpoint: str, url: str, env: Mapping[str, str]) -> dict[str, Callable[[], float]]:
    """Listings by what people use, as far as it is installed."""
    peers = {}
    for name, arguments in (
        ("aws", ["s3", "ls", "--endpoint-url", endpoint, url]),
        ("s5cmd", ["--endpoint-url", endpoint, "ls", url]),
    ):
        program = peer_program(name)
        if program:
            peers[" ".join((name, "s3 ls" if name == "aws" else "ls"))] = process([program, *arguments], env=env)
    return peers


def watching(quick: bool) -> Iterator[Row]:
    """Memory and time of a watch of settled saves, and what its scans ask for."""
    count, scans = 100 if quick else 1_000, 20 if quick else 500
    with store() as place:
        for step in range(1, count + 1):
            place.hf(step)
        entries(place, count)
        counting, env = Counting(place.service.endpoint), environ(place)
        given = flags(place, counting.endpoint)[2:]
        with Watching(place.root, *given, "-interval", "20ms", env=env) as watch:
            wait_until(lambda: counting.requests > scans // 10)
            before, cpu, resident = counting.requests, watch.cpu, watch.resident
            wait_until(lambda: counting.requests > before + scans)
            took, made = watch.cpu - cpu, counting.requests - before
            yield of_values(f"watch, S3, resident after {scans} scans", "MB", [watch.resident], 90)
            yield of_values("watch, S3, growth over the last nine tenths of them", "MB", [watch.resident - resident], 1)
            # A page holds 1,000 names: a scan of these saves is one request.
            yield of_values(f"watch, S3, {count:,} settled saves, CPU in an hour of -interval 10s", "s", [took / made * 360], 15)


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll it."""
    while not condition():
        time.sleep(0.01)


def asking(quick: bool) -> Iterator[Row]:
    """Requests of a scan, of a save that is not settled, and of a publication."""
    with store() as place:
        counting, env = Counting(place.service.endpoint), environ(place)
        once = [PUBLISHD, "watch", *flags(place, counting.endpoint), "-framework", "hf", "-once"]

        def scan() -> int:
            return counting.of(lambda: subprocess.run(once, env=env, check=True, capture_output=True))

        place.hf(1)
        scan()
        settled = scan()
        place.put(f"{EXECUTION}/checkpoint-2/model")
        incomplete = scan()
        place.hf(2)
        one = scan()
        for step in range(3, 13):
            place.hf(step)
        ten = scan()
    # watch -once looks three times: at its start, at the last scan, and while it drains.
    yield Row("watch -once, S3, nothing to do", settled, "requests")
    yield Row("… and one incomplete save", incomplete - settled, "requests more")
    yield Row("… and one save to publish", one - settled, "requests more", target=5, note="a list and a GET, three to publish")
    yield Row("… and ten to publish, for each", (ten - settled) / 10, "requests more", target=5)


def pruning(quick: bool) -> Iterator[Row]:
    """The whole process against those that remove the same objects."""
    saves, files = 3 if quick else 10, 10 if quick else 50
    with store() as place:
        env, endpoint = environ(place), place.service.endpoint

        def prepare() -> None:
            entries(place, saves + 1)
            for step in range(1, saves + 1):
                place.hf(step)
                for number in range(files):
                    place.put(f"{EXECUTION}/checkpoint-{step}/shard-{number}", b"x")

        def ours() -> float:
            prepare()
            command = [PUBLISHD, "prune", *flags(place), "-keep", "1"]
            return timed(lambda: subprocess.run(command, env=env, check=True, capture_output=True))

        def theirs(program: str, *arguments: str) -> Callable[[], float]:
            def run() -> float:
                prepare()
                commands = [[program, *arguments, f"{place.root}/{EXECUTION}/checkpoint-{step}/"] for step in range(1, saves + 1)]
                if "rm" in arguments and "s3" not in arguments:
                    commands = [[*command[:-1], f"{command[-1]}*"] for command in commands]
                return timed(lambda: [subprocess.run(command, env=env, check=True, capture_output=True) for command in commands])

            return run

        peers = {}
        if aws := peer_program("aws"):
            peers["aws s3 rm --recursive, one call a save"] = theirs(aws, "s3", "rm", "--recursive", "--endpoint-url", endpoint)
        if s5cmd := peer_program("s5cmd"):
            peers["s5cmd rm, one call a save"] = theirs(s5cmd, "--endpoint-url", endpoint, "rm")
        if peers:
            yield from take_turns(1 if quick else 3, ours, peers).rows(f"prune, S3, {saves} saves × {files} objects", {})


GROUPS = (resolving, watching, asking, pruning)
"""Each takes `quick`: fewer rounds, smaller roots."""
