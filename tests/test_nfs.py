"""Watching from elsewhere over NFS: training writes on one client, publishd runs on another, and both cache what they saw.

Both are real kernels, and so is the server; the mount options are the defaults. The truth is what stands on the server's disk.
"""

from __future__ import annotations

import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest

from commands import ATTEMPT, EPOCH, Ran, eventually
from services.nfs import Guest, Lab, Running, lab

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.xdist_group("nfs")

MARKERS = {"hf": "trainer_state.json", "dcp": ".metadata"}
PREFIXES = {"hf": "checkpoint-", "dcp": "step-"}
INTERVAL = 0.5

# Small saves, so many and so many seconds apart, in the order in which Trainer writes its files; nothing follows the last marker.
HASTY_TRAINER = """
import os, sys, time
folder, count, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
for step in range(1, count + 1):
    time.sleep(pause)
    save = f"{folder}/checkpoint-{step}"
    os.makedirs(save)
    for name in ("config.json", "model.safetensors", "optimizer.pt", "rng_state.pth"):
        open(f"{save}/{name}", "w").close()
    with open(f"{save}/trainer_state.json", "w") as marker:
        marker.write('{"global_step": %d}' % step)
"""

# Creates the same files as another client does, each at the same instant, and prints those that it made.
RACER = """
import asyncio, sys, time
from publishd.errors import AlreadyExists
from publishd.stores import open_store
async def race(root, count, start):
    store = open_store(root)
    for number in range(count):
        while time.time() < start + number / 20:
            pass
        try:
            await store.create(f"pub/{number}")
        except AlreadyExists:
            continue
        print(number)
asyncio.run(race(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
"""


class Place:
    """A checkpoint root on the share. The trainer's client writes, the other watches, and the server knows."""

    def __init__(self, running: Lab, name: str) -> None:
        self._server = running.server
        self.trainer, self.elsewhere = running.clients
        self.root, self._disk = f"{running.share}/{name}", f"{running.disk}/{name}"
        self.execution = f"{self.root}/exec/{ATTEMPT}"
        self._server.call("os:makedirs", self._disk)

    def save(self, step: int, framework: str = "hf") -> str:
        return f"{self.execution}/{PREFIXES[framework]}{step}"

    def marker(self, step: int, framework: str = "hf") -> str:
        return f"{self.save(step, framework)}/{MARKERS[framework]}"

    def begin(self, step: int, framework: str = "hf") -> None:
        """The trainer writes a save, all but its marker."""
        self.moment()
        self.trainer.call("os:makedirs", self.save(step, framework))
        self.moment()
        self.trainer.call("write", f"{self.save(step, framework)}/weights", f"weights of {step}")

    def finish(self, step: int, framework: str = "hf") -> None:
        self.moment()
        self.trainer.call("write", self.marker(step, framework), f'{{"global_step": {step}}}')

    def write(self, *steps: int) -> None:
        for step in steps:
            self.begin(step)
            self.finish(step)

    def train(self, folder: str, count: int, pause: float = 0) -> None:
        """The trainer writes saves as fast as it can."""
        self.trainer.run(sys.executable, "-c", HASTY_TRAINER, folder, str(count), str(pause)).succeeded()

    def moment(self) -> None:
        """Until a folder's next change gets another time: else what the tests list with NFSv3 themselves might be old."""
        before = self._server.call("time:time")
        eventually(lambda: self._server.call("time:time") > before + 0.02, "another time on the server's clock")

    def look(self, folder: str) -> list[str]:
        """What the client that watches sees in a folder, opening all on the way to it as well."""
        below = folder.removeprefix(self.root).split("/")
        for depth in range(1, len(below)):
            self.elsewhere.list(self.root + "/".join(below[:depth]))
        return self.elsewhere.list(folder)

    def on(self, client: Guest, command: str, *arguments: str) -> Running:
        return client.publishd(command, self.root, *arguments, DISPATCH_ATTEMPT=ATTEMPT, DISPATCH_EPOCH=str(EPOCH))

    def watch(self, framework: str = "hf", interval: str = f"{INTERVAL}s", *flags: str) -> Running:
        """A watch on the other client, which has begun."""
        arguments = ("-framework", framework, "-interval", interval, *flags)
        return self.on(self.elsewhere, "watch", *arguments).says("watching: ")

    def watch_once(self) -> Ran:
        return self.on(self.elsewhere, "watch", "-framework", "hf", "-once").ended()

    def on_disk(self, folder: str) -> list[str]:
        """Names in a folder of the root, as the server has them."""
        path = f"{self._disk}/{folder}"
        return self._server.list(path) if self._server.exists(path) else []

    @property
    def steps(self) -> list[int]:
        """The published steps."""
        return [int(name.split("-")[1]) for name in self.on_disk("pub")]

    @property
    def saves(self) -> list[str]:
        return self.on_disk(f"exec/{ATTEMPT}")

    def published(self, step: int) -> None:
        eventually(lambda: step in self.steps, f"the publication of step {step}")

    def delay(self, step: int, framework: str) -> float:
        """Seconds from the last write of a save's marker to its publication, by the server's clock."""
        entry = self.on_disk("pub")[self.steps.index(step)]
        marker = f"exec/{ATTEMPT}/{PREFIXES[framework]}{step}/{MARKERS[framework]}"
        published, finished = (self._server.call("os.path:getctime", f"{self._disk}/{path}") for path in (f"pub/{entry}", marker))
        return float(published - finished)


