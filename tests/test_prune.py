"""Pruning: what goes and what stays, killed at every step, on a full disk, beside others; seen from outside."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands import EPOCH, ORDINARY_USER, PUBLISHD, Root, Watch, environment, require, require_program, run
from fakes import FaultyStore, MemoryStore, after, before, fails
from preload import Pause, faults
from publishd.errors import Denied, InvalidEntry, NoSpace, Unavailable
from publishd.prune import Result, plan, prune
from publishd.publications import Publication, parse, published, resolve
from publishd.stores.posix import PosixStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fakes import Effect
    from publishd.stores import Store


def publication(step: int, path: str | None = None, epoch: int = EPOCH) -> Publication:
    return Publication(epoch, step, path or f"exec/1.4101.0/checkpoint-{step}")


def published_saves(root: Root, *steps: int) -> Root:
    for step in steps:
        root.publish(root.hf(step), step)
    return root


def record(root: Root, path: Path | str, step: int, epoch: int = EPOCH) -> str:
    """Withdraw a publication by hand, as a prune that was killed had done it."""
    name = root.publish(path, step, epoch)
    (root.path / "pub" / name).rename(root.path / "prune" / name)
    return name


def saves(root: Root) -> list[str]:
    """The folders in the execution's folder, by step."""
    return sorted(os.listdir(root.execution), key=lambda name: (len(name), name))


# The plan


@pytest.mark.parametrize(
    ("there", "keep", "kept"),
    [
        ("", 1, ""),
        ("1", 1, "1"),
        ("12", 1, "2"),
        ("123", 2, "23"),
        ("123", 3, "123"),
        ("123", 4, "123"),
        ("12x", 1, "2x"),  # the latest is gone: it stays, so that resolve goes on naming it
        ("1x3", 1, "3"),
        ("1x3", 2, "1x3"),
        ("x23", 2, "23"),
        ("x23", 3, "x23"),  # fewer than three are there
        ("xxx", 1, "xxx"),
        ("1xx", 1, "1xx"),
    ],
)
def test_all_but_the_latest_that_are_there_are_victims(there: str, keep: int, kept: str) -> None:
    """Rule 10: each letter is a publication, latest last; an x is one whose save is gone, and it counts for nothing."""
    every = [publication(step) for step in range(len(there))]
    present = {one for one, letter in zip(every, there, strict=True) if letter != "x"}
    planned = plan(every, present, keep)
    assert list(planned.kept) == every[len(there) - len(kept) :]
    assert list(planned.victims) == every[: len(there) - len(kept)]
    assert list(planned.gone) == [one for one in every if one not in present]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 9), st.sampled_from("abc"), st.booleans()),
        max_size=12,
        unique_by=lambda t: t[:3],
    ),
    st.integers(1, 5),
)
def test_the_plan_keeps_the_latest(drawn: list[tuple[int, int, str, bool]], keep: int) -> None:
    """Rule 10: victims and kept are the two ends of the order; N that are there are kept, unless fewer are: then all."""
    every = sorted(publication(step, f"exec/a/{name}", epoch) for epoch, step, name, _ in drawn)
    present = {publication(step, f"exec/a/{name}", epoch) for epoch, step, name, there in drawn if there}
    planned = plan(every, present, keep)
    assert [*planned.victims, *planned.kept] == every
    counted = [one for one in planned.kept if one in present]
    if planned.victims:
        assert len(counted) == keep
        assert planned.kept[0] in present
    else:
        assert len(counted) <= keep


# What goes and what stays


def test_the_oldest_go_and_the_latest_stay(root: Root) -> None:
    """Rule 10: entries and saves of all but the N latest are gone, prune/ is empty, nothing else has changed."""
    published_saves(root, 1, 2, 3, 4)
    expected = {
        path: found
        for path, found in root.tree().items()
        if not any(text in path for text in ("checkpoint-1", "checkpoint-2", *root.pub[:2]))
    }
    root.run("prune", "-keep", "2").succeeded()
    assert root.tree() == expected


