"""Publishing, resolving and pruning on a real SeaweedFS over a way that loses, cuts, doubles and reorders answers."""

from __future__ import annotations

import random
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from commands import PUBLISHD, Ran
from publishd.publications import parse
from s3_roots import S3Root
from services.unreliable import FAULTS, Unreliable
from soaking import soak, soaking

if TYPE_CHECKING:
    from services.seaweed import SeaweedFS

SECONDS = soak(20)
pytestmark = pytest.mark.timeout(120 + 3 * SECONDS)


def over(root: S3Root, way: Unreliable) -> S3Root:
    """The same root, by that way."""
    flags = [way.endpoint if flag == root.place.service.endpoint else flag for flag in root.flags]
    return S3Root(root.place, flags=flags)


def told(ran: Ran, *, lines: int = 1) -> Ran:
    """It ended as a command may end: with an answer, or with one line that says why not."""
    assert ran.code in (0, 1), ran
    assert "Traceback" not in ran.err, ran
    said = ran.err.splitlines()
    assert all(line.startswith("publishd ") for line in said), ran
    if ran.code == 1:
        assert 1 <= len(said) <= lines, ran
        assert ran.out == b"", ran
    return ran


REQUESTS = {"publish": 6, "resolve": 3, "prune": 14, "watch": 8}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("command", REQUESTS)
def test_each_fault_at_each_request(seaweed: SeaweedFS, command: str, fault: str) -> None:
    """Whatever becomes of one request, the command answers rightly or fails, and what was to be done is done or can be."""
    number = 0 if soaking() else FAULTS.index(fault) * REQUESTS[command] // len(FAULTS)  # a usual run takes one of them
    while True:
        root = S3Root(seaweed.place()).published(1, 2)
        root.hf(3)
        with Unreliable(seaweed.endpoint, lambda asked, *_: fault if asked == number else "") as way:  # noqa: B023 - at once
            through = over(root, way)
            if command == "publish":
                told(through.run("publish", f"{root.execution}/checkpoint-3", "3"))
            elif command == "resolve":
                ran = told(through.run("resolve"))
                assert ran.out in (b"", f"{root.path}/{root.execution}/checkpoint-2\n".encode())
                assert ran.out or ran.code == 1
            elif command == "prune":
                told(through.run("prune", "-keep", "1"), lines=5)
            else:
                ran = through.run("watch", "-framework", "hf", "-once")
                assert (ran.code, root.steps) == (0, [1, 2, 3]), ran
            met = len(way.requests) > number
        if command == "publish":
            root.run("publish", f"{root.execution}/checkpoint-3", "3").succeeded()
            assert root.steps == [1, 2, 3]
        elif command == "prune":
            root.run("prune", "-keep", "1").succeeded()
            assert (root.steps, root.records, root.saves) == ([2], [], {"checkpoint-2", "checkpoint-3"})
        assert root.resolved() == f"{root.execution}/checkpoint-{root.steps[-1]}"
        if not met:
            break
        number += 1
        if not soaking():
            assert met
            break
    assert number > 0


def test_everything_at_once_over_an_unreliable_way(seaweed: SeaweedFS) -> None:
    """Nothing is lost, nothing false is said, every failure is a line."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    root = S3Root(seaweed.place()).published(1)
    root.place.put(f"{root.execution}/checkpoint-999999/model", b"never complete")
    with Unreliable(seaweed.endpoint, lambda *_: chance.choice(FAULTS) if chance.random() < 0.15 else "") as way:
        through = over(root, way)
        arguments = ["-checkpoint", root.path, *through.flags, "-framework", "hf", "-interval", "200ms", "-drain", "30s"]
        watch = subprocess.Popen([PUBLISHD, "watch", *arguments], env=root.env(), stderr=subprocess.PIPE, text=True)
        with ThreadPoolExecutor(3) as pool:
            deadline = time.monotonic() + SECONDS
            working = [pool.submit(work, through, root, deadline) for work in (resolving, pruning, publishing)]
            step = 10
            while time.monotonic() < deadline:
                root.hf(step)
                step += 10
                time.sleep(0.1)
            for done in working:
                done.result()
        watch.terminate()
        said = watch.communicate(timeout=90)[1]
    assert "Traceback" not in said
    assert all(line.startswith("publishd watch: ") for line in said.splitlines())
    assert len({fault for _, _, fault in way.requests}) == len(FAULTS) + 1, "not every fault came"
    last = step - 10
    root.run("watch", "-framework", "hf", "-once").succeeded()
    root.run("prune", "-keep", "3").succeeded()
    assert root.records == []
    assert root.steps[-1] >= last
    assert root.resolved() == f"{root.execution}/checkpoint-{last}"
    for name in root.pub:
        assert {"trainer_state.json", "model.safetensors"} <= root.place.names(parse(name).path)
    assert "model" in root.place.names(f"{root.execution}/checkpoint-999999")
    named = {parse(name).path.rpartition("/")[2] for name in root.pub}
    assert root.saves == named | {"checkpoint-999999"}


def resolving(through: S3Root, root: S3Root, deadline: float) -> None:
    """Each answer was true at some instant: not older than the latest before it began, unless that was pruned, nor nothing."""
    while time.monotonic() < deadline:
        before = root.steps[-1]
        ran = told(through.run("resolve"))
        if ran.code == 0:
            step = int(ran.out.decode().rstrip("\n").rpartition("-")[2])
            assert before <= step <= root.steps[-1] + 10, ran


def pruning(through: S3Root, _root: S3Root, deadline: float) -> None:
    while time.monotonic() < deadline:
        told(through.run("prune", "-keep", "3"), lines=50)


def publishing(through: S3Root, root: S3Root, deadline: float) -> None:
    """By hand, what the watch may be publishing, too: where success was told the entry stands, or a later one does."""
    while time.monotonic() < deadline:
        steps = sorted((int(name.rpartition("-")[2]) for name in root.saves if name != "checkpoint-999999"), reverse=True)[:1]
        for step in steps:
            ran = told(through.run("publish", f"{root.execution}/checkpoint-{step}", str(step)))
            if ran.code == 0:
                assert root.steps[-1] >= step, ran