@pytest.fixture(scope="module", params=["4.2", "3"], ids=["v4.2", "v3"])
def running(request: pytest.FixtureRequest) -> Iterator[Lab]:
    with lab(request.param) as started:
        yield started


@pytest.fixture
def place(running: Lab, request: pytest.FixtureRequest) -> Place:
    return Place(running, request.node.name.replace("[", "-").replace("]", ""))


@pytest.mark.parametrize("framework", ["hf", "dcp"])
def test_what_is_finished_elsewhere_is_published_within_the_interval_and_a_second(place: Place, framework: str) -> None:
    """Saves in a row are published in time, though this client believes for a while that none of it exists."""
    delays = []
    watch = place.watch(framework)
    for step in range(1, 5):
        beyond = (f"{place.root}/pub", place.execution, place.save(step, framework), place.marker(step, framework))
        for path in beyond[0 if step == 1 else 2 :]:
            assert not place.elsewhere.exists(path)
        place.begin(step, framework)
        assert place.look(place.save(step, framework)) == ["weights"]
        assert not place.elsewhere.exists(place.marker(step, framework))
        place.finish(step, framework)
        place.published(step)
        delays.append(place.delay(step, framework))
    watch.send().ended().succeeded(b"")
    # A busy machine may hold up one of them, for a moment; what a client believes wrongly it believes for half a minute.
    assert sorted(delays)[-2] <= INTERVAL + 1, delays
    assert max(delays) <= INTERVAL + 5, delays


def test_what_changes_faster_than_the_clock_of_the_server_is_published(place: Place) -> None:
    """Of saves whose files follow each other within milliseconds, while scans do the same, each is published."""
    watch = place.watch("hf", "20ms", "-no-sync")
    place.train(place.execution, 30, 0.1)
    watch.send().ended().succeeded(b"")
    assert place.steps == list(range(1, 31))


def test_the_last_scan_sees_a_marker_that_was_just_written_elsewhere(place: Place) -> None:
    """SIGTERM at once after the marker, which this client believes to be missing: the last scan publishes its save."""
    place.begin(500)
    watch = place.watch("hf", "1h")
    assert place.elsewhere.list(place.save(500)) == ["weights"]
    assert not place.elsewhere.exists(place.marker(500))
    place.finish(500)
    watch.send().ended().succeeded(b"")
    assert place.steps == [500]


def test_resolve_sees_at_once_what_was_published_elsewhere(place: Place) -> None:
    """The trainer's client has seen that there is no pub/; once the other has published, resolve and list say so."""
    assert not place.trainer.exists(f"{place.root}/pub")
    place.on(place.trainer, "resolve").ended().succeeded(b"")
    place.write(500)
    place.watch_once().succeeded(b"")
    resolved = place.on(place.trainer, "resolve").ended().succeeded()
    assert resolved.out.decode() == place.save(500) + "\n"
    assert [(line["step"], line["present"]) for line in place.on(place.trainer, "list", "-json").ended().succeeded().json] == [
        (500, True)
    ]


def test_publish_and_prune_work_on_what_another_client_wrote(place: Place) -> None:
    """What is pruned from elsewhere leaves nothing behind on the server, and the trainer's client resolves the rest."""
    place.write(1, 2, 3)
    for step in (1, 2, 3):
        place.on(place.elsewhere, "publish", place.save(step), str(step)).ended().succeeded(b"")
    assert place.steps == [1, 2, 3]
    place.on(place.elsewhere, "prune", "-keep", "1").ended().succeeded()
    assert (place.steps, place.on_disk("prune"), place.saves) == ([3], [], ["checkpoint-3"])
    assert place.on(place.trainer, "resolve").ended().succeeded().out.decode() == place.save(3) + "\n"


def test_a_file_held_open_on_the_other_client_is_pruned_all_the_same(place: Place) -> None:
    """NFS keeps a deleted file only for the client that deletes it."""
    place.write(1, 2)
    place.watch_once().succeeded(b"")
    place.trainer.call("os:open", f"{place.save(1)}/weights", 0)
    place.on(place.elsewhere, "prune", "-keep", "1").ended().succeeded()
    assert (place.on_disk("prune"), place.saves) == ([], ["checkpoint-2"])