def test_what_is_gone_does_not_count_and_is_named(root: Root) -> None:
    """Rule 10: two saves vanished; the two latest that are there stay."""
    published_saves(root, 1, 2, 3, 4)
    shutil.rmtree(root.execution / "checkpoint-2")
    shutil.rmtree(root.execution / "checkpoint-4")
    ran = root.run("prune", "-keep", "2").succeeded(b"")
    assert [f"checkpoint-{step}" in line for step, line in zip((2, 4), ran.err.splitlines(), strict=True)] == [True, True]
    root.run("prune", "-keep", "1").succeeded(b"".join(b"%s/checkpoint-%d\n" % (bytes(root.execution), step) for step in (1, 2)))
    assert root.steps == [3, 4]


@pytest.mark.parametrize("relation", ["same", "inside", "around"])
def test_b34_a_save_stays_while_a_remaining_publication_needs_it(root: Root, relation: str) -> None:
    """Rule 10: one that names it, something inside it, or something around it; its own publication goes all the same."""
    save = root.execution / "outer" / "s"
    (save / "inner").mkdir(parents=True)
    root.publish(save, 1)
    root.publish({"same": save, "inside": save / "inner", "around": save.parent}[relation], 2)
    before = {path: found for path, found in root.tree().items() if path.startswith("exec")}
    assert "save kept" in root.run("prune", "-keep", "1").succeeded().err
    assert {path: found for path, found in root.tree().items() if path.startswith("exec")} == before
    assert (root.steps, root.records) == ([2], [])


def test_b34_names_that_only_look_related_protect_nothing(root: Root) -> None:
    """Rule 10: checkpoint-5 is neither inside nor around checkpoint-50."""
    published_saves(root, 5, 50)
    root.run("prune", "-keep", "1").succeeded()
    assert saves(root) == ["checkpoint-50"]


def test_b34_nothing_unpublished_is_touched(root: Root) -> None:
    """Rule 11: complete and incomplete saves, other executions and files beside the victims stay as they are."""
    published_saves(root, 2, 3)
    for unpublished in (
        root.hf(1),
        root.execution / "checkpoint-0",
        root.path / "exec" / "other" / "checkpoint-2",
        root.path / "notes",
    ):
        unpublished.mkdir(parents=True, exist_ok=True)
        (unpublished / "file").touch()
    before = root.tree()
    gone = {path for path in before if path.endswith(root.pub[0]) or "1.4101.0/checkpoint-2" in path}
    root.run("prune", "-keep", "1").succeeded()
    assert root.tree() == {path: found for path, found in before.items() if path not in gone}


def test_two_publications_of_one_save_go_together(root: Root) -> None:
    """Rule 12: every entry that names a removed save goes, in both epochs."""
    save = root.hf(1)
    root.publish(save, 1)
    root.publish(save, 2, EPOCH + 1)
    root.publish(root.hf(3), 3, EPOCH + 2)
    root.run("prune", "-keep", "1").succeeded(b"%s\n%s\n" % (bytes(save), bytes(save)))
    assert (root.steps, saves(root)) == ([3], ["checkpoint-3"])


def test_a_dry_run_changes_nothing_and_says_what_would_go(root: Root) -> None:
    """What it prints is what prune prints then."""
    published_saves(root, 1, 2, 3, 4)
    before = root.tree()
    proposed = root.run("prune", "-keep", "2", "-dry-run").succeeded().out
    assert root.tree() == before
    assert root.run("prune", "-keep", "2").succeeded(proposed).out.count(b"\n") == 2


def test_a_save_may_be_a_file(root: Root) -> None:
    """What was published is removed, folder or not."""
    for step in (1, 2):
        (root.execution / f"model-{step}").touch()
        root.publish(root.execution / f"model-{step}", step)
    root.run("prune", "-keep", "1").succeeded()
    assert saves(root) == ["model-2"]


# Links


@pytest.mark.parametrize("inside_root", [True, False])
@pytest.mark.parametrize("level", ["exec", "exec/1.4101.0", "exec/1.4101.0/checkpoint-1"])
def test_a_save_behind_a_link_is_named_and_left(root: Root, tmp_path: Path, level: str, inside_root: bool) -> None:
    """Rule 11: exit 0, the target is whole, and the record stays until somebody has removed it."""
    published_saves(root, 1, 2)
    real, link = (root.path if inside_root else tmp_path) / "elsewhere", root.path / level
    link.rename(real)
    link.symlink_to(real)
    before = Root(real).tree()
    for _ in range(2):
        ran = root.run("prune", "-keep", "1").succeeded(b"")
        assert f"left alone: {root.execution}/checkpoint-1: {link} is a symbolic link" in ran.err
        assert (Root(real).tree(), root.steps, len(root.records)) == (before, [2], 1)
    root.run("resolve").succeeded(b"%s\n" % bytes(root.execution / "checkpoint-2"))


