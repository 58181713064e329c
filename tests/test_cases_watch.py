"""Cases from the field that a watch must get right, each named after its number."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from typing import TYPE_CHECKING

import pytest

from commands import ORDINARY_USER, Root, Watch, eventually, require_program
from faulty_calls import faulty

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_b01_a_folder_with_weights_but_no_state_is_not_published(root: Root) -> None:
    """The newest folder lacks its marker: the one before it is published, and resolve prints that."""
    root.hf(500)
    (root.execution / "checkpoint-1000").mkdir()
    (root.execution / "checkpoint-1000" / "model.safetensors").touch()
    with Watch(root) as watch:
        watch.scanned().scanned().stop().succeeded(b"")
    assert root.steps == [1, 2, 500]
    assert root.resolved() == "exec/1.4101.0/checkpoint-500"


def test_b02_a_staging_folder_is_published_only_once_it_is_renamed(root: Root) -> None:
    """A staging folder with a valid state inside is no save; renamed it is one, and what is left over stays untouched."""
    staging = root.hf(500, folder="tmp-checkpoint-500")
    left_over = root.hf(500, folder="tmp-checkpoint-s0yubqtr")
    with Watch(root) as watch:
        watch.scanned().scanned()
        assert root.steps == [1, 2]
        staging.rename(root.execution / "checkpoint-500")
        watch.scanned().scanned().stop().succeeded(b"")
    assert root.steps == [1, 2, 3, 4, 500]
    assert (left_over / "trainer_state.json").exists()


BAD_MARKERS = {
    "empty": "",
    "cut off": '{"global_step": 50',
    "list": "[]",
    "null": "null",
    "no step": "{}",
    "text": '{"global_step":"500"}',
    "true": '{"global_step":true}',
    "spaces": " " * 20,
}


@pytest.mark.parametrize("content", BAD_MARKERS.values(), ids=BAD_MARKERS)
def test_b03_a_bad_marker_is_read_again_until_it_is_right(root: Root, content: str) -> None:
    """A marker that is cut off or wrong is not believed, and is read again even where size and mtime stayed the same."""
    save = root.execution / "checkpoint-500"
    save.mkdir()
    marker = save / "trainer_state.json"
    right = '{"global_step": 500}'
    marker.write_text(content.ljust(len(right)) if content else "")
    with Watch(root) as watch:
        watch.scanned().scanned()
        assert 500 not in root.steps
        before = marker.stat()
        with marker.open("r+") as file:
            file.write(right.ljust(before.st_size))
        os.utime(marker, ns=(before.st_atime_ns, before.st_mtime_ns))
        eventually(lambda: 500 in root.steps, "the publication of the mended save")
        watch.stop().succeeded(b"")


def test_b03_a_true_step_is_not_step_one(root: Root) -> None:
    """Python's true == 1 does not make checkpoint-1 complete."""
    root.hf(1, "true")
    root.hf(2)
    root.run("watch", "-framework", "hf", "-once").succeeded(b"")
    assert root.steps == [2]


def test_b05_a_state_of_another_step_is_not_published_and_said_once(root: Root) -> None:
    """The folder says 45 and its state 26: never published, and the reason is said once, not at every scan."""
    root.hf(45, 26)
    root.hf(46, 46.0)
    root.hf(47)
    (root.hf(48) / "trainer_state.json").write_text('{"global_step":1,"global_step":48}')
    with Watch(root) as watch:
        ended = watch.scanned().scanned().scanned().stop().succeeded(b"")
    assert root.steps == [1, 2, 3, 47, 48]
    assert ended.err.count("checkpoint-45: trainer_state.json says global_step 26") == 1, ended


LOOK_ALIKES = [
    "checkpoint-500-bak",
    "checkpoint-500-merged",
    "checkpoint-500 (copy)",
    "backup-checkpoint-500",
    "last-checkpoint",
    "checkpoint-best",
    "checkpoint-1e5",
    "checkpoint--500",
    "checkpoint-+500",
    "checkpoint-5_00",
    "checkpoint-500 ",
    "checkpoint-500\n",
    "Checkpoint-500",
    "checkpoint-0500",
    "checkpoint-",
    "checkpoint-18446744073709551616",
]


def test_b06_folders_that_only_look_like_saves_are_not_published(root: Root) -> None:
    """Copies, backups and names that only int() would read are no saves, nor is a plain file."""
    for name in LOOK_ALIKES:
        root.hf(18446744073709551616 if name.endswith("16") else 500, folder=name)
    (root.execution / "checkpoint-600").touch()
    root.hf(400)
    with Watch(root) as watch:
        watch.scanned().scanned().stop().succeeded(b"")
    assert root.steps == [1, 2, 400]


def test_b07_digits_that_only_python_knows_are_no_steps(root: Root) -> None:
    """Superscript and Arabic-Indic digits make no save, and end no watch."""
    root.hf(2, folder="checkpoint-²")
    root.hf(500, folder="checkpoint-٥٠٠")
    root.hf(400)
    with Watch(root) as watch:
        watch.scanned().scanned().stop().succeeded(b"")
    assert root.steps == [1, 2, 400]


