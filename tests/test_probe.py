"""probe: what each check finds, that nothing is left behind, and that nothing a store does raises."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import signal
import stat
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from commands import ORDINARY_USER, PUBLISHD, Ran, Root, environment, eventually, require, run
from fakes import FaultyStore, MemoryStore, fails, loses_reply, passes, waits
from publishd import probe as probing
from publishd.cli import COMMANDS
from publishd.errors import (
    AlreadyExists,
    Denied,
    NoCredentials,
    NotFound,
    NotSupported,
    PerhapsOurs,
    StoreError,
    Unavailable,
)
from publishd.probe import probe
from publishd.publications import Publication
from publishd.stores import PUB, Entry, Finding, Kind, Verdict
from publishd.stores.filesystem import Mount, diagnose, parse_mount, weaknesses
from publishd.stores.posix import PosixStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from publishd.stores import Store

OK, WARN, FAIL = Verdict.OK, Verdict.WARN, Verdict.FAIL
LOOKING = ["reachable", "entries", "records"]
CREATING = ["exclusive create", "race", "listing", "delete"]


def objects(**options: Any) -> MemoryStore:
    """A store that promises what S3 does."""
    return MemoryStore(consistent=True, concurrency=8, **options)


async def findings(store: Store) -> dict[str, Finding]:
    return {finding.check: finding async for finding in probe(store)}


def failed(found: dict[str, Finding]) -> list[str]:
    return [check for check, finding in found.items() if finding.verdict is FAIL]


# Nothing is wrong


@pytest.mark.parametrize("consistent", [True, False])
async def test_all_is_well(consistent: bool) -> None:
    """Every check is made, in order, and the store is as it was."""
    store = MemoryStore(consistent=consistent, concurrency=8)
    store.write(Publication(7, 5, "exec/1/checkpoint-5").key)
    store.write("notes.txt", b"mine")
    found = await findings(store)
    assert list(found) == [*LOOKING, *CREATING, "name limit"]
    assert {finding.verdict for finding in found.values()} == {OK}
    assert "1 publication, the latest of epoch 7, step 5" in found["entries"].detail
    assert sorted(store.contents) == ["notes.txt", Publication(7, 5, "exec/1/checkpoint-5").key]


async def test_what_is_created_is_fresh_and_outside_pub() -> None:
    """Names are random and directly below the root: no resolve sees them, no folder stays, no probe meets another."""
    store = FaultyStore(objects())
    created = []
    for _ in range(2):
        await findings(store)
        created.append({key for operation, key in store.calls if operation == "create"})
        assert {key for operation, key in store.calls if operation == "delete"} == created[-1]
        assert {key for operation, key in store.calls if operation == "list"} == {"", "pub", "prune"}
        store.calls.clear()
    assert created[0].isdisjoint(created[1])
    assert all(re.fullmatch("probe-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", key) for keys in created for key in keys)


async def test_findings_come_one_by_one() -> None:
    """A check that takes long does not hold back those before it."""
    never = asyncio.Event()
    store = FaultyStore(objects(), [("create", "*", waits(never))])
    lines = probe(store)
    assert [(await anext(lines)).check for _ in LOOKING] == LOOKING
    await lines.aclose()


# Looking


@pytest.mark.parametrize("error", [NotFound, Denied, Unavailable, NoCredentials])
async def test_a_root_that_is_not_reachable_ends_it(error: type[StoreError]) -> None:
    """Nothing more is tried: no folder is made where a root is missing."""
    store = FaultyStore(MemoryStore(), [("list", "", fails(error))])
    found = await findings(store)
    assert failed(found) == list(found) == ["reachable"]
    assert store.calls == [("list", "")]


@pytest.mark.parametrize(("names", "says"), [(["junk"], "pub/junk"), (["b", "a", "c"], "pub/a: not <20 digits>")])
async def test_entries_that_do_not_parse(names: list[str], says: str) -> None:
    """The first is named, the others are counted, and the other checks are made all the same."""
    store = objects()
    for name in names:
        store.write(f"{PUB}/{name}")
    found = await findings(store)
    assert failed(found) == ["entries"]
    assert says in found["entries"].detail
    assert ("2 others" in found["entries"].detail) == (len(names) == 3)
    assert "delete" in found


async def test_a_folder_among_the_entries() -> None:
    """What is no regular file is no entry either."""
    store = objects()
    store.write(f"{PUB}/{Publication(1, 1, 'a').name}/file")
    assert failed(await findings(store)) == ["entries"]


@pytest.mark.parametrize(
    ("name", "verdict", "says"),
    [
        ("junk", WARN, "prune/junk"),
        (Publication(1, 5, "exec/1/checkpoint-5").name, OK, "1 save withdrawn"),
    ],
)
async def test_records(name: str, verdict: Verdict, says: str) -> None:
    """Junk among the records is named and no failure; what a prune has left to do is counted."""
    store = objects()
    store.write(f"prune/{name}")
    found = await findings(store)
    assert (found["records"].verdict, failed(found)) == (verdict, [])
    assert says in found["records"].detail


@pytest.mark.parametrize(("limit", "verdict"), [(255, OK), (143, WARN), (60, FAIL), (10, FAIL)])
async def test_the_name_limit(limit: int, verdict: Verdict) -> None:
    """How long a save's path may be is said, and whether that is little or nothing."""

    class Limited(MemoryStore):
        async def create(self, key: str) -> None:
            self._limit = 255
            await super().create(key)
            self._limit = limit

    found = await findings(Limited(name_limit=limit))
    assert found["name limit"].verdict is verdict