def test_links_inside_a_save_are_removed_as_links(root: Root, tmp_path: Path) -> None:
    """Rule 11: what they point to stays, inside the root and outside."""
    published_saves(root, 1, 2)
    save, outside = root.execution / "checkpoint-1", tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    for number, target in enumerate([outside, outside / "file", root.execution / "checkpoint-2", tmp_path / "nowhere"]):
        (save / f"link{number}").symlink_to(target)
    (save / "trainer_state.json").unlink()
    (save / "trainer_state.json").symlink_to(outside / "file")
    root.run("prune", "-keep", "1").succeeded()
    assert os.listdir(outside) == ["file"]
    assert len(os.listdir(root.execution / "checkpoint-2")) == 2
    assert saves(root) == ["checkpoint-2"]


# Order, and being killed


def test_markers_go_first(root: Root) -> None:
    """Rule 12: first all entries are withdrawn, then files go, of each save its marker first, and last the records."""
    strace = require_program("strace", "strace")
    published_saves(root, 1, 3)
    for step in (1, 2):
        root.publish(root.dcp(step), step)
    log = root.path.parent / "log"
    prefix = (strace, "-f", "-qq", "-o", str(log), "-e", "trace=renameat,renameat2,unlinkat", "-e", "signal=none")
    root.run("prune", "-keep", "1", prefix=prefix).succeeded()
    calls = [line.split('"')[1] for line in log.read_text().splitlines() if "at(" in line and " = 0" in line]
    entries, files = calls[:3], calls[3:-3]
    assert calls[-3:] == entries
    assert files[0] == "trainer_state.json"
    assert files.index(".metadata") < files.index("__0_0.distcp")


def four_published(root: Root) -> dict[str, tuple[int, int, bytes]]:
    """Four publications, an unpublished save and a record of an earlier prune; what is left of them after `prune -keep 2`."""
    published_saves(root, 1, 2, 3, 4)
    (root.hf(2) / "nested").mkdir()
    root.hf(9)
    record(root, root.hf(0), 0)
    gone = [*root.pub[:2], *root.records, *(f"checkpoint-{step}" for step in range(3))]
    return {path: found for path, found in root.tree().items() if not any(text in path for text in gone)}


@pytest.mark.parametrize(("rename", "least"), [(True, 15), (False, 18)])
def test_killed_at_any_system_call(tmp_path: Path, rename: bool, least: int) -> None:
    """Rule 12: SIGKILL in place of the first, second, third … change to a folder; also where there is no rename."""
    for at in itertools.count(1):
        root = Root(tmp_path / str(at)).make()
        whole, store = four_published(root), PosixStore(str(root.path))
        ran = root.run("prune", "-keep", "2", env=faults(kill_at=at, **({} if rename else {"no_rename": 1})))
        assert asyncio.run(resolve(store)) == publication(4)
        known = {parse(name).path for name in (*root.pub, *root.records)}
        assert {f"exec/1.4101.0/{name}" for name in saves(root)} <= known | {"exec/1.4101.0/checkpoint-9"}
        assert not asyncio.run(prune(store, 2, lambda *_: None)).failed
        assert root.tree() == whole
        if ran.code == 0:
            break
        assert ran.code == -signal.SIGKILL
    assert at > least


class Killed(BaseException):
    """Nothing of the program runs after this."""


class Mortal(FaultyStore):
    """A store whose process is killed in place of its operation number `at`."""

    def __init__(self, inner: Store, at: int) -> None:
        super().__init__(inner)
        self._at = at

    def _effect(self, operation: str, key: str) -> Effect:
        if len(self.calls) == self._at:
            raise Killed
        return super()._effect(operation, key)


