"""Rows of roots in a folder."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measuring import Row, of_values, process, take_turns, timed
from benchmarks.places import PUBLISHD, PYTHON, Root, entries, environment, peer_program, root, saves
from publishd.frameworks import FRAMEWORKS
from publishd.prune import prune
from publishd.publications import published, resolve
from publishd.stores.posix import PosixStore
from publishd.watch import Watcher, WatchOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping
    from typing import Any

IMPORTS = "python3 -c 'import asyncio, argparse'"
TRANSFORMERS = """
import sys
from transformers.trainer_utils import get_last_checkpoint
print(get_last_checkpoint(sys.argv[1]))
"""
ORBAX = """
import sys
from orbax.checkpoint import CheckpointManager
print(CheckpointManager(sys.argv[1]).latest_step())
"""
SHORT = 0.005
"""Longer than a scan of 1,000 settled saves takes."""
TICK = os.sysconf("SC_CLK_TCK")


def resolving(quick: bool) -> Iterator[Row]:
    """The whole process, against an interpreter that imports two modules, and what people use today."""
    with root() as place:
        saves(place, 1_000)
        command = [PUBLISHD, "resolve", "-checkpoint", str(place.path)]
        peers = {
            IMPORTS: process([PYTHON, "-c", "import asyncio, argparse"]),
            "ls | sort -V | tail -1": process(["sh", "-c", 'ls "$0" | sort -V | tail -1', str(place.execution)]),
        }
        yield from take_turns(5 if quick else 25, process(command), peers).rows("resolve, 1,000 entries", {IMPORTS: 1.35})
        yield from take_turns(1 if quick else 3, process(command), python_peers(place)).rows("resolve, 1,000 entries", {})


def python_peers(place: Root) -> dict[str, Callable[[], float]]:
    """What frameworks offer, with their imports; those that are not installed are left out."""
    python, numbered = peer_program("python"), place.path.parent / "numbered"
    for step in range(1, 1_001):
        (numbered / str(step)).mkdir(parents=True)
    peers = {}
    for name, code, folder in (
        ("transformers get_last_checkpoint", TRANSFORMERS, place.execution),
        ("orbax CheckpointManager.latest_step", ORBAX, numbered),
    ):
        command = [str(python), "-c", code, str(folder)]
        if python and subprocess.run(command, capture_output=True, check=False).returncode == 0:
            peers[name] = process(command)
    return peers


def in_loop(work: Callable[[], Coroutine[Any, Any, object]]) -> Callable[[], float]:
    """Seconds of a coroutine, without those of its event loop; cycles are not looked for, as in the command."""

    async def run() -> float:
        await asyncio.to_thread(int)  # a thread is there
        gc.collect()
        gc.disable()
        began = time.perf_counter()
        await work()
        took = time.perf_counter() - began
        gc.enable()
        return took

    return lambda: asyncio.run(run())


def reading(quick: bool) -> Iterator[Row]:
    """Listing and validating many entries."""
    count = 10_000 if quick else 100_000
    with root() as place:
        entries(place, count)
        peers = {"os.listdir": lambda: timed(lambda: os.listdir(place.path / "pub"))}
        ours = in_loop(lambda: published(PosixStore(str(place.path))))
        yield from take_turns(5 if quick else 9, ours, peers).rows(f"read {count:,} entries", {"os.listdir": 7})


def scandir(path: Path) -> None:
    """What a scan can't do without."""
    with os.scandir(path) as children:
        for child in children:
            child.inode()
            child.is_dir(follow_symlinks=False)


def scanning(quick: bool) -> Iterator[Row]:
    """A scan of settled saves."""
    count = 1_000 if quick else 10_000
    with root() as place:
        saves(place, count)
        turns = scan_turns(place, 5 if quick else 20)
        yield from turns.rows(f"scan, {count:,} settled saves", {"os.scandir": 3})


def scan_turns(place: Root, rounds: int) -> Any:
    """A Watcher's scans, and os.scandir of the same folder."""
    loop = asyncio.new_event_loop()
    watcher = Watcher(PosixStore(str(place.path)), FRAMEWORKS["hf"], WatchOptions(place.attempt, 1_000_000), asyncio.Event())
    scan = watcher._scan  # what is measured: the command can't be asked for one scan alone
    loop.run_until_complete(scan())
    peers = {"os.scandir": lambda: timed(lambda: scandir(place.execution))}
    try:
        return take_turns(rounds, lambda: timed(lambda: loop.run_until_complete(scan())), peers)
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