async def test_the_store_has_the_last_word() -> None:
    """What only this kind of store can tell comes last; where it fails at that, so does the probe."""
    told = [Finding("proxy", OK, "none"), Finding("clock", WARN, "late")]

    class Telling(MemoryStore):
        async def diagnose(self) -> list[Finding]:
            return told

    assert [*(await findings(Telling())).values()][-2:] == told
    assert failed(await findings(FaultyStore(objects(), [("diagnose", "", fails(Unavailable))]))) == ["store"]


# Exclusive create


class Overwriting(MemoryStore):
    """Has never heard of exclusive create."""

    async def create(self, key: str) -> None:
        await asyncio.sleep(0)
        self.contents[key] = b""


class Racy(MemoryStore):
    """Looks first and puts then."""

    async def create(self, key: str) -> None:
        known = key in self.contents
        await asyncio.sleep(0)
        if known:
            raise AlreadyExists("cannot create", key, "it exists")
        self.contents[key] = b""


@pytest.mark.parametrize(
    ("kind", "check", "says"),
    [(Overwriting, "exclusive create", "a second create"), (Racy, "race", "8 of 8 creates")],
)
async def test_a_store_that_overwrites(kind: type[MemoryStore], check: str, says: str) -> None:
    """A store that overwrites, be it only what is created at the same moment, must not be used; nothing is left in it."""
    store = kind(consistent=True, concurrency=8)
    found = await findings(store)
    assert failed(found) == [check]
    assert says in found[check].detail
    assert "Do not use it" in found[check].detail
    assert "delete" not in found
    assert store.contents == {}


@pytest.mark.parametrize("error", [NotSupported, Denied, Unavailable])
@pytest.mark.parametrize("second", [False, True])
async def test_a_create_that_fails(error: type[StoreError], second: bool) -> None:
    """Neither the first nor the second create may fail for another reason than that something stands there."""
    inner = objects()
    skipped = [("create", "*", passes)] * second
    found = await findings(FaultyStore(inner, [*skipped, ("create", "*", fails(error))]))
    assert failed(found) == ["exclusive create"]
    assert "race" not in found
    assert inner.contents == {}


@pytest.mark.parametrize("error", [PerhapsOurs, AlreadyExists])
@pytest.mark.parametrize(("times", "fine"), [(1, True), (3, True), (4, False)])
async def test_a_first_create_whose_answer_was_lost(error: type[StoreError], times: int, fine: bool) -> None:
    """That a fresh name exists already comes of a lost answer: it is tried again, with fresh names, three times."""
    inner = objects()
    store = FaultyStore(inner, [("create", "*", loses_reply(error))] * times)
    found = await findings(store)
    assert failed(found) == ([] if fine else ["exclusive create"])
    keys = [key for operation, key in store.calls if operation == "create"]
    assert len(set(keys[:times])) == times
    assert inner.contents == {}