async def test_killed_at_any_operation_of_a_store_that_moves_in_two_steps() -> None:
    """Rule 12: on S3 a move is a create and a delete; an entry that stands twice is one that is finished next time."""
    for at in itertools.count():
        store = MemoryStore(two_step_move=True)
        for step in (1, 2, 3):
            store.write(f"{publication(step).path}/trainer_state.json")
            store.write(publication(step).key)
        store.write(publication(1).record)
        killed = True
        try:
            await prune(Mortal(store, at), 1, lambda *_: None)
            killed = False
        except Killed:
            pass
        assert await resolve(store) == publication(3)
        assert not (await prune(store, 1, lambda *_: None)).failed
        assert sorted(store.contents) == [f"{publication(3).path}/trainer_state.json", publication(3).key]
        if not killed:
            break
    assert at > 10


# Records


def test_records_of_a_killed_prune_are_finished(root: Root) -> None:
    """Rule 12: the save of a record goes although no entry names it any more, and is printed."""
    published_saves(root, 2, 3)
    record(root, root.hf(1), 1)
    root.run("prune", "-keep", "5").succeeded(b"%s\n" % bytes(root.execution / "checkpoint-1"))
    assert (saves(root), root.records, root.steps) == (["checkpoint-2", "checkpoint-3"], [], [2, 3])


def test_a_record_whose_entry_is_among_the_latest_again_is_dropped(root: Root) -> None:
    """Rule 12: what was published again stays, with its save."""
    published_saves(root, 1, 2)
    (root.path / "prune" / root.pub[-1]).touch()
    root.run("prune", "-keep", "1").succeeded(b"%s\n" % bytes(root.execution / "checkpoint-1"))
    assert (saves(root), root.records, root.steps) == (["checkpoint-2"], [], [2])


@pytest.mark.parametrize("other", ["checkpoint-1", "checkpoint-1/inner", "."])
def test_a_record_whose_save_is_needed_again_waits(root: Root, other: str) -> None:
    """Rule 12: older records meet the same fresh test; the save stays, whichever way the publication protects it.

    So does the record, on which another prune may be acting, until what needs the save is pruned itself.
    """
    save = root.hf(1)
    (save / "inner").mkdir()
    name = record(root, save, 1)
    shutil.copytree(save, root.path / "exec" / "x" / "y")
    root.publish(os.path.normpath(root.path / "exec" / "x" / "y") if other == "." else root.execution / other, 7)
    root.run("prune", "-keep", "1").succeeded()
    needed = other != "."
    assert (save.exists(), root.records, root.steps) == (needed, [name] if needed else [], [7])
    root.publish(root.hf(9), 9)
    root.run("prune", "-keep", "1").succeeded()
    assert (save.exists(), root.records, root.steps) == (False, [], [9])


@pytest.mark.parametrize("make", ["file", "folder", "link", "fifo", "unsafe"])
def test_junk_among_the_records_is_named_and_left(root: Root, make: str) -> None:
    """Rule 12: what nobody knows in prune/ is never fatal, and never deleted."""
    published_saves(root, 1, 2)
    junk = root.path / "prune" / (publication(1, "../outside/s").name if make == "unsafe" else "junk")
    (root.path.parent / "outside" / "s").mkdir(parents=True)
    if make == "link":
        junk.symlink_to("../exec")
    else:
        {"folder": os.mkdir, "fifo": os.mkfifo}.get(make, os.mknod)(junk)
    ran = root.run("prune", "-keep", "1").succeeded(b"%s\n" % bytes(root.execution / "checkpoint-1"))
    ran.said_one_line(str(junk))
    assert (saves(root), root.records) == (["checkpoint-2"], [junk.name])
    assert (root.path.parent / "outside" / "s").exists()


# Others at the same time


def pruned(root: Root, *script: tuple[str, str, Effect], keep: int = 1) -> Result:
    """Prune over a store in which something happens at the named operations."""
    store = FaultyStore(PosixStore(str(root.path)), script)
    result = asyncio.run(prune(store, keep, lambda *_: None))
    assert store.script == []
    return result