class Watching:
    """A watch as a process."""

    def __init__(self, place: str, *flags: str, prefix: tuple[str, ...] = (), env: Mapping[str, str] | None = None) -> None:
        command = [*prefix, PUBLISHD, "watch", "-checkpoint", place, "-framework", "hf", *flags]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self.process = subprocess.Popen(command, env=env or environment(), stderr=self._log)
        while b"watching: " not in os.pread(self._log.fileno(), 1 << 16, 0):
            assert self.process.poll() is None, "the watch ended"
            time.sleep(0.002)

    def __enter__(self) -> Watching:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()

    def stat(self, name: str) -> int:
        """A figure of /proc/PID/status, in its unit."""
        return int(re.search(rf"^{name}:\s*(\d+)", Path(f"/proc/{self.process.pid}/status").read_text(), re.M).group(1))  # type: ignore[union-attr]

    @property
    def resident(self) -> float:
        """MB of it."""
        return self.stat("VmRSS") / 1024

    @property
    def cpu(self) -> float:
        """Seconds of it so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK


def latency(quick: bool) -> Iterator[Row]:
    """From the moment in which a marker is complete until its entry stands, at instants spread over the interval."""
    interval, beyond = 0.2, []
    with root() as place, Watching(str(place.path), "-interval", f"{interval}s"):
        pub = place.path / "pub"
        for step in range(1, (10 if quick else 40) + 1):
            save = place.execution / f"checkpoint-{step}"
            save.mkdir()
            (save / "half").write_text(json.dumps({"global_step": step}))
            time.sleep(interval * (step * 0.618 % 1))
            began = time.perf_counter()
            (save / "half").rename(save / "trainer_state.json")
            while not pub.exists() or len(os.listdir(pub)) < step:
                time.sleep(0.0005)
            beyond.append((time.perf_counter() - began - interval) * 1000)
    yield Row(
        "marker complete → entry visible, beyond the interval", max(beyond), "ms", spread=(min(beyond), max(beyond)), target=50
    )


def draining(quick: bool) -> Iterator[Row]:
    """SIGTERM to a watch beside complete saves that it has not seen yet."""
    count = 100 if quick else 1_000
    for sync in (False, True):
        took = []
        for _ in range(1 if quick else 3):
            with (
                root() as place,
                Watching(str(place.path), "-interval", "1h", "-drain", "10m", *(() if sync else ("-no-sync",))) as watch,
            ):
                saves(place, count, published=False, files=1)
                began = time.perf_counter()
                watch.process.send_signal(signal.SIGTERM)
                watch.process.wait()
                took.append(time.perf_counter() - began)
                assert len(os.listdir(place.path / "pub")) == count
        with_ = "with fsync" if sync else "-no-sync"
        yield of_values(f"SIGTERM → exit, {count:,} complete saves, {with_}", "s", took, None if sync else 3.0)


def watching(quick: bool) -> Iterator[Row]:
    """What a watch costs training: memory, time and calls."""
    count, scans = 1_000, 500 if quick else 10_000
    with root() as place:
        saves(place, count)
        with Watching(str(place.path), "-interval", f"{SHORT}s") as watch:
            took, resident = measured_scans(watch, scans)
        yield of_values(f"watch, resident, after {scans:,} scans", "MB", [resident[-1]], 40)
        yield of_values(f"watch, growth from scan {scans // 10:,} to {scans:,}", "MB", [resident[-1] - resident[0]], 1)
        yield of_values(f"watch of {count:,} settled saves, CPU in an hour of -interval 10s", "s", [took * 360], 3)
        calls = calls_per_scan(place)
        if calls is not None:
            yield of_values(f"watch of {count:,} settled saves, file system calls a scan", "", [calls])


def measured_scans(watch: Watching, scans: int) -> tuple[float, list[float]]:
    """CPU seconds of a scan, and what was resident after a tenth of them and after all: they begin at `SHORT` intervals."""
    resident: list[float] = []
    for part in (0.1, 0.9):
        begin = watch.cpu
        time.sleep(part * scans * SHORT)
        resident.append(watch.resident)
    return (watch.cpu - begin) / (0.9 * scans), resident


def calls_per_scan(place: Root) -> float | None:
    """As strace counts them, on paths and descriptors alike, without sleeping and waking."""
    strace = shutil.which("strace")
    if strace is None:
        return None
    counts = []
    for seconds in (1.0, 3.0):
        log = place.path.parent / "calls"
        calls = "trace=%file,getdents64,fstat,read,close,fadvise64"
        with Watching(str(place.path), "-interval", "20ms", prefix=(strace, "-f", "-qq", "-e", calls, "-o", str(log))) as watch:
            time.sleep(seconds)
            watch.process.kill()
        text = log.read_text()
        counts.append((text.count("getdents64("), len(text.splitlines()), text.count(f'"{place.attempt}"')))
    (_, less, few), (_, more, many) = counts
    return (more - less) / (many - few) if many > few else None


def pruning(quick: bool) -> Iterator[Row]:
    """The whole process, against those that remove the same files."""
    count = 20 if quick else 100
    keep_one = ["prune", "-checkpoint", "{}", "-keep", "1"]

    def prepared(work: Callable[[Root], object]) -> Callable[[], float]:
        def run() -> float:
            with root() as place:
                saves(place, count + 1, files=99, size=16)
                return timed(lambda: work(place))

        return run

    def ours(place: Root) -> None:
        subprocess.run([PUBLISHD, *(part.format(place.path) for part in keep_one)], check=True, capture_output=True)

    def inside(place: Root) -> None:
        asyncio.run(prune(PosixStore(str(place.path)), 1, lambda *_: None))

    peers = {
        "rm -rf": prepared(lambda place: subprocess.run(["rm", "-rf", *doomed(place)], check=True)),
        "shutil.rmtree": prepared(lambda place: list(map(shutil.rmtree, doomed(place)))),
    }
    work = f"prune {count} saves × 100 files"
    yield from take_turns(2 if quick else 5, prepared(ours), peers).rows(work, {"rm -rf": 1.5})
    yield from take_turns(2 if quick else 5, prepared(inside), peers).rows(f"{work}, without starting Python", {})


def doomed(place: Root) -> list[str]:
    """All saves but the latest."""
    return [save.path for save in sorted(os.scandir(place.execution), key=lambda save: int(save.name.partition("-")[2]))[:-1]]


def growth(quick: bool) -> Iterator[Row]:
    """Seconds for each publication, at growing numbers of them: a straight line if they stay the same."""
    for count in (100, 1_000, 10_000) if quick else (100, 1_000, 10_000, 100_000):
        with root() as place:
            saves(place, count)
            store = PosixStore(str(place.path))
            rounds = 3 if count < 100_000 else 1
            scan = statistics.median(scan_turns(place, rounds).ours)
            found = statistics.median(in_loop(lambda store=store: resolve(store))() for _ in range(rounds))  # type: ignore[misc]
            gone = in_loop(lambda store=store: prune(store, 1, lambda *_: None))()  # type: ignore[misc]
        for work, took in (("scan", scan), ("resolve", found), ("prune all but one", gone)):
            yield Row(f"{work}, {count:,} publications, for each", took / count * 1e6, "µs")


def syncing(quick: bool) -> Iterator[Row]:
    """What fsync costs for a save of 1 GB in 20 files that was just written."""
    size = (64 if quick else 1024) << 20

    def publishing(*flags: str) -> Callable[[], float]:
        def run() -> float:
            with root() as place:
                save = place.execution / "checkpoint-1"
                save.mkdir()
                for number in range(20):
                    (save / f"shard-{number}").write_bytes(os.urandom(1 << 20) * (size // 20 >> 20))
                command = [PUBLISHD, "publish", "-checkpoint", str(place.path), *flags, str(save), "1"]
                return timed(lambda: subprocess.run(command, env=environment(), check=True, capture_output=True))

        return run

    turns = take_turns(1 if quick else 3, publishing(), {"-no-sync": publishing("-no-sync")})
    yield from turns.rows(f"publish a save of {size >> 20} MB in 20 files", {})


def starting(quick: bool) -> Iterator[Row]:
    """From exec until a watch takes SIGTERM, against an interpreter that does nothing."""

    def until_safe() -> float:
        with root() as place:
            command = [PUBLISHD, "watch", "-checkpoint", str(place.path), "-framework", "hf"]
            began = time.perf_counter()
            with subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL) as process_:
                status, safe = Path(f"/proc/{process_.pid}/status"), 0
                while not safe:
                    caught = re.search(r"^SigCgt:\s*(\w+)", status.read_text(), re.M)
                    safe = caught is not None and int(caught.group(1), 16) >> (signal.SIGTERM - 1) & 1
                took = time.perf_counter() - began
                process_.kill()
            return took

    peers = {"python3 -c pass": process([PYTHON, "-c", "pass"])}
    yield from take_turns(5 if quick else 20, until_safe, peers).rows("watch: exec → SIGTERM is safe", {})


GROUPS = (resolving, reading, scanning, latency, draining, watching, pruning, growth, syncing, starting)
"""Each takes `quick`: fewer rounds, smaller roots."""