async def test_a_second_create_whose_answer_was_lost() -> None:
    """That it was refused in the end is what counts."""
    assert failed(await findings(FaultyStore(objects(), [("create", "*", passes), ("create", "*", fails(PerhapsOurs))]))) == []


FIRST = [("create", "*", passes)] * 2
REFUSED = [("create", "*", passes)] * 7


@pytest.mark.parametrize(
    ("script", "fine"),
    [
        ([("create", "*", loses_reply(PerhapsOurs))], True),
        ([("create", "*", loses_reply(PerhapsOurs)), *REFUSED] * 3, True),
        ([("create", "*", loses_reply(PerhapsOurs)), *REFUSED] * 4, False),
        ([("create", "*", loses_reply(Unavailable)), *REFUSED] * 3, True),
        ([("create", "*", loses_reply(Unavailable)), *REFUSED] * 4, False),
        ([("create", "*", passes), ("create", "*", fails(PerhapsOurs))], True),
        ([("create", "*", passes), ("create", "*", fails(Unavailable))], True),
        ([("create", "*", fails(NotSupported))] * 32, False),
    ],
)
async def test_lost_answers_in_the_race(script: list[Any], fine: bool) -> None:
    """A race without a known winner is run again with fresh names, at most three times, and is no proof of anything."""
    inner = objects()
    found = await findings(FaultyStore(inner, [*FIRST, *script]))
    assert failed(found) == ([] if fine else ["race"])
    assert inner.contents == {}


async def test_a_bug_is_raised_and_leaves_nothing() -> None:
    """Only what a store may do is a finding; and whatever comes, nothing is left."""
    for script in ([], FIRST):
        inner = objects()
        with pytest.raises(ZeroDivisionError):
            await findings(FaultyStore(inner, [*script, ("create", "*", loses_reply(ZeroDivisionError()))]))
        assert inner.contents == {}


# Listing and deleting


class Forgetful(MemoryStore):
    """Lists nothing that was created since."""

    async def list(self, folder: str, prefix: str = "") -> list[Entry]:
        return [entry for entry in await super().list(folder, prefix) if not entry.name.startswith("probe-")]


async def test_a_listing_that_lacks_what_was_created() -> None:
    """Then resolve could miss a publication; what was created goes all the same."""
    store = Forgetful(consistent=True, concurrency=8)
    found = await findings(store)
    assert failed(found) == ["listing"]
    assert "lacks it" in found["listing"].detail
    assert store.contents == {}


async def test_a_delete_that_does_not_delete() -> None:
    """A delete that succeeds without effect is found by the listing, and what is left is named."""

    class Keeping(MemoryStore):
        async def delete(self, key: str) -> None:
            pass

    store = Keeping(consistent=True, concurrency=8)
    found = await findings(store)
    assert "cleanup" in failed(found)
    assert any(f"{store.root}/{key}" in found["cleanup"].detail for key in store.contents)


@pytest.mark.parametrize("consistent", [True, False])
async def test_delete_denied(consistent: bool) -> None:
    """It fails, and says what it had to leave behind; nobody else's names are touched."""

    class Guarded(MemoryStore):
        async def delete(self, key: str) -> None:
            raise Denied("cannot delete", f"{self.root}/{key}", "the policy says no")

    store = Guarded(consistent=consistent, concurrency=8)
    found = await findings(store)
    assert failed(found) == ["delete", "cleanup"]
    assert "left behind" in found["cleanup"].detail
    assert "the policy says no" in found["cleanup"].detail
    assert any(f"{store.root}/{key}" in found["cleanup"].detail for key in store.contents)


async def test_what_can_not_be_listed_may_be_left() -> None:
    """Nothing is said to be gone that could not be looked for."""
    listings = [*[("list", "", passes)] * 2, *[("list", "", fails(Unavailable))] * 4]
    found = await findings(FaultyStore(objects(), listings))
    assert failed(found) == ["listing", "delete", "cleanup"]
    assert "perhaps" in found["cleanup"].detail