@pytest.mark.parametrize("name", ["checkpoint-1", "checkpoint-1/inner"])
def test_an_entry_published_since_protects_the_save(root: Root, name: str) -> None:
    """Rule 12: the listing after the withdrawal shows it, so the save stays, and with it the record."""
    withdrawn = published_saves(root, 1, 2).pub[0]
    (root.execution / "checkpoint-1" / "inner").mkdir()
    whole = Root(root.execution).tree()
    pruned(root, ("move", "*", after(lambda: root.publish(root.execution / name, 8))))
    assert Root(root.execution).tree() == whole
    assert (root.steps, root.records) == ([2, 8], [withdrawn])


def test_an_entry_made_while_its_save_goes_goes_too(root: Root) -> None:
    """Rule 12: a publisher that was slower and died before it looked again leaves nothing that names a removed save."""
    published_saves(root, 1, 2)
    pruned(root, ("delete_tree", "*", before(lambda: root.publish(root.execution / "checkpoint-1", 8))))
    assert (root.steps, root.records, saves(root)) == ([2], [], ["checkpoint-2"])


def test_a_save_that_vanishes_meanwhile_is_no_failure(root: Root) -> None:
    """Rule 13: something else that deletes is welcome."""
    published_saves(root, 1, 2)
    result = pruned(root, ("delete_tree", "*", before(lambda: shutil.rmtree(root.execution / "checkpoint-1"))))
    assert (result.removed, result.failed) == ([publication(1)], [])


def test_a_victim_that_another_prune_took_is_left_to_it(root: Root) -> None:
    """Rule 13: an entry that is gone when it is to be moved is no failure."""
    published_saves(root, 1, 2)
    result = pruned(root, ("move", "*", before((root.path / "pub" / root.pub[0]).unlink)))
    assert (result.removed, result.failed) == ([], [])
    assert saves(root) == ["checkpoint-1", "checkpoint-2"]


def test_a_record_that_another_prune_has_finished_means_hands_off(root: Root) -> None:
    """Rule 13: once the record is gone, a save of that name is a new one."""
    published_saves(root, 1, 2)
    taken = root.path / "prune" / root.pub[0]
    pruned(root, ("list", "pub", before(lambda: None)), ("read", "prune/*", before(taken.unlink)))
    assert saves(root) == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize("other", ["deleter", "prune"])
def test_somebody_else_deletes_what_a_prune_is_deleting(root: Root, tmp_path: Path, other: str) -> None:
    """Rule 13: the files that were listed are gone when it comes to them; both exit 0."""
    published_saves(root, 1, 2)
    nested = root.execution / "checkpoint-1" / "nested"
    nested.mkdir()
    (nested / "file").touch()
    pause = Pause("unlinkat", nested, tmp_path / "pause")
    with subprocess.Popen([PUBLISHD, "prune", "-checkpoint", root.path, "-keep", "1"], env=pause.environment) as slow:
        pause.reached()
        if other == "prune":
            root.run("prune", "-keep", "1").succeeded(b"%s\n" % bytes(root.execution / "checkpoint-1"))
        else:
            shutil.rmtree(root.execution / "checkpoint-1")
        pause.go_on()
        assert slow.wait(60) == 0
    assert (root.steps, root.records, saves(root)) == ([2], [], ["checkpoint-2"])


def test_doubt_before_the_first_deletion_stops_the_prune(root: Root) -> None:
    """Rules 6 and 7: where pub/ can't be read, nothing is removed; nor where it can't be understood after the withdrawal."""
    published_saves(root, 1, 2)
    with pytest.raises(Unavailable):
        pruned(root, ("list", "pub", fails(Unavailable)))
    assert root.steps == [1, 2]
    result = pruned(root, ("move", "*", after((root.path / "pub" / "stray").touch)))
    assert [type(error) for error in result.failed] == [InvalidEntry]
    assert saves(root) == ["checkpoint-1", "checkpoint-2"]
    assert len(root.records) == 1


