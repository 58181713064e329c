"""Power cuts: a publication that survives one names a save that survived it, whole, on real file systems."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from commands import PUBLISHD, Root, Watch, environment, eventually
from publishd.publications import parse
from services.images import KINDS, Disk, disk
from soaking import soak

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILES, SIZE = 6, 1 << 18

kinds = pytest.mark.parametrize("kind", KINDS)


def write(root: Root, step: int) -> None:
    """As Trainer does it: no fsync anywhere, the marker last."""
    save = root.execution / f"checkpoint-{step}"
    save.mkdir(parents=True)
    for number in range(FILES):
        (save / f"shard-{number}").write_bytes(bytes([step % 251]) * SIZE)
    (save / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def flaw(root: Root, name: str) -> str:
    """What is wrong with the save that an entry names; nothing if it is whole."""
    publication = parse(name)
    save = root.path / publication.path
    if not save.is_dir():
        return "missing"
    try:
        if (save / "trainer_state.json").read_text() != json.dumps({"global_step": publication.step}):
            return "its marker is not as it was written"
        shards = [(save / f"shard-{number}").read_bytes() for number in range(FILES)]
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    return "" if set(shards) == {bytes([publication.step % 251]) * SIZE} else "a shard is short or empty"


def damage(device: Disk, copies: list[Path]) -> tuple[list[str], int]:
    """What is wrong after these power cuts, and how many entries survived them."""
    found, survived = [], 0
    for number, copy in enumerate(copies):
        with device.after(copy) as folder:
            root = Root(folder / "root")
            survived += len(root.pub)
            found += [f"cut {number}: step {parse(name).step}: {why}" for name in root.pub if (why := flaw(root, name))]
    return found, survived


def cuts(device: Disk, seconds: float, count: int) -> Iterator[Path]:
    """Power cuts at random instants of so many seconds."""
    instants = sorted(random.uniform(0, seconds) for _ in range(count))
    began = time.monotonic()
    for instant in instants:
        time.sleep(max(0.0, began + instant - time.monotonic()))
        yield device.cut()


@kinds
def test_a_publication_that_survives_a_power_cut_names_a_whole_save(kind: str) -> None:
    """Saves written without fsync, published by a watch and by hand, and the power goes at random instants."""
    count = soak(12)
    with disk(kind) as device, ThreadPoolExecutor(1) as pool:
        with device.mounted() as folder:
            root = Root(folder / "root").make()
            with Watch(root, interval="50ms") as watch:
                watch.watching()
                taking = pool.submit(lambda: list(cuts(device, 4.0 + 0.2 * count, count)))
                for step in itertools.count(1):
                    if taking.done():
                        break
                    write(root, step)
                    if step % 3 == 0:
                        root.run("publish", root.execution / f"checkpoint-{step}", str(step)).succeeded()
                    else:
                        eventually(lambda step=step: step in root.steps, "its publication")  # type: ignore[misc]
                    if len(root.pub) > 12:  # the disk is small
                        root.run("prune", "-keep", "8").succeeded()
                watch.stop()
        found, survived = damage(device, taking.result())
    assert found == []
    assert survived > 0


@kinds
def test_without_fsync_the_experiment_sees_the_damage(kind: str) -> None:
    """The same with -no-sync: entries outlive what they name, so that the test above is one."""
    with disk(kind) as device:
        copies = []
        with device.mounted() as folder:
            root = Root(folder / "root").make()
            os.sync()
            for step in range(1, 4):
                write(root, step)
                root.run("publish", "-no-sync", root.execution / f"checkpoint-{step}", str(step)).succeeded()
                descriptor = os.open(root.path / "pub", os.O_RDONLY)
                os.fsync(descriptor)  # as another program on this file system may cause it at any time
                os.close(descriptor)
                copies.append(device.cut())
        found, survived = damage(device, copies)
    assert survived > 0
    assert found != []


@kinds
def test_a_prune_that_a_power_cut_ends_leaves_no_entry_of_a_half_save(kind: str) -> None:
    """The record and the entry's end come before any file goes, in the journal, too; and the next prune finishes."""
    count = soak(10)
    with disk(kind) as device, ThreadPoolExecutor(1) as pool:
        with device.mounted() as folder:
            root = Root(folder / "root").make()
            for step in range(1, 25):
                write(root, step)
                root.publish(root.execution / f"checkpoint-{step}", step)
            os.sync()
            taking = pool.submit(lambda: list(cuts(device, 2.5, count)))
            for keep in (20, 14, 8, 2):
                command = [PUBLISHD, "prune", "-checkpoint", str(root.path), "-keep", str(keep)]
                subprocess.run(command, env=environment(), check=True, capture_output=True)
                descriptor = os.open(root.path, os.O_RDONLY)
                os.fsync(descriptor)  # writes the journal in the middle of it all
                os.close(descriptor)
                time.sleep(0.4)
            copies = taking.result()
        for copy in copies:
            with device.after(copy) as folder:
                root = Root(folder / "root")
                assert len(root.pub) >= 2
                assert [why for name in root.pub if (why := flaw(root, name))] == []
                root.run("prune", "-keep", "2").succeeded()
                assert (root.steps, root.records) == ([23, 24], [])
                assert sorted(os.listdir(root.execution)) == ["checkpoint-23", "checkpoint-24"]
                root.run("resolve").succeeded()