async def test_a_create_before_the_listing_may_lose_its_answer() -> None:
    """It stands there, which is what the listing needs."""
    script = [("create", "*", passes)] * 10 + [("create", "*", loses_reply(PerhapsOurs))]
    store = FaultyStore(objects(), script)
    assert failed(await findings(store)) == []
    assert store.script == []


async def test_a_delete_that_fails_once_leaves_nothing() -> None:
    """What fails for a moment is made good when the folder is cleared away, and is told."""
    inner = objects()
    found = await findings(FaultyStore(inner, [*[("delete", "*", passes)] * 2, ("delete", "*", fails(Unavailable))]))
    assert failed(found) == ["delete"]
    assert inner.contents == {}


async def test_clearing_away_is_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delete that never ends is given up, and what may be left is named."""
    monkeypatch.setattr(probing, "_SECONDS", 0.05)
    never = asyncio.Event()
    found = await findings(FaultyStore(objects(), [("delete", "*", passes)] * 3 + [("delete", "*", waits(never))]))
    assert failed(found) == ["cleanup"]
    assert "within 0.05 s" in found["cleanup"].detail


# Being cancelled


@pytest.mark.parametrize("operation", ["create", "list", "delete"])
@pytest.mark.parametrize("nth", [1, 2, 3])
async def test_cancelled_in_the_middle_it_leaves_nothing(operation: str, nth: int) -> None:
    """However often it is cancelled, what was begun ends, and is cleared away, before the cancellation is felt."""
    inner, proceed, reached = objects(), asyncio.Event(), asyncio.Event()
    pattern = "" if operation == "list" else "*"
    script = [*[(operation, pattern, passes)] * nth, (operation, pattern, waits(proceed, reached=reached))]
    task = asyncio.create_task(findings(FaultyStore(inner, script)))
    await reached.wait()
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    proceed.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert inner.contents == {}


async def test_cancelled_while_the_store_hangs_it_ends_nevertheless(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits a while for what was begun, clears away, and says what it could not."""
    monkeypatch.setattr(probing, "_SECONDS", 0.05)
    inner, never, reached = objects(), asyncio.Event(), asyncio.Event()
    script = [*FIRST, ("create", "*", waits(never, reached=reached)), ("delete", "*", waits(never))]
    task = asyncio.create_task(findings(FaultyStore(inner, script)))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 20)
    assert "left behind: /memory/probe-" in caplog.text


async def test_a_diagnosis_is_not_cut_short() -> None:
    """It may have a file of its own in the root, which only it can remove."""
    proceed, reached, ended = asyncio.Event(), asyncio.Event(), []

    class Store(MemoryStore):
        async def diagnose(self) -> list[Finding]:
            reached.set()
            await proceed.wait()
            ended.append(True)
            return []

    task = asyncio.create_task(findings(Store()))
    await reached.wait()
    task.cancel()
    await asyncio.sleep(0)
    proceed.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


# The file system


def checks(found: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in found}


def test_an_ordinary_folder(root: Root) -> None:
    """Every check is made, none fails, and the root is as it was."""
    root.publish(root.hf(5), 5)
    before = root.tree()
    found = checks(diagnose(str(root.path)))
    assert list(found) == ["file system", "folders", "free space", "free inodes", "fsync", "clock"]
    assert FAIL not in {finding.verdict for finding in found.values()}
    assert root.tree() == before


def test_a_missing_root_is_told(tmp_path: Path) -> None:
    """Nothing is made of it."""
    (found,) = diagnose(str(tmp_path / "none"))
    assert (found.verdict, "No such file" in found.detail) == (FAIL, True)
    assert list(tmp_path.iterdir()) == []


LINE = "36 35 98:0 /sub /mnt/a\\040b rw,noatime shared:1 master:2 - fuse.juicefs JuiceFS:team rw,user_id=0\n"


def test_a_line_of_mountinfo_is_read() -> None:
    """The type follows a variable number of tags; odd characters of a mount point are octal."""
    mount = parse_mount(LINE)
    assert mount[:3] == ("fuse.juicefs", "JuiceFS:team", "/mnt/a b")
    assert mount.options == {"rw", "noatime", "user_id=0"}
    assert parse_mount("1 1 0:2 / / rw - ext4 /dev/vda rw\n")[:3] == ("ext4", "/dev/vda", "/")