def test_b08_saves_nested_below_other_folders_are_not_watched(root: Root) -> None:
    """Only the execution's own folder is looked at; trials below it are published by hand, and resolve chooses the same again."""
    trials = [root.hf(459, folder=f"run-{number}/checkpoint-459") for number in (0, 1)]
    root.hf(1377, folder="checkpoint_001377/checkpoint-1377")
    root.hf(459)
    with Watch(root) as watch:
        watch.scanned().stop().succeeded(b"")
    assert root.steps == [1, 459]
    for trial in trials:
        root.run("publish", trial, "459").succeeded(b"")
    assert root.steps == [1, 459, 459, 459]
    assert len({root.resolved() for _ in range(3)}) == 1


def churn(root: Root) -> Callable[[], None]:
    """Saves that come and go, half of them by a rename, together with the folders above them."""
    away = root.path / "away"
    steps = iter(range(10**9))

    def work() -> None:
        step = 10 + next(steps) % 50
        save = root.hf(step)
        if step % 2:
            save.rename(away)
            shutil.rmtree(away)
        else:
            shutil.rmtree(save)
        if step % 5 == 0:
            above = root.execution if step % 10 else root.execution.parent
            above.rename(away)
            shutil.rmtree(away)

    return work


def test_b10_folders_that_vanish_while_they_are_read_do_not_end_the_watch(root: Root) -> None:
    """Saves, the execution's folder and exec/ come and go for some seconds; a save made afterwards is published."""
    with Watch(root, "hf", "-no-sync", interval="1ms") as watch:
        watch.watching()
        work, end = churn(root), time.monotonic() + 6
        while time.monotonic() < end:
            work()
            assert watch.process.poll() is None, watch.log
        root.hf(900)
        eventually(lambda: 900 in root.steps, "the publication of the last save")
        ended = watch.stop()
    ended.succeeded(b"")


def test_b11_an_unreadable_marker_is_said_with_its_path_and_tried_again(root: Root) -> None:
    """A state file that the watch may not read costs only that save, until it may; entries follow the umask."""
    root.hf(500)
    marker = root.hf(600) / "trainer_state.json"
    marker.chmod(0)
    with Watch(root, prefix=ORDINARY_USER, umask=0o027) as watch:
        watch.scanned().scanned()
        assert root.steps == [1, 2, 500]
        assert watch.log.count(f"not complete yet: {marker.parent}: trainer_state.json cannot be read: Permission denied") == 1
        marker.chmod(0o644)
        eventually(lambda: 600 in root.steps, "the publication of the readable save")
        watch.stop().succeeded(b"")
    assert {stat.S_IMODE(entry.stat().st_mode) for entry in (root.path / "pub").iterdir()} == {0o640}


def test_b12_a_dcp_folder_without_metadata_is_not_published(root: Root) -> None:
    """Shards alone are no DCP save; resolve prints the one with .metadata."""
    root.dcp(10)
    (root.dcp(20) / ".metadata").unlink()
    with Watch(root, "dcp") as watch:
        watch.scanned().scanned().stop().succeeded(b"")
    assert root.resolved() == "exec/1.4101.0/step-10"


def test_b14_step_0_is_a_step_and_staging_names_are_none(root: Root) -> None:
    """The seed save of step 0 is published and resolved; staging folders beside it are neither published nor pruned."""
    root.dcp(0)
    staging = [root.dcp(10, folder=name) for name in (".tmp-step-10", "step-10.tmp", "step-10-staging")]
    with Watch(root, "dcp") as watch:
        eventually(lambda: root.steps == [0], "the publication of step 0")
        watch.stop().succeeded(b"")
    assert root.resolved() == "exec/1.4101.0/step-0"
    root.run("prune", "-keep", "1").succeeded(b"")
    assert root.steps == [0]
    assert all((save / ".metadata").exists() for save in staging)


def test_b56_only_the_own_attempt_is_touched(root: Root, tmp_path: Path) -> None:
    """A complete save of another attempt is neither published nor even opened, and stays as it was."""
    other = Root(root.path, "1.4101.1").make()
    other.hf(700)
    root.hf(600)
    before = {path: seen for path, seen in root.tree().items() if "1.4101.1" in path}
    trace = tmp_path / "trace"
    strace = (require_program("strace", "strace"), "-f", "-qq", "-o", str(trace), "-e", "trace=%file")
    root.run("watch", "-framework", "hf", "-once", prefix=strace).succeeded(b"")
    assert root.steps == [600]
    assert {path: seen for path, seen in root.tree().items() if "1.4101.1" in path} == before
    assert "1.4101.0" in trace.read_text()
    assert "1.4101.1" not in trace.read_text()


def opened_below(root: Root, pid: int) -> list[str]:
    """What the process holds open below the root."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue
    return [path for path in found if path.startswith(str(root.path))]


@pytest.mark.parametrize(("call", "path"), [("open", "1.4101.0"), ("readdir", "1.4101.0"), ("open", "checkpoint-500")])
def test_b64_a_stale_folder_is_tried_again_and_said_once(root: Root, tmp_path: Path, call: str, path: str) -> None:
    """A folder that twice answers ESTALE is opened afresh at the next scan; so is one made anew, for no descriptor is kept."""
    root.hf(500)
    with Watch(root, env=faulty(tmp_path, call, path, errno.ESTALE, times=2)) as watch:
        watch.says("step 500")
        shutil.rmtree(root.execution)
        root.hf(600)
        eventually(lambda: root.steps == [500, 600], "a publication from the new folder")
        eventually(lambda: not opened_below(root, watch.process.pid), "a moment between scans")
        ended = watch.scanned().stop().succeeded(b"")
    assert ended.err.count("Stale file handle") == 1, ended
