"""Two real clients of one JuiceFS volume: publishing, watching and pruning from two nodes at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from commands import ATTEMPT, PUBLISHD, Root, Watch, environment, eventually
from publishd.publications import parse
from services.juicefs import two_clients
from soaking import soak

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def clients() -> Iterator[tuple[Path, Path]]:
    with two_clients() as mounts:
        yield mounts


@pytest.fixture
def nodes(clients: tuple[Path, Path], request: pytest.FixtureRequest) -> tuple[Root, Root]:
    """One root as both clients see it."""
    name = request.node.name.replace("[", "-").replace("]", "")
    here, there = (Root(mount / name) for mount in clients)
    here.make()
    return here, there


def started(root: Root, *arguments: str) -> subprocess.Popen[str]:
    command = [PUBLISHD, arguments[0], "-checkpoint", str(root.path), *arguments[1:]]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    return process.returncode, err


def test_publishers_on_two_nodes_make_one_entry(nodes: tuple[Root, Root]) -> None:
    """Rule 1: both succeed, and of each save one says that it exists already."""
    here, there = nodes
    for step in range(1, soak(20) + 1):
        here.hf(step)
        both = [started(root, "publish", str(root.execution / f"checkpoint-{step}"), str(step)) for root in nodes]
        said = [ended(process) for process in both]
        assert [code for code, _ in said] == [0, 0], said
        assert sorted("already exists" in err for _, err in said) == [False, True], said
    assert here.pub == there.pub
    assert here.steps == list(range(1, soak(20) + 1))


def test_what_one_node_publishes_the_other_resolves_at_once(nodes: tuple[Root, Root]) -> None:
    """Rule 9, and what the client caches changes nothing: neither new saves nor those that were removed just now."""
    here, there = nodes
    for step in range(1, soak(15) + 1):
        save = here.hf(step)
        there.execution.joinpath(save.name).is_dir()  # what the other client may remember from now on
        here.run("publish", save, str(step)).succeeded()
        assert there.resolved() == f"exec/{ATTEMPT}/checkpoint-{step}"
        here.run("prune", "-keep", "1").succeeded()
        assert there.resolved() == f"exec/{ATTEMPT}/checkpoint-{step}"


def test_a_save_that_was_removed_elsewhere_is_gone_at_once(nodes: tuple[Root, Root]) -> None:
    """A client may go on for a second to find by name what is gone: resolve must not resume from that."""
    here, there = nodes
    here.publish(here.hf(5), 5)
    assert there.resolved() == f"exec/{ATTEMPT}/checkpoint-5"
    shutil.rmtree(here.execution / "checkpoint-5")
    there.run("resolve").failed("cannot resume", "it is gone")
    assert b"gone" in there.run("list").succeeded().out


def test_a_watch_on_one_node_publishes_what_another_writes(nodes: tuple[Root, Root]) -> None:
    """Also where the execution's folder comes later, within interval + 1 s."""
    here, there = nodes
    here.execution.rmdir()
    with Watch(there, interval="200ms") as watch:
        watch.watching()
        for step in range(1, 6):
            here.hf(step)
            began = time.monotonic()
            eventually(lambda step=step: step in here.steps, "its publication")  # type: ignore[misc]
            assert time.monotonic() - began < 1.2 + 0.5
        watch.stop().succeeded(b"")
    assert here.steps == [1, 2, 3, 4, 5]


def test_prune_on_one_node_beside_a_watch_on_the_other(nodes: tuple[Root, Root]) -> None:
    """Nothing unpublished goes, no entry names what is gone, the latest is whole."""
    here, there = nodes
    incomplete = here.hf(1_000, stated="null")
    with Watch(there, interval="50ms") as watch:
        watch.watching()
        for step in range(1, soak(30) + 1):
            here.hf(step)
            ran = here.run("prune", "-keep", "2")
            assert ran.code == 0, ran
        watch.stop().succeeded(b"")
    last = soak(30)
    here.run("prune", "-keep", "2").succeeded()
    assert here.steps == [last - 1, last]
    assert (here.records, set(os.listdir(here.execution))) == (
        [],
        {incomplete.name, f"checkpoint-{last - 1}", f"checkpoint-{last}"},
    )
    assert (incomplete / "model.safetensors").read_bytes() == b"weights of 1000"


def test_prunes_on_two_nodes_at_once(nodes: tuple[Root, Root]) -> None:
    """Rule 13: both succeed, and together they leave what one alone would."""
    here, _there = nodes
    for number in range(soak(3)):
        for step in range(1, 21):
            here.publish(here.hf(step + 100 * number), step + 100 * number)
        assert [ended(process)[0] for process in [started(root, "prune", "-keep", "3") for root in nodes]] == [0, 0]
        here.run("prune", "-keep", "3").succeeded()
        kept = [f"checkpoint-{step + 100 * number}" for step in (18, 19, 20)]
        assert [parse(name).path.rpartition("/")[2] for name in here.pub] == kept
        assert (here.records, sorted(os.listdir(here.execution))) == ([], kept)


def test_a_file_held_open_on_another_node_is_pruned(nodes: tuple[Root, Root]) -> None:
    here, there = nodes
    for step in (1, 2):
        here.publish(here.hf(step), step)
    with (there.execution / "checkpoint-1" / "model.safetensors").open("rb"):
        here.run("prune", "-keep", "1").succeeded()
        assert (os.listdir(here.execution), here.records) == (["checkpoint-2"], [])