def test_b31_prunes_deleters_and_a_watch_at_once(root: Root) -> None:
    """Rule 13: three prunes, an rm -rf and a watch over 200 publications: all exit 0, the latest three are whole."""
    for step in range(1, 201):
        save = root.hf(step)
        for number in range(20):
            (save / f"shard-{number}").touch()
        root.publish(save, step)
    prune_command = [PUBLISHD, "prune", "-checkpoint", str(root.path), "-keep", "3"]
    with Watch(root).watching() as watch:
        running = [subprocess.Popen(prune_command, env=environment(), stdout=subprocess.DEVNULL) for _ in range(3)]
        shutil.rmtree(root.execution / "checkpoint-100", ignore_errors=True)
        root.hf(201)
        assert [process.wait(100) for process in running] == [0, 0, 0]
        watch.stop().succeeded(b"")
    run("prune", "-checkpoint", root.path, "-keep", "3").succeeded()
    assert (root.steps, root.records) == ([199, 200, 201], [])
    assert saves(root) == ["checkpoint-199", "checkpoint-200", "checkpoint-201"]
    assert len(os.listdir(root.execution / "checkpoint-200")) == 22


def test_a_link_swapped_in_meanwhile_leads_nowhere(root: Root, tmp_path: Path) -> None:
    """Rule 11: the execution's folder becomes a link to elsewhere just before the save is removed: elsewhere is whole."""
    published_saves(root, 1, 2)
    outside = Root(tmp_path / "outside")
    shutil.copytree(root.execution, outside.path)
    whole = outside.tree()

    def swap() -> None:
        root.execution.rename(tmp_path / "aside")
        root.execution.symlink_to(outside.path)

    result = pruned(root, ("delete_tree", "*", before(swap)))
    assert (result.removed, result.failed, len(root.records)) == ([], [], 1)
    assert outside.tree() == whole


# What can't be deleted


def locked(root: Root) -> Callable[[], None]:
    """Put into save 2 a folder that nobody may change; returns what mends it."""
    folder = root.execution / "checkpoint-2" / "locked"
    folder.mkdir()
    (folder / "file").touch()
    folder.chmod(0o555)
    return lambda: folder.chmod(0o755)


def mounted(root: Root) -> Callable[[], None]:
    """Mount something in save 2; returns what unmounts it."""
    folder = root.execution / "checkpoint-2" / "mounted"
    folder.mkdir()
    ran = subprocess.run(["mount", "-t", "tmpfs", "none", folder], capture_output=True, check=False)
    require("mount", "mounting is not allowed" if ran.returncode else None)
    (folder / "file").touch()

    def unmount() -> None:
        subprocess.run(["umount", folder], check=True)

    return unmount


@pytest.mark.parametrize("hinder", [locked, mounted])
def test_b30_an_undeletable_save_is_named_and_the_others_go(root: Root, hinder: Callable[[Root], Callable[[], None]]) -> None:
    """Rule 12: exit 1 as long as it stands, its record remembers it, and the next prune after the cause is gone ends it."""
    published_saves(root, 1, 2, 3, 4, 5)
    mend = hinder(root)
    try:
        first = root.run("prune", "-keep", "2", prefix=ORDINARY_USER)
        assert first.out == b"".join(b"%s/checkpoint-%d\n" % (bytes(root.execution), step) for step in (1, 3))
        again = root.run("prune", "-keep", "2", prefix=ORDINARY_USER)
        for ran in (first, again):
            assert ran.code == 1
            ran.said_one_line("cannot delete", str(root.execution / "checkpoint-2"))
        assert list((root.execution / "checkpoint-2").rglob("file")) != []
        assert (root.steps, len(root.records), saves(root)) == ([4, 5], 1, ["checkpoint-2", "checkpoint-4", "checkpoint-5"])
        assert not (root.execution / "checkpoint-2" / "trainer_state.json").exists()
    finally:
        mend()
    root.run("prune", "-keep", "2", prefix=ORDINARY_USER).succeeded(b"%s\n" % bytes(root.execution / "checkpoint-2"))
    assert (root.records, saves(root)) == ([], ["checkpoint-4", "checkpoint-5"])


@pytest.mark.parametrize("folder", ["pub", "prune"])
def test_entries_that_cannot_be_moved_keep_their_saves(root: Root, folder: str) -> None:
    """Rule 12: no right to withdraw is a failure per victim, and no save goes whose entry still stands."""
    published_saves(root, 1, 2, 3)
    before = root.tree()
    (root.path / folder).chmod(0o555)
    ran = root.run("prune", "-keep", "1", prefix=ORDINARY_USER)
    (root.path / folder).chmod(0o755)
    assert (ran.code, ran.out, len(ran.err.splitlines())) == (1, b"", 2)
    assert root.tree() == before