@pytest.mark.parametrize(
    ("kind", "source", "options", "says"),
    [
        ("ext4", "/dev/vda", "rw", None),
        ("lustre", "10.0.0.1@tcp:/scratch", "rw,flock", None),
        ("nfs4", "server:/export", "rw,vers=4.2", None),
        ("nfs4", "server:/export", "rw,vers=4.2,nocto", "nocto"),
        ("nfs", "server:/export", "ro,vers=3", "read-only"),
        ("fuse.juicefs", "JuiceFS:team", "rw", None),
        ("fuse", "mountpoint-s3", "rw", "object store"),
        ("fuse.s3fs", "s3fs", "rw", "object store"),
        ("tmpfs", "none", "rw", "memory"),
        ("overlay", "overlay", "rw", "container"),
        ("vfat", "/dev/sda1", "rw", "journal"),
        ("xfs", "/dev/sda1", "ro,nocto", "read-only"),
    ],
)
def test_where_promises_are_weaker(kind: str, source: str, options: str, says: str | None) -> None:
    """A type or an option of a mount that takes something away is named with the reason."""
    reasons = list(weaknesses(Mount(kind, source, "/", frozenset(options.split(",")))))
    assert len(reasons) == (says is not None)
    assert says is None or says in reasons[0]


def replace_by_link(folder: Path) -> None:
    folder.rmdir()
    folder.symlink_to("exec")


def replace_by_file(folder: Path) -> None:
    folder.rmdir()
    folder.touch()


@pytest.mark.parametrize("name", ["pub", "prune"])
@pytest.mark.parametrize(("spoil", "says"), [(replace_by_link, "link"), (replace_by_file, "not a folder")])
def test_publishds_own_folders_must_be_folders(root: Root, name: str, spoil: Callable[[Path], None], says: str) -> None:
    """What stands for pub/ or prune/ and is none is named: nothing could be published."""
    for folder in ("pub", "prune"):
        (root.path / folder).mkdir()
    spoil(root.path / name)
    found = checks(diagnose(str(root.path)))["folders"]
    assert found.verdict is FAIL
    assert f"{root.path}/{name}: " in found.detail
    assert says in found.detail


def test_publishds_own_folders_must_lie_on_the_roots_file_system(root: Root) -> None:
    """No entry can move from one file system to another."""
    with mounted(root.path / "pub") as inside:
        found = checks(diagnose(str(root.path)))["folders"]
        assert (found.verdict, f"{inside.path}: another file system" in found.detail) == (FAIL, True)


@pytest.mark.parametrize(
    ("changes", "check", "verdict"),
    [
        ({"f_bavail": 0}, "free space", WARN),
        ({"f_bavail": 1 << 30}, "free space", OK),
        ({"f_blocks": 0, "f_bavail": 0}, "free space", OK),
        ({"f_favail": 3}, "free inodes", WARN),
        ({"f_files": 0, "f_favail": 0}, "free inodes", OK),
    ],
)
def test_room(root: Root, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], check: str, verdict: Verdict) -> None:
    """Little space and few inodes are warned of; a file system that counts neither has no limit."""
    fields = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail", "f_flag", "f_namemax")
    roomy = {"f_bsize": 4096, "f_frsize": 4096, "f_blocks": 1 << 40, "f_bavail": 1 << 30, "f_files": 1 << 40, "f_favail": 1 << 30}
    status = os.statvfs_result([{**roomy, **changes}.get(field, 0) for field in fields])
    monkeypatch.setattr("publishd.stores.filesystem.os.statvfs", lambda _fd: status)
    assert checks(diagnose(str(root.path)))[check].verdict is verdict


@pytest.mark.parametrize(
    ("folder", "code", "verdict"),
    [(True, errno.EINVAL, WARN), (True, errno.EIO, FAIL), (False, errno.EIO, FAIL), (False, errno.EINVAL, FAIL)],
)
def test_fsync_that_fails(root: Root, monkeypatch: pytest.MonkeyPatch, folder: bool, code: int, verdict: Verdict) -> None:
    """Folders that can't be synced are a warning, every other failure of fsync is one, and the file goes all the same."""
    real = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode) is folder:
            raise OSError(code, os.strerror(code))
        real(fd)

    monkeypatch.setattr("publishd.stores.filesystem.os.fsync", fsync)
    before = root.tree()
    assert checks(diagnose(str(root.path)))["fsync"].verdict is verdict
    assert root.tree() == before