def test_a_file_held_open_where_prune_runs_is_named_and_the_next_prune_finishes(place: Place) -> None:
    """The client keeps it as .nfs…, so its folder stays until it is closed; exit 1 says so, and nothing resolves to it."""
    place.write(1, 2)
    place.watch_once().succeeded(b"")
    held = place.elsewhere.call("os:open", f"{place.save(1)}/weights", 0)
    first = place.on(place.elsewhere, "prune", "-keep", "1").ended()
    assert first.code == 1
    assert "checkpoint-1: Directory not empty" in first.err, first
    assert len(place.on_disk("prune")) == 1
    assert place.steps == [2]
    place.elsewhere.call("os:close", held)
    place.on(place.elsewhere, "prune", "-keep", "1").ended().succeeded()
    assert (place.on_disk("prune"), place.saves) == ([], ["checkpoint-2"])


def test_of_two_clients_that_create_the_same_entry_one_does(place: Place) -> None:
    """At the same instant, many times over: what the rest is built on."""
    start, count = place.elsewhere.call("time:time") + 3, 40
    clients = (place.trainer, place.elsewhere)
    both = [client.start(sys.executable, "-c", RACER, place.root, str(count), str(start)) for client in clients]
    made = [int(number) for one in both for number in one.ended().succeeded().out.split()]
    assert sorted(made) == list(range(count))


def test_two_clients_publish_the_same_saves(place: Place) -> None:
    """Both exit 0 for every save, and each save has one entry."""
    place.write(1, 2)
    clients = (place.trainer, place.elsewhere)
    both = [place.on(client, "publish", place.save(step), str(step)) for step in (1, 2) for client in clients]
    for one in both:
        one.ended().succeeded(b"")
    assert place.steps == [1, 2]


def test_two_clients_watch_the_same_execution(place: Place) -> None:
    """Many saves appear at once, and both publish them in the same order: each has one entry, made by one of them."""
    count = 20
    place.train(f"{place.root}/elsewhere", count)
    place.trainer.call("os:mkdir", f"{place.root}/exec")
    flags = ("-framework", "hf", "-interval", "20ms", "-no-sync")
    both = [place.on(client, "watch", *flags).says("watching: ") for client in (place.trainer, place.elsewhere)]
    place.trainer.call("os:rename", f"{place.root}/elsewhere", place.execution)
    eventually(lambda: len(place.steps) >= count, "all publications")
    logs = [one.send().ended().succeeded(b"").err for one in both]
    assert place.steps == list(range(1, count + 1))
    for step in place.steps:
        assert sum(log.count(f" published: {place.save(step)}:") for log in logs) == 1, logs


def test_prune_on_one_client_beside_a_watch_on_the_other(place: Place) -> None:
    """Nothing unpublished goes, no entry names what is gone, and the latest stay."""
    place.begin(1_000)
    watch = place.watch("hf", "100ms")
    for step in range(1, 9):
        place.write(step)
        place.on(place.trainer, "prune", "-keep", "2").ended().succeeded()
    watch.send().ended().succeeded(b"")
    place.on(place.trainer, "prune", "-keep", "2").ended().succeeded()
    assert (place.steps, place.on_disk("prune")) == ([7, 8], [])
    assert sorted(place.saves) == ["checkpoint-1000", "checkpoint-7", "checkpoint-8"]
    assert place.on(place.elsewhere, "resolve").ended().succeeded().out.decode() == place.save(8) + "\n"


def test_a_server_that_hangs_for_a_while_does_not_end_the_watch(place: Place, running: Lab) -> None:
    """It waits, and afterwards publishes what is finished then."""
    watch = place.watch("hf", "100ms")
    place.write(1)
    place.published(1)
    running.server.pause()
    time.sleep(2)  # that is how long it hangs
    running.server.resume()
    place.write(2)
    place.published(2)
    watch.send().ended().succeeded(b"")


def test_a_watch_ends_in_time_while_the_server_hangs(place: Place, running: Lab) -> None:
    """SIGTERM in the middle of it: exit 1 within the drain and a second, with the reason."""
    watch = place.watch("hf", "100ms", "-drain", "2s")
    place.write(1)
    watch.says(" published: ")  # so that no fsync is under way, for which the kernel may wait as long as it takes
    running.server.pause()
    try:
        began = place.elsewhere.call("time:time")
        ended = watch.send(signal.SIGTERM).ended(20)
        took = place.elsewhere.call("time:time") - began
    finally:
        running.server.resume()
    assert ended.code == 1, ended
    assert "time ran out after 2 s" in ended.err
    assert took <= 2 + 1