@pytest.mark.parametrize(
    ("operation", "error"),
    [("move", Denied), ("move", Unavailable), ("delete_tree", Denied), ("delete_tree", Unavailable), ("read", Unavailable)],
)
def test_one_failure_does_not_keep_the_other_victims(root: Root, operation: str, error: type[Denied | Unavailable]) -> None:
    """Rule 12: whatever fails for one victim, the others go, and the failure is in the result."""
    published_saves(root, 1, 2, 3)
    result = pruned(root, (operation, "*", fails(error)))
    assert [type(failure) for failure in result.failed] == [error]
    assert result.removed == [publication(2)]
    assert not pruned(root).failed
    assert (root.steps, root.records, saves(root)) == ([3], [], ["checkpoint-3"])


# A full disk


class Disk(NamedTuple):
    """A small file system, with a root on it."""

    root: Root

    def fill(self) -> None:
        """Leave neither a block nor an inode."""
        try:
            with (self.root.path / "ballast").open("wb", buffering=0) as ballast:
                while ballast.write(bytes(4096)):
                    pass
        except OSError:
            pass
        with pytest.raises(OSError, match="No space"):
            self._use_up_inodes()

    def _use_up_inodes(self) -> None:
        for number in itertools.count():
            (self.root.path / f"ballast{number}").touch()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A file system of 256 KiB and 64 inodes."""
    place = tmp_path / "disk"
    place.mkdir()
    ran = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k,nr_inodes=64", "none", place], capture_output=True, check=False
    )
    require("mount", "mounting is not allowed" if ran.returncode else None)
    yield Disk(Root(place).make())
    subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("records", [True, False])
def test_prune_works_on_a_full_disk(disk: Disk, records: bool) -> None:
    """Rule 13: with a prune/ to move entries to, and without one where none can be made: then entries are deleted."""
    root = published_saves(disk.root, 1, 2, 3)
    if not records:
        (root.path / "prune").rmdir()
    disk.fill()
    gone = b"".join(b"%s/checkpoint-%d\n" % (bytes(root.execution), step) for step in (1, 2))
    root.run("prune", "-keep", "1").succeeded(gone)
    assert (root.steps, root.records, saves(root)) == ([3], [], ["checkpoint-3"])
    root.run("resolve").succeeded(b"%s\n" % bytes(root.execution / "checkpoint-3"))


def test_without_room_for_a_record_the_fresh_test_still_holds(root: Root) -> None:
    """Rule 12: an entry published since protects the save, also where the disk is full."""
    published_saves(root, 1, 2)
    full = ("move", "*", fails(NoSpace))
    pruned(root, full, ("delete", "pub/*", after(lambda: root.publish(root.execution / "checkpoint-1", 8))))
    assert (root.steps, saves(root)) == ([1, 2, 8], ["checkpoint-1", "checkpoint-2"])
    pruned(root, full)
    assert (root.steps, saves(root)) == ([8], ["checkpoint-1"])


@pytest.mark.parametrize("full", [True, False])
def test_victims_do_not_protect_each_other(root: Root, full: bool) -> None:
    """Rule 12: an outer save goes although the publication of one inside still stands: that is a victim too."""
    outer = root.execution / "outer"
    (outer / "inner").mkdir(parents=True)
    root.publish(outer / "inner", 2)
    root.publish(root.hf(3), 3)
    if full:
        root.publish(outer, 1)
        pruned(root, ("move", "*", fails(NoSpace)), ("move", "*", fails(NoSpace)))
    else:
        record(root, outer, 1)
        pruned(root)
    assert (root.steps, root.records, saves(root)) == ([3], [], ["checkpoint-3"])


def test_a_publisher_that_meets_a_prune_never_publishes_a_removed_save(root: Root) -> None:
    """Rules 5 and 12: prunes and publishers of the same saves at once; afterwards no entry names a save that is not there."""
    published_saves(root, *range(1, 13))
    commands = [["publish", str(root.execution / f"checkpoint-{step}"), str(100 + step)] for step in range(1, 13)]
    commands[3:3] = commands[7:7] = [["prune", "-keep", "2"]]
    quiet: dict[str, Any] = {"env": environment(), "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    running = [subprocess.Popen([PUBLISHD, *command, "-checkpoint", str(root.path)], **quiet) for command in commands]
    assert {process.wait(60) for process in running} <= {0, 1}
    root.run("prune", "-keep", "2").succeeded()
    there = {entry.path for entry in asyncio.run(published(PosixStore(str(root.path))))}
    # A publisher that found the record while the prune found its entry gives way: its save stays, unpublished, and it said so.
    assert there <= {f"exec/1.4101.0/{name}" for name in saves(root)}
    # Where the prune found an entry whose publisher had not met the record, the save stays, and the record waits.
    assert {parse(name).path for name in root.records} <= there


# Two prunes, and what is made anew meanwhile


def test_what_another_prune_finished_and_training_made_anew_keeps_its_entry(root: Root) -> None:
    """Rule 13: an entry that stands because the record was finished by somebody else is none of this prune's."""
    published_saves(root, 1, 2)

    def made_anew() -> None:
        for name in root.records:
            (root.path / "prune" / name).unlink()
        published_saves(root, 1)

    result = pruned(root, ("delete_tree", "*", after(made_anew)))
    assert not result.failed
    assert (root.steps, saves(root)) == ([1, 2], ["checkpoint-1", "checkpoint-2"])