@pytest.mark.parametrize(("seconds", "says"), [(0, "within"), (90, "90 s behind"), (-90, "90 s ahead of")])
def test_the_clock(root: Root, monkeypatch: pytest.MonkeyPatch, seconds: float, says: str) -> None:
    """How far the file system's clock is from this node's is said, and never a failure."""
    real = time.time
    monkeypatch.setattr("publishd.stores.filesystem.time.time", lambda: real() + seconds)
    found = checks(diagnose(str(root.path)))["clock"]
    assert says in found.detail
    assert found.verdict is (WARN if seconds else OK)


def test_what_can_not_be_looked_at_is_told(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that fails at one check is asked all others."""

    def fail(_fd: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("publishd.stores.filesystem.os.statvfs", fail)
    monkeypatch.setattr("publishd.stores.filesystem.mounted", fail)
    found = checks(diagnose(str(root.path)))
    for check in ("file system", "free space", "free inodes"):
        assert (found[check].verdict, "not implemented" in found[check].detail) == (WARN, True)
    assert found["clock"].verdict is OK


async def test_a_posix_store_passes(root: Root) -> None:
    """All checks together on a folder, several times at once: none is in another's way, and nothing is left."""
    before = root.tree()
    for found in await asyncio.gather(*(findings(PosixStore(str(root.path))) for _ in range(3))):
        assert failed(found) == []
    assert root.tree() == before


# The installed command

COMMAND = pytest.mark.skipif("probe" not in COMMANDS, reason="there is no such command yet")


def verdicts(ran: Ran) -> dict[str, str]:
    """Check to verdict, of the lines for people."""
    assert "Traceback" not in ran.err, ran
    return {line[6:].partition(":")[0]: line[:6].strip() for line in ran.out.decode("utf-8", "surrogateescape").splitlines()}


@contextlib.contextmanager
def mounted(path: Path, options: str = "size=64k,nr_inodes=40") -> Iterator[Root]:
    """A root on a small file system of its own."""
    path.mkdir(parents=True)
    ran = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], capture_output=True, text=True, check=False)
    require("mount", ran.stderr.strip() or "not allowed" if ran.returncode else None)
    try:
        yield Root(path).make()
    finally:
        subprocess.run(["umount", path], check=True)


@COMMAND
def test_the_command_on_a_folder(root: Root) -> None:
    """A line per check, status 0, and nothing is left: not in the root, and no attempt or epoch is needed."""
    root.publish(root.hf(5), 5)
    before = root.tree()
    ran = root.run("probe", env=environment(DISPATCH_ATTEMPT=None, DISPATCH_EPOCH=None)).succeeded()
    found = verdicts(ran)
    assert [check for check in found if check in LOOKING + CREATING] == LOOKING + CREATING
    assert set(found.values()) <= {"ok", "warn"}
    assert {"file system", "name limit", "free space", "free inodes", "fsync", "clock"} <= set(found)
    assert root.tree() == before


@COMMAND
def test_the_command_in_json(root: Root) -> None:
    """One object per line, with the same three words."""
    lines = root.run("probe", "-json").succeeded().json
    assert [line["check"] for line in lines][:3] == LOOKING
    for line in lines:
        assert set(line) == {"check", "verdict", "detail"}
        assert line["verdict"] in ("ok", "warn", "FAIL")
        assert json.dumps(line["detail"]).isprintable()


@COMMAND
def test_the_command_on_a_missing_root(tmp_path: Path) -> None:
    """It fails and makes nothing."""
    ran = run("probe", "-checkpoint", tmp_path / "none")
    assert (ran.code, verdicts(ran)) == (1, {"reachable": "FAIL"})
    ran.said_one_line("publishd probe: ")
    assert list(tmp_path.iterdir()) == []


@COMMAND
def test_the_command_without_rights(root: Root) -> None:
    """A root that can be read but not written to says both."""
    root.path.chmod(0o555)
    ran = root.run("probe", prefix=ORDINARY_USER)
    root.path.chmod(0o755)
    found = verdicts(ran)
    assert (ran.code, found["reachable"], found["exclusive create"]) == (1, "ok", "FAIL")
    assert b"Permission denied" in ran.out
    assert not {"race", "listing", "delete", "cleanup"} & set(found)


@COMMAND
def test_the_command_where_entries_can_not_be_written(root: Root) -> None:
    """A pub/ of somebody else is found although nothing is created in it."""
    root.publish(root.hf(5), 5)
    (root.path / "pub").chmod(0o555)
    ran = root.run("probe", prefix=ORDINARY_USER)
    assert (ran.code, verdicts(ran)["folders"]) == (1, "FAIL")


@COMMAND
def test_the_command_where_a_stray_file_stands_in_pub(root: Root) -> None:
    """It is named, since every resolve will refuse to work."""
    (root.path / "pub").mkdir()
    (root.path / "pub" / "notes.txt").touch()
    ran = root.run("probe")
    assert (ran.code, verdicts(ran)["entries"]) == (1, "FAIL")
    assert b"pub/notes.txt" in ran.out


@COMMAND
def test_the_command_where_no_inode_is_left(tmp_path: Path) -> None:
    """Where nothing can be created, that fails, and nothing is left."""
    with mounted(tmp_path / "root") as root:
        with contextlib.suppress(OSError):
            for number in range(1_000):
                (root.execution / str(number)).touch()
        before = root.tree()
        ran = root.run("probe")
        found = verdicts(ran)
        assert (ran.code, found["exclusive create"], found["free inodes"]) == (1, "FAIL", "warn")
        assert b"No space left" in ran.out
        assert root.tree() == before


@COMMAND
def test_the_command_where_no_block_is_left(tmp_path: Path) -> None:
    """Entries are empty and can be created, but no save could be written: that fails."""
    with mounted(tmp_path / "root") as root:
        with contextlib.suppress(OSError), (root.execution / "file").open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        before = root.tree()
        ran = root.run("probe")
        found = verdicts(ran)
        assert (ran.code, found["free space"], found["fsync"]) == (1, "warn", "FAIL")
        assert root.tree() == before


@COMMAND
def test_the_command_on_a_read_only_file_system(tmp_path: Path) -> None:
    """The mount is named as the cause."""
    with mounted(tmp_path / "root") as root:
        subprocess.run(["mount", "-o", "remount,ro", root.path], check=True)
        ran = root.run("probe")
        found = verdicts(ran)
        assert (ran.code, found["exclusive create"], found["file system"]) == (1, "FAIL", "warn")
        assert b"mounted read-only" in ran.out


def holding_back(fifo: Path) -> list[str]:
    """strace, which stops the command at each fsync until it is let go: it writes its log to a pipe."""
    return ["strace", "-f", "-qq", "-e", "trace=fsync", "-e", "inject=fsync:delay_exit=300000", "-o", str(fifo)]


@COMMAND
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_told_to_stop_leaves_nothing(root: Root, tmp_path: Path, number: int) -> None:
    """A signal in the middle of a create ends it with status 1, once what it made is gone."""
    works = subprocess.run([*holding_back(tmp_path / "try"), "true"], capture_output=True, check=False)
    require("strace", "tracing is not allowed" if works.returncode else None)
    before = root.tree()
    process = subprocess.Popen(
        [*holding_back(tmp_path / "log"), PUBLISHD, "probe", "-checkpoint", root.path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        start_new_session=True,
    )
    try:
        eventually(lambda: any(name.startswith("probe-") for name in os.listdir(root.path)), "something of the probe's")
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    ran = Ran(process.returncode, out, err)
    assert ran.code == 1, ran
    assert "left behind" not in ran.err, ran
    assert root.tree() == before


async def test_of_many_kinds_of_entry_only_files_count() -> None:
    """A link or a device among the entries is no entry."""
    for kind in (Kind.LINK, Kind.OTHER):
        store = objects()
        store.write(Publication(1, 1, "a").key, kind)
        assert failed(await findings(store)) == ["entries"]