@pytest.mark.parametrize("whole", ["x", "chmod"])
def test_a_record_that_is_not_readable_or_not_empty_is_finished(root: Root, whole: str) -> None:
    """Rule 12: a record is its name; what it holds, and who may read it, does not matter."""
    published_saves(root, 1, 2)
    oldest = root.path / "pub" / root.pub[0]
    oldest.write_text("x") if whole == "x" else oldest.chmod(0)
    root.run("prune", "-keep", "1", prefix=ORDINARY_USER).succeeded(f"{root.execution}/checkpoint-1\n".encode())
    assert (root.steps, root.records, saves(root)) == ([2], [], ["checkpoint-2"])


def test_a_record_that_cannot_be_deleted_keeps_no_other_victim(root: Root) -> None:
    """Rule 12: its failure is named, and the others go."""
    published_saves(root, 1, 2, 3)
    result = pruned(root, ("delete", f"prune/{root.pub[0]}", fails(Denied)))
    assert [type(error) for error in result.failed] == [Denied]
    assert (root.steps, saves(root), len(root.records)) == ([3], ["checkpoint-3"], 1)


def test_junk_that_bears_a_record_s_name_does_not_protect_the_victim(root: Root) -> None:
    """Rule 12: where no record can be made the entry is deleted directly; the junk is named, and stays."""
    published_saves(root, 1, 2)
    junk = root.path / "prune" / root.pub[0]
    junk.mkdir()
    assert str(junk) in root.run("prune", "-keep", "1").succeeded().err
    assert (root.steps, saves(root), root.records) == ([2], ["checkpoint-2"], [junk.name])


def test_a_dry_run_shows_what_an_earlier_prune_left(root: Root) -> None:
    """What a real run would finish is part of what it would remove."""
    published_saves(root, 3)
    record(root, root.hf(1), 1)
    before_it = root.tree()
    would = root.run("prune", "-keep", "1", "-dry-run").succeeded(f"{root.execution}/checkpoint-1\n".encode()).out
    assert root.tree() == before_it
    root.run("prune", "-keep", "1").succeeded(would)


def test_a_save_that_is_kept_is_not_in_the_answer(root: Root) -> None:
    """The answer names what is gone: a save that something later needs is on stderr only."""
    save = root.hf(1)
    root.publish(save, 1)
    root.publish(save, 2)
    assert "save kept" in root.run("prune", "-keep", "1").succeeded(b"").err
    assert save.exists()


def test_an_entry_that_can_neither_be_moved_nor_deleted_keeps_its_save_and_no_other(root: Root) -> None:
    """Rule 12: on a full disk, too, a failure is one victim's."""
    published_saves(root, 1, 2, 3)
    result = pruned(root, ("move", "*", fails(NoSpace)), ("delete", f"pub/{root.pub[0]}", fails(Denied)))
    assert [type(error) for error in result.failed] == [Denied]
    assert (root.steps, saves(root)) == ([1, 3], ["checkpoint-1", "checkpoint-3"])
