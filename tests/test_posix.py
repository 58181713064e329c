"""What only a POSIX root has: durability (rules 2 and 3), guarded reads (4), fresh listings (9) and links (11)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from commands import ATTEMPT, EPOCH, ORDINARY_USER, Root, environment, require, require_program, run, whole_lines
from publishd.errors import (
    AlreadyExists,
    Denied,
    Linked,
    NoSpace,
    NotAFile,
    NotAFolder,
    NotFound,
    NotPublished,
    StoreError,
    SyncFailed,
    TooLarge,
    Unavailable,
)
from publishd.frameworks import FRAMEWORKS, incomplete
from publishd.publications import Announced, Publication, parse, publish
from publishd.stores import PRUNE, PUB, Kind, list_fresh, open_store
from publishd.stores.posix import PosixStore, absolute

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

SAVE = f"exec/{ATTEMPT}/checkpoint-500"
PUBLICATION = Publication(EPOCH, 500, SAVE)
ENTRY, RECORD = PUBLICATION.key, PUBLICATION.record


@pytest.fixture
def store(root: Root) -> PosixStore:
    """The store of the root."""
    return PosixStore(str(root.path))


@pytest.fixture
def save(root: Root) -> Path:
    """A Trainer save with folders of its own."""
    folder = root.hf(500)
    (folder / "rank" / "0").mkdir(parents=True)
    (folder / "rank" / "0" / "shard").write_bytes(b"shard")
    (folder / "rank" / "index").write_bytes(b"index")
    return folder


# Durability, as the kernel sees it (rule 2)


class Call(NamedTuple):
    """One system call: its name, the path below the root that it is about, and its result."""

    name: str
    key: str
    flags: str


TRACED = """
    fsync fdatasync sync syncfs openat open creat mkdir mkdirat rename renameat renameat2 link linkat unlink unlinkat symlinkat
"""


def traced(root: Root, command: str, *arguments: str | Path) -> list[Call]:
    """Run a command under strace: its fsyncs, and what it makes, renames and removes below the root, in order."""
    strace = require_program("strace", "strace")
    log = root.path.parent / "strace"
    prefix = (strace, "-f", "-y", "-s", "1000", "-o", str(log), "-e", f"trace={','.join(TRACED.split())}")
    run(command, "-checkpoint", root.path, *arguments, prefix=prefix).succeeded()
    return [call for line in whole_lines(log) if (call := parsed(line, root.path))]


def parsed(line: str, root: Path) -> Call | None:
    """The call on one line of a trace, if it succeeded and is about something below the root."""
    match = re.match(r" *(\w+)\((.*)\) += (-?\d+)", line)
    if match is None or int(match[3]) < 0:
        return None
    folder = re.match(r"(?:\d+|AT_FDCWD)<([^>]*)>", match[2])
    named = re.search(r'"([^"]*)"', match[2])
    path = os.path.join(folder[1] if folder else "", named[1] if named else "").rstrip("/")
    if path != str(root) and not path.startswith(f"{root}/"):
        return None
    return Call(match[1], path[len(str(root)) + 1 :], match[2])


def synced(calls: list[Call]) -> list[str]:
    """The keys that were synced, in order; the root is ''."""
    assert not [call for call in calls if call.name in ("fdatasync", "sync", "syncfs")]
    return [call.key for call in calls if call.name == "fsync"]


def created(calls: list[Call], key: str) -> int:
    """Where in the trace the entry is created exclusively."""
    [index] = [index for index, call in enumerate(calls) if call.key == key and "O_EXCL" in call.flags]
    return index


BELOW = {
    f"{SAVE}/rank/0": [f"{SAVE}/rank/0/shard"],
    f"{SAVE}/rank": [f"{SAVE}/rank/0", f"{SAVE}/rank/index"],
    SAVE: [f"{SAVE}/rank", f"{SAVE}/model.safetensors", f"{SAVE}/trainer_state.json"],
    f"exec/{ATTEMPT}": [SAVE],
    "exec": [f"exec/{ATTEMPT}"],
    "": ["exec"],
}


def test_rule2_the_save_is_synced_bottom_up_before_the_entry(root: Root, save: Path) -> None:
    """All of the save, and each parent up to the root, is synced before the entry is created, a folder after what it holds."""
    root.publish(root.hf(400), 400)
    calls = traced(root, "publish", save, "500")
    order = synced(calls[: created(calls, ENTRY)])
    for folder, children in BELOW.items():
        for child in children:
            assert order.index(child) < order.index(folder), (child, folder)


def test_rule2_the_entry_and_pub_are_synced_after_the_create(root: Root, save: Path) -> None:
    """After the create the entry is synced, then pub/; the root was synced after pub/ was made."""
    calls = traced(root, "publish", save, "500")
    after = synced(calls[created(calls, ENTRY) :])
    assert after[:2] == [ENTRY, PUB]
    [made] = [index for index, call in enumerate(calls) if call.name.startswith("mkdir") and call.key == PUB]
    assert "" in synced(calls[made:])


def test_rule2_a_pub_that_stood_before_needs_no_sync_of_the_root(root: Root, save: Path) -> None:
    """Where pub/ is there already, the entry and pub/ are all that is synced after the create."""
    root.publish(root.hf(400), 400)
    calls = traced(root, "publish", save, "500")
    assert synced(calls[created(calls, ENTRY) :]) == [ENTRY, PUB]


def test_rule2_an_entry_that_exists_is_made_durable(root: Root, save: Path) -> None:
    """Whoever created it may have died before its own sync, so that pub/ is synced before success is claimed."""
    root.publish(save, 500)
    assert PUB in synced(traced(root, "publish", save, "500"))


def test_rule2_pub_is_synced_once_when_a_watch_starts(root: Root) -> None:
    """Entries that an earlier watch left unsynced become durable with the next one, even if it publishes nothing."""
    root.publish(root.hf(500), 500)
    assert synced(traced(root, "watch", "-framework", "hf", "-once")).count(PUB) == 1


def test_rule2_a_watch_syncs_each_save_before_its_entry(root: Root) -> None:
    """The watch keeps to the same order as publish, for every save."""
    saves = {step: root.hf(step) for step in (1, 2, 3)}
    calls = traced(root, "watch", "-framework", "hf", "-once")
    for step, folder in saves.items():
        key = os.path.relpath(folder, root.path)
        at = created(calls, Publication(EPOCH, step, key).key)
        assert {key, f"{key}/model.safetensors", f"exec/{ATTEMPT}", "exec", ""} <= set(synced(calls[:at]))
        assert {Publication(EPOCH, step, key).key, PUB} <= set(synced(calls[at:]))


@pytest.mark.parametrize("command", ["publish", "watch"])
def test_rule2_no_sync_makes_none(root: Root, save: Path, command: str) -> None:
    """With -no-sync nothing at all is synced, and the save is published all the same."""
    arguments = [save, "500"] if command == "publish" else ["-framework", "hf", "-once"]
    assert synced(traced(root, command, "-no-sync", *arguments)) == []
    assert root.pub == [PUBLICATION.name]


def test_rule3_nothing_temporary_ever_stands_in_pub(root: Root) -> None:
    """Whatever publish, watch and prune make, rename or link in pub/ is an entry by its name."""
    for step in (1, 2, 3):
        root.hf(step)
    calls = traced(root, "publish", root.hf(4), "4")
    calls += traced(root, "watch", "-framework", "hf", "-once", "-keep", "2")
    calls += traced(root, "prune", "-keep", "1")
    named = {match for call in calls for match in re.findall(r'[<"/](?:pub/)([^">]+)', f"{call.flags} {call.key}")}
    named |= {call.key[len("pub/") :] for call in calls if call.key.startswith("pub/")}
    assert {parse(entry).step for entry in named} == {1, 2, 3, 4}
    assert root.steps == [4]


# Durability that fails (rule 2)

real_fsync = os.fsync


def break_fsync(monkeypatch: pytest.MonkeyPatch, root: Root, key: str, number: int) -> list[str]:
    """Make os.fsync of this key fail; the keys synced before it are collected."""
    before: list[str] = []

    def fsync(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        before.append(os.path.relpath(path, root.path))
        if before[-1] == (key or "."):
            raise OSError(number, os.strerror(number))
        real_fsync(fd)

    monkeypatch.setattr("publishd.stores.posix.os.fsync", fsync)
    return before


EVERYTHING_SYNCED = [
    f"{SAVE}/model.safetensors",
    f"{SAVE}/rank/0/shard",
    f"{SAVE}/rank/0",
    f"{SAVE}/rank",
    SAVE,
    f"exec/{ATTEMPT}",
    "exec",
    "",
    ENTRY,
    PUB,
]
FILES_SYNCED = [f"{SAVE}/model.safetensors", f"{SAVE}/rank/0/shard", ENTRY]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("key", EVERYTHING_SYNCED)
async def test_rule2_a_failing_fsync_means_not_published(
    monkeypatch: pytest.MonkeyPatch, root: Root, store: PosixStore, save: Path, key: str, number: int
) -> None:
    """Whichever fsync fails, the error names what was synced, and no entry is left."""
    break_fsync(monkeypatch, root, key, number)
    with pytest.raises(SyncFailed, match=re.escape(f"{root.path}/{key}".rstrip("/"))):
        await publish(store, PUBLICATION)
    assert root.pub == []
    assert save.is_dir()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
@pytest.mark.parametrize("key", [key for key in EVERYTHING_SYNCED if key not in FILES_SYNCED])
async def test_rule2_a_folder_that_has_no_fsync_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, root: Root, store: PosixStore, save: Path, key: str, number: int
) -> None:
    """Some file systems have no fsync for folders: those three answers are ignored, there only."""
    tried = break_fsync(monkeypatch, root, key, number)
    assert await publish(store, PUBLICATION) is Announced.CREATED
    assert (key or ".") in tried
    assert root.pub == [PUBLICATION.name]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
@pytest.mark.parametrize("key", FILES_SYNCED)
async def test_rule2_a_file_must_have_fsync(
    monkeypatch: pytest.MonkeyPatch, root: Root, store: PosixStore, save: Path, key: str, number: int
) -> None:
    """For a file the same answers are a failure."""
    break_fsync(monkeypatch, root, key, number)
    with pytest.raises(SyncFailed):
        await publish(store, PUBLICATION)
    assert root.pub == []


async def test_rule2_a_failing_fsync_of_pub_hides_no_existing_entry(
    monkeypatch: pytest.MonkeyPatch, root: Root, store: PosixStore, save: Path
) -> None:
    """An entry that stood before stays, but that it is durable is not claimed."""
    root.publish(save, 500)
    break_fsync(monkeypatch, root, PUB, errno.EIO)
    with pytest.raises(SyncFailed):
        await store.create(ENTRY)
    assert root.pub == [PUBLICATION.name]


async def test_rule2_links_and_special_files_are_not_synced(root: Root, store: PosixStore, save: Path) -> None:
    """A link inside a save is left alone, and a FIFO does not hold up the sync."""
    (save / "link").symlink_to("/nowhere")
    (save / "loop").symlink_to("loop")
    os.mkfifo(save / "fifo")
    async with at_once(save / "fifo"):
        await store.sync(SAVE, recursive=True)


async def test_syncing_what_is_missing_is_not_found(store: PosixStore) -> None:
    """There is nothing to make durable; a watch that starts before pub/ is made relies on it."""
    for key in (PUB, SAVE, "exec/none/checkpoint-5"):
        with pytest.raises(NotFound):
            await store.sync(key, recursive=False)


# Reading (rule 4)


def a_socket(path: Path) -> None:
    """A socket that nobody listens to."""
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket may have no more than 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as unbound:
            unbound.bind(path.name)
    finally:
        os.chdir(here)


def a_device(path: Path) -> None:
    """A device that would give zeros for ever."""
    try:
        os.mknod(path, 0o20666, os.makedev(1, 5))
    except PermissionError as error:
        require("mknod", str(error))


NO_FILES: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "socket": a_socket,
    "device": a_device,
    "folder": Path.mkdir,
    "link to a file": lambda path: path.symlink_to(path.parent / "model.safetensors"),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to nothing": lambda path: path.symlink_to("/nowhere"),
    "link loop": lambda path: path.symlink_to(path.name),
}


@contextlib.asynccontextmanager
async def at_once(path: Path) -> AsyncIterator[None]:
    """Fail what takes long; whoever waits at the FIFO there is let go, or the tests themselves would never end."""
    try:
        async with asyncio.timeout(20):
            yield
    finally:
        if path.is_fifo():
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


@pytest.mark.parametrize("kind", NO_FILES)
async def test_rule4_what_is_no_file_can_neither_hang_nor_fool_a_read(store: PosixStore, save: Path, kind: str) -> None:
    """Reading anything but a regular file is NotAFile, at once."""
    NO_FILES[kind](save / "odd")
    async with at_once(save / "odd"):
        with pytest.raises(NotAFile):
            await store.read(f"{SAVE}/odd", 100)
        with pytest.raises(NotAFile):
            await anext(store.stream(f"{SAVE}/odd"))


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=lambda framework: framework.name)
async def test_rule4_what_is_no_file_is_no_marker(root: Root, store: PosixStore, kind: str, framework: Any) -> None:
    """Such a thing in the marker's place means "not complete yet", with a reason."""
    folder = root.execution / f"{framework.prefix}500"
    folder.mkdir()
    NO_FILES[kind](folder / framework.marker)
    async with at_once(folder / framework.marker):
        reason = await incomplete(store, framework, f"exec/{ATTEMPT}/{folder.name}")
    assert reason == f"{framework.marker} is not a regular file"


@pytest.mark.parametrize("kind", NO_FILES)
async def test_rule4_a_marker_swapped_after_the_listing_is_no_marker(
    monkeypatch: pytest.MonkeyPatch, store: PosixStore, save: Path, kind: str
) -> None:
    """The same holds for a thing that took the marker's place after the listing had shown a file."""
    listing = store.list

    async def swapping(folder: str, prefix: str = "") -> list[Any]:
        entries = await listing(folder, prefix)
        marker = save / "trainer_state.json"
        if marker.is_file() and not marker.is_symlink():
            marker.unlink()
            NO_FILES[kind](marker)
        return entries

    monkeypatch.setattr(store, "list", swapping)
    async with at_once(save / "trainer_state.json"):
        assert await incomplete(store, FRAMEWORKS["hf"], SAVE) == "trainer_state.json is not a regular file"


async def test_rule4_a_huge_file_is_refused_without_being_read(store: PosixStore, save: Path) -> None:
    """The size is asked before anything is read: 8 TiB (sparse) are refused at once."""
    with (save / "huge").open("wb") as file:
        try:
            file.truncate(1 << 43)
        except OSError:
            file.truncate(1 << 40)
    before = bytes_read()
    async with asyncio.timeout(20):
        with pytest.raises(TooLarge):
            await store.read(f"{SAVE}/huge", 64 << 20)
    assert bytes_read() - before < 1 << 20


def bytes_read() -> int:
    """How much this process has read so far."""
    try:
        return int(Path("/proc/self/io").read_text().split()[1])
    except OSError as error:
        require("proc", str(error))
        raise


async def test_rule4_a_file_that_lies_about_its_size_is_not_read_on(monkeypatch: pytest.MonkeyPatch, store: PosixStore) -> None:
    """Files in /proc have no size: not more than the limit is read from what grew since its size was asked."""
    proc = PosixStore("/proc/self")
    with pytest.raises(TooLarge):
        await proc.read("maps", 100)


async def test_a_save_behind_a_link_is_read(root: Root, store: PosixStore, save: Path, tmp_path: Path) -> None:
    """Reading follows links to folders: an execution may lie elsewhere (rule 17)."""
    shutil.move(root.execution, tmp_path / "elsewhere")
    root.execution.symlink_to(tmp_path / "elsewhere")
    assert await incomplete(store, FRAMEWORKS["hf"], SAVE) is None
    assert await publish(store, PUBLICATION) is Announced.CREATED


async def test_an_unreadable_file_is_denied(root: Root, save: Path) -> None:
    """B11: rights that are missing are told as such, for a marker and for an execution that can't be listed."""
    (save / "trainer_state.json").chmod(0)
    root.publish(save, 500)
    passed = root.run("resolve", "-verify", prefix=ORDINARY_USER)
    assert (passed.code, passed.out) == (1, b"")
    assert "trainer_state.json cannot be read: Permission denied" in passed.err


# Listing (rule 9)


OPERATIONS: dict[str, Callable[[PosixStore], Awaitable[object]]] = {
    "list": lambda store: store.list("exec"),
    "list missing": lambda store: store.list("none"),
    "list a file": lambda store: store.list(f"{SAVE}/model.safetensors"),
    "read": lambda store: store.read(f"{SAVE}/model.safetensors", 100),
    "read too large": lambda store: store.read(f"{SAVE}/model.safetensors", 1),
    "read a folder": lambda store: store.read(SAVE, 1),
    "stream, given up": lambda store: first_piece(store, f"{SAVE}/model.safetensors"),
    "create": lambda store: store.create(ENTRY),
    "create existing": lambda store: store.create(f"{SAVE}/model.safetensors"),
    "create through a link": lambda store: store.create("link/file"),
    "move": lambda store: store.move(f"{SAVE}/model.safetensors", RECORD),
    "move missing": lambda store: store.move(ENTRY, RECORD),
    "delete": lambda store: store.delete(f"{SAVE}/model.safetensors"),
    "delete a folder": lambda store: store.delete(SAVE),
    "delete_tree": lambda store: store.delete_tree(SAVE),
    "delete_tree of a link": lambda store: store.delete_tree("link"),
    "sync": lambda store: store.sync(SAVE, recursive=True),
    "sync missing": lambda store: store.sync("none/none", recursive=True),
    "locate": lambda store: store.locate(f"{store.root}/{SAVE}"),
    "name_limit": lambda store: store.name_limit(),
    "publish": lambda store: publish(store, PUBLICATION),
    "complete": lambda store: incomplete(store, FRAMEWORKS["hf"], SAVE),
}


async def first_piece(store: PosixStore, key: str) -> None:
    """Begin a stream and give it up."""
    pieces = store.stream(key)
    await anext(pieces)
    await pieces.aclose()


def descriptors() -> list[str]:
    """What the process holds open, save what belongs to the loop and its threads."""
    return sorted(
        os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")
    )


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_rule9_no_descriptor_is_kept(root: Root, store: PosixStore, save: Path, operation: str) -> None:
    """Whether an operation succeeds or fails, it leaves no file or folder open."""
    (root.path / "link").symlink_to("exec")
    with contextlib.suppress(StoreError):
        await OPERATIONS[operation](store)
    assert [path for path in descriptors() if path.startswith(str(root.path))] == []


def test_rule9_every_listing_opens_every_folder_afresh(root: Root, tmp_path: Path) -> None:
    """A watch opens its folder anew at each scan: that is what makes an NFS client ask its server."""
    strace = require_program("strace", "strace")
    program = (
        "import asyncio, sys; from publishd.stores.posix import PosixStore; store = PosixStore(sys.argv[1])\n"
        "async def main():\n    for _ in range(3): await store.list(sys.argv[2])\nasyncio.run(main())"
    )
    command = [strace, "-f", "-y", "-e", "trace=openat,getdents64", "-o", str(tmp_path / "log"), sys.executable, "-c", program]
    subprocess.run([*command, str(root.path), f"exec/{ATTEMPT}"], check=True, env=environment(), timeout=60)
    log = (tmp_path / "log").read_text()
    for path in (root.path, root.path / "exec", root.execution):
        assert len(re.findall(rf"openat\(.* = \d+<{re.escape(str(path))}>\n", log)) == 3
    assert len(re.findall(rf"getdents64\(\d+<{re.escape(str(root.execution))}>.* = \d+\n", log)) >= 3


async def test_rule9_a_folder_that_was_replaced_is_seen(root: Root, store: PosixStore) -> None:
    """A listing follows the name, not a folder it once opened, and tells the two apart by their inodes."""
    root.hf(1)
    [(_, _, before)] = await store.list(f"exec/{ATTEMPT}")
    (root.execution / "checkpoint-1").rename(root.path / "aside")
    root.hf(1)
    [(_, _, after)] = await store.list(f"exec/{ATTEMPT}")
    assert before != after
    shutil.rmtree(root.path / "exec")
    with pytest.raises(NotFound):
        await store.list(f"exec/{ATTEMPT}")
    root.hf(2)
    assert [entry.name for entry in await store.list(f"exec/{ATTEMPT}")] == ["checkpoint-2"]


async def test_rule9_the_time_of_a_folder_decides_nothing(root: Root, store: PosixStore) -> None:
    """What came is seen although the folder says that it has not changed."""
    root.hf(1)
    await store.list(f"exec/{ATTEMPT}")
    status = root.execution.stat()
    root.hf(2)
    os.utime(root.execution, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert len(await store.list(f"exec/{ATTEMPT}")) == 2


async def test_an_execution_that_is_a_link_to_nowhere_is_not_there(root: Root, store: PosixStore) -> None:
    """A link that stands before the folder that it leads to is made means the same as none (rule 17)."""
    root.execution.rmdir()
    root.execution.symlink_to("later")
    assert await list_fresh(store, f"exec/{ATTEMPT}") is None
    (root.path / "exec" / "later").mkdir()
    assert await list_fresh(store, f"exec/{ATTEMPT}") == []


@pytest.mark.parametrize("folder", [PUB, PRUNE])
async def test_publishd_s_own_folders_are_never_links(root: Root, store: PosixStore, folder: str) -> None:
    """A link in the place of pub/ or prune/ is not followed by a listing, nor by what creates or moves."""
    (root.path / "elsewhere").mkdir()
    (root.path / "elsewhere" / "x").touch()
    (root.path / folder).symlink_to("elsewhere")
    with pytest.raises(NotAFolder):
        await store.list(folder)
    with pytest.raises(Linked):
        await store.create(f"{folder}/y")
    root.hf(500)
    with pytest.raises(Linked):
        await store.move("elsewhere/x" if folder == PRUNE else ENTRY, RECORD)
    assert os.listdir(root.path / "elsewhere") == ["x"]


# Creating


async def test_the_root_is_never_made(tmp_path: Path) -> None:
    """A root that is not there stays so, whatever is asked of its store."""
    store = PosixStore(str(tmp_path / "none"))
    asked = (store.create(ENTRY), store.move(ENTRY, RECORD), store.list(""), store.list(PUB), store.sync(PUB, recursive=False))
    gone = (store.delete(ENTRY), store.delete_tree(SAVE), store.read(ENTRY, 1))
    for call in (*asked, *gone, store.name_limit(), store.locate(f"{tmp_path}/none/x")):
        with pytest.raises(StoreError):
            await call
    assert os.listdir(tmp_path) == []


async def test_prune_is_made_before_pub(monkeypatch: pytest.MonkeyPatch, root: Root, store: PosixStore) -> None:
    """A crash between the two leaves no pub/ without prune/."""
    made: list[str] = []
    real = os.mkdir

    def mkdir(name: str, **where: Any) -> None:
        made.append(name)
        real(name, **where)

    monkeypatch.setattr("publishd.stores.posix.os.mkdir", mkdir)
    await store.create(ENTRY)
    assert made == [PRUNE, PUB]


async def test_modes_follow_the_umask(root: Root, store: PosixStore) -> None:
    """B11: entries and folders are readable by whom the umask allows, as any file is."""
    before = os.umask(0o027)
    try:
        await store.create(ENTRY)
    finally:
        os.umask(before)
    assert (root.path / ENTRY).stat().st_mode & 0o777 == 0o640
    assert {(root.path / folder).stat().st_mode & 0o777 for folder in (PUB, PRUNE)} == {0o750}


ERRNOS = [
    (errno.EACCES, Denied),
    (errno.EPERM, Denied),
    (errno.EROFS, Denied),
    (errno.ENOSPC, NoSpace),
    (errno.EDQUOT, NoSpace),
    (errno.EIO, Unavailable),
    (errno.ESTALE, Unavailable),
    (errno.ENOTCONN, Unavailable),
    (errno.EMFILE, Unavailable),
    (errno.ETIMEDOUT, Unavailable),
    (12345, Unavailable),
]


@pytest.mark.parametrize(("number", "error"), ERRNOS)
@pytest.mark.parametrize("operation", ["list", "read", "create", "move", "delete", "delete_tree", "sync", "name_limit"])
async def test_every_errno_is_an_error_of_ours(
    monkeypatch: pytest.MonkeyPatch, store: PosixStore, save: Path, number: int, error: type[StoreError], operation: str
) -> None:
    """Whatever the kernel says becomes a StoreError that carries its words; a right that is missing is never "exists" (B27)."""

    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("publishd.stores.posix.os.open", fail)
    with pytest.raises(error, match=re.escape(os.strerror(number))):
        await OPERATIONS[operation](store)


async def test_only_a_name_that_exists_is_already_exists(root: Root, save: Path) -> None:
    """B27: a pub/ that may not be written to is a matter of rights, even if the entry can't be there."""
    root.publish(root.hf(400), 400)
    (root.path / PUB).chmod(0o555)
    root.run("publish", save, "500", prefix=ORDINARY_USER).failed("Permission denied")
    assert root.steps == [400]


# Moving


def raising(number: int) -> Callable[..., None]:
    """A system call that always fails so."""

    def call(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


SYSTEM_CALLS = ("open", "stat", "fstat", "scandir", "unlink", "rmdir", "rename", "close")


def before_call(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], object]) -> Callable[[], int]:
    """Act just before the n-th system call that the store makes; returns how to ask for the number of calls made."""
    made = 0

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal made
            if threading.current_thread() is not threading.main_thread():
                made += 1
                if made == number:
                    action()
            return real(*arguments, **options)

        return call

    for name in SYSTEM_CALLS:
        monkeypatch.setattr(f"publishd.stores.posix.os.{name}", wrapped(getattr(os, name)))
    return lambda: made


async def test_b27_a_file_system_without_rename_gets_a_create_and_a_delete(
    monkeypatch: pytest.MonkeyPatch, root: Root, store: PosixStore
) -> None:
    """Where there is no rename the record is made first, then the entry goes."""
    for number in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV):
        root.publish(SAVE, 500)
        monkeypatch.setattr("publishd.stores.posix.os.rename", raising(number))
        await store.move(ENTRY, RECORD)
        assert (root.pub, root.records) == ([], [PUBLICATION.name])
        with pytest.raises(NotFound):
            await store.move(f"{PUB}/none", f"{PRUNE}/none")
        assert root.records == [PUBLICATION.name]


async def test_b27_without_rename_the_record_stands_before_the_entry_goes(
    monkeypatch: pytest.MonkeyPatch, root: Root, store: PosixStore
) -> None:
    """Where the entry then can't be deleted, the record stands: never neither."""
    root.publish(SAVE, 500)
    monkeypatch.setattr("publishd.stores.posix.os.rename", raising(errno.ENOSYS))
    monkeypatch.setattr("publishd.stores.posix.os.unlink", raising(errno.EIO))
    with pytest.raises(Unavailable):
        await store.move(ENTRY, RECORD)
    assert (root.pub, root.records) == ([PUBLICATION.name], [PUBLICATION.name])


@pytest.mark.parametrize("rename", [os.rename, raising(errno.ENOSYS)], ids=["rename", "no rename"])
async def test_move_at_any_step_one_of_both_stands(
    monkeypatch: pytest.MonkeyPatch, root: Root, store: PosixStore, rename: Callable[..., None]
) -> None:
    """Wherever a prune is killed while it withdraws an entry, that or its record is found."""
    monkeypatch.setattr("publishd.stores.posix.os.rename", rename)
    for number in range(1, 100):
        root.publish(SAVE, 500)
        (root.path / RECORD).unlink(missing_ok=True)
        seen: list[bool] = []
        with monkeypatch.context() as patch:
            before_call(patch, number, lambda seen=seen: seen.append(bool(root.pub or root.records)))  # type: ignore[misc]
            await store.move(ENTRY, RECORD)
        if not seen:
            break
        assert seen == [True], f"at call {number}"
    assert number > 5


async def test_a_rename_whose_answer_was_lost_is_success(monkeypatch: pytest.MonkeyPatch, root: Root, store: PosixStore) -> None:
    """NFS sends a rename again and then finds nothing to rename: the record that stands shows that it was done."""
    root.publish(SAVE, 500)
    real = os.rename

    def twice(*names: str, **folders: Any) -> None:
        real(*names, **folders)
        real(*names, **folders)

    monkeypatch.setattr("publishd.stores.posix.os.rename", twice)
    await store.move(ENTRY, RECORD)
    assert (root.pub, root.records) == ([], [PUBLICATION.name])


# Mounts: other file systems inside, and full ones


@contextlib.contextmanager
def tmpfs(path: Path, options: str = "size=1m") -> Iterator[Path]:
    """A file system of its own, mounted there."""
    path.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], capture_output=True, text=True, check=False)
    require("mount", mounted.stderr.strip() or "not allowed" if mounted.returncode else None)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


@pytest.mark.parametrize("inside", ["", "rank", "rank/0", "rank/0/mounted"])
async def test_rule11_what_is_mounted_inside_a_save_stays(store: PosixStore, save: Path, inside: str) -> None:
    """Deleting stops at another file system: Denied, with the place named, and nothing on it is touched."""
    with tmpfs(save / inside) as mounted:
        (mounted / "kept" / "deep").mkdir(parents=True)
        (mounted / "kept" / "file").write_bytes(b"x")
        with pytest.raises(Denied, match=re.escape(str(mounted))):
            await store.delete_tree(SAVE)
        assert sorted(os.listdir(mounted / "kept")) == ["deep", "file"]
    await store.delete_tree(SAVE)
    assert not save.exists()


async def test_rule11_what_lies_on_a_mount_is_not_deleted(root: Root, store: PosixStore) -> None:
    """A save below a mount point is on another device than the root, and stays."""
    with tmpfs(root.execution):
        root.hf(500)
        for call in (store.delete_tree(SAVE), store.delete(f"{SAVE}/trainer_state.json")):
            with pytest.raises(Denied):
                await call
        assert len(os.listdir(root.execution / "checkpoint-500")) == 2


@pytest.mark.parametrize("full", ["inodes", "blocks"])
async def test_a_full_disk_lets_entries_move_and_saves_be_deleted(tmp_path: Path, full: str) -> None:
    """Withdrawing and deleting need no space; what can't be created is NoSpace, and leaves nothing."""
    with tmpfs(tmp_path / "root", "size=64k,nr_inodes=40"):
        root = Root(tmp_path / "root").make()
        root.publish(root.hf(500), 500)
        store = PosixStore(str(root.path))
        fill(root.execution, full)
        if full == "inodes":
            with pytest.raises(NoSpace):
                await store.create(f"{PUB}/new")
        await store.move(ENTRY, RECORD)
        await store.delete_tree(SAVE)
        assert (root.pub, root.records) == ([], [PUBLICATION.name])
        await store.delete(RECORD)
        assert root.records == []


def fill(folder: Path, what: str) -> None:
    """Use up all inodes or all blocks of the file system."""
    with contextlib.suppress(OSError), (folder / "blocks").open("wb", buffering=0) as file:
        while what == "blocks":
            file.write(b"x" * 4096)
    with contextlib.suppress(OSError):
        for number in range(1_000 if what == "inodes" else 0):
            (folder / str(number)).touch()


async def test_a_full_disk_without_prune_leaves_the_entry(tmp_path: Path) -> None:
    """Where prune/ is missing and can't be made, the move is NoSpace and the entry stands."""
    with tmpfs(tmp_path / "root", "size=64k,nr_inodes=40"):
        root = Root(tmp_path / "root").make()
        root.publish(SAVE, 500)
        (root.path / PRUNE).rmdir()
        fill(root.execution, "inodes")
        with pytest.raises(NoSpace):
            await PosixStore(str(root.path)).move(ENTRY, RECORD)
        assert root.pub == [PUBLICATION.name]


async def test_a_read_only_file_system_is_denied(tmp_path: Path) -> None:
    """Nothing can be written there, and the error says so."""
    with tmpfs(tmp_path / "root"):
        root = Root(tmp_path / "root").make()
        root.publish(root.hf(500), 500)
        subprocess.run(["mount", "-o", "remount,ro", root.path], check=True)
        store = PosixStore(str(root.path))
        for call in (store.create(f"{PUB}/x"), store.move(ENTRY, RECORD), store.delete(ENTRY), store.delete_tree(SAVE)):
            with pytest.raises(Denied, match="Read-only file system"):
                await call
        assert root.resolved() == SAVE


# Links (rule 11)


class Outside:
    """A folder beside the root that looks like what lies in it."""

    def __init__(self, path: Path) -> None:
        self.root = Root(path)
        for step in (500, 600):
            save = self.root.hf(step)
            (save / "rank" / "0").mkdir(parents=True)
            (save / "rank" / "0" / "shard").write_bytes(b"precious")
            (save / "rank" / "index").write_bytes(b"precious")
        (path / PUB).mkdir()
        (path / ENTRY).touch()
        self.before = self.root.tree()

    def is_intact(self) -> bool:
        return self.root.tree() == self.before


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    """What must never be touched."""
    return Outside(tmp_path / "outside")


LEVELS = ["exec", f"exec/{ATTEMPT}", SAVE]
CHANGES: dict[str, Callable[[PosixStore], Awaitable[None]]] = {
    "create": lambda store: store.create(f"{SAVE}/new"),
    "delete": lambda store: store.delete(f"{SAVE}/trainer_state.json"),
    "delete_tree": lambda store: store.delete_tree(f"{SAVE}/rank"),
    "move": lambda store: store.move(f"{SAVE}/trainer_state.json", RECORD),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("change", CHANGES)
async def test_rule11_a_link_at_any_level_of_a_key_is_refused(
    root: Root, store: PosixStore, outside: Outside, save: Path, level: str, change: str
) -> None:
    """Whatever creates, moves or deletes goes through no link below the root, and names the link."""
    shutil.rmtree(root.path / level)
    (root.path / level).symlink_to(outside.root.path / level)
    with pytest.raises(Linked, match=re.escape(f"{root.path}/{level}: it is a symbolic link")):
        await CHANGES[change](store)
    assert outside.is_intact()
    assert (root.path / level).is_symlink()


async def test_rule11_the_root_itself_may_be_reached_through_a_link(tmp_path: Path, root: Root, save: Path) -> None:
    """Links above the root, or the root's own name being one, are the user's business."""
    (tmp_path / "alias").symlink_to(root.path)
    store = PosixStore(str(tmp_path / "alias"))
    assert await publish(store, PUBLICATION) is Announced.CREATED
    await store.delete_tree(SAVE)
    assert not save.exists()
    assert root.pub == [PUBLICATION.name]


class Swap:
    """Exchanges a folder below the root with a link to its likeness outside, and back."""

    def __init__(self, root: Root, outside: Outside, key: str) -> None:
        self.root, self.key = root.path, key
        self.place, self.aside, self.target = root.path / key, root.path / "aside", outside.root.path / key

    def in_(self) -> None:
        """The link stands in the folder's place, if that is still there."""
        with contextlib.suppress(FileNotFoundError):
            self.place.rename(self.aside)
            self.place.symlink_to(self.target)

    def out(self) -> None:
        """The folder stands in its place again."""
        if self.place.is_symlink():
            self.place.unlink()
        with contextlib.suppress(FileNotFoundError):
            self.aside.rename(self.place)

    def shows(self, key: str) -> bool:
        """Whether anything stands under the key, in the folder that was there before the link."""
        if key.startswith(f"{self.key}/") and self.aside.exists():
            return os.path.lexists(self.aside / os.path.relpath(key, self.key))
        return os.path.lexists(self.root / key)


@pytest.mark.parametrize("key", [*LEVELS, f"{SAVE}/rank", f"{SAVE}/rank/0"])
async def test_rule11_a_link_swapped_in_at_any_step_leads_nowhere(
    monkeypatch: pytest.MonkeyPatch, root: Root, store: PosixStore, outside: Outside, key: str
) -> None:
    """At each system call of a deletion in turn a folder becomes a link: outside stays whole, and success means gone."""
    swap = Swap(root, outside, key)
    for number in range(1, 1_000):
        a_deeper_save(root)
        with monkeypatch.context() as patch:
            calls = before_call(patch, number, swap.in_)
            failed = await error_of(store.delete_tree(SAVE))
        assert outside.is_intact(), f"at call {number}"
        assert failed or not swap.shows(SAVE), f"at call {number}"
        swap.out()
        if calls() < number:
            break
    assert number > 20


def a_deeper_save(root: Root) -> None:
    """Nothing but one save, with two folders one in the other."""
    for left in ("exec", "aside"):
        shutil.rmtree(root.path / left, ignore_errors=True)
    folder = root.hf(500) / "rank" / "0"
    folder.mkdir(parents=True)
    (folder / "shard").touch()


async def error_of(call: Awaitable[None]) -> StoreError | None:
    """How the call failed, if it did."""
    try:
        await call
    except StoreError as error:
        return error
    return None


async def test_rule11_a_race_against_swapped_links_is_lost_by_nobody(root: Root, store: PosixStore, outside: Outside) -> None:
    """While a thread exchanges the execution's folder with a link as fast as it can, deleting never reaches outside."""
    swap = Swap(root, outside, f"exec/{ATTEMPT}")
    stop = threading.Event()

    def exchange() -> None:
        while not stop.is_set():
            swap.in_()
            swap.out()

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        linked = await race(store, root)
    finally:
        stop.set()
        thread.join()
    assert outside.is_intact()
    assert linked, "the race was never on"


async def race(store: PosixStore, root: Root, seconds: float = 20) -> int:
    """Delete a save again and again until the link was met many times; how often it was."""
    linked = 0
    deadline = time.monotonic() + seconds
    while linked < 100 and time.monotonic() < deadline:
        linked += isinstance(await error_of(store.delete_tree(SAVE)), Linked)
    return linked


# Deep trees


@pytest.fixture
def deep(root: Root) -> Iterator[str]:
    """A save of 1,500 folders, each in the one before, with a file in the last."""
    save = root.hf(500)
    fd = os.open(save, os.O_RDONLY)
    for _ in range(1_500):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)
    yield SAVE
    subprocess.run(["rm", "-rf", save], check=True)  # pytest's own removal is recursive


@pytest.fixture(params=[1_024, 8_192])
def open_files(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many files a process may hold open: 1,024 is what most shells give."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < request.param:
        pytest.skip("the limit can't be raised so far")
    resource.setrlimit(resource.RLIMIT_NOFILE, (request.param, hard))
    yield request.param
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("open_files")
async def test_a_deep_tree_is_synced_and_deleted(root: Root, store: PosixStore, deep: str) -> None:
    """A save may be deeper than Python recurses, and deeper than files may be open at a time."""
    await store.sync(deep, recursive=True)
    await store.delete_tree(deep)
    assert not (root.path / deep).exists()


# Roots as people write them


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("/a/b", "/a/b"),
        ("/a/b/", "/a/b"),
        ("/a/b///", "/a/b"),
        ("/a//b", "/a//b"),
        ("/a/../b", "/a/../b"),
        ("/a/./b", "/a/./b"),
        ("/", ""),
        ("b", "{here}/b"),
        ("b/", "{here}/b"),
        ("./b", "{here}/./b"),
        ("../b", "{here}/../b"),
        (".", "{here}/."),
        ("~", "{here}/~"),
        ("lr=[1e-5]*?{{a,b}}$HOME", "{here}/lr=[1e-5]*?{{a,b}}$HOME"),
    ],
)
def test_a_root_is_made_absolute_and_otherwise_taken_as_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written: str, meant: str
) -> None:
    """`..` is the kernel's to resolve, nothing is expanded, and a trailing slash is no part of the name."""
    monkeypatch.chdir(tmp_path)
    assert absolute(written.format()) == meant.format(here=tmp_path)
    assert open_store(written.format()).root == meant.format(here=tmp_path)


async def test_the_file_system_s_own_root_may_be_a_root() -> None:
    """`/` is listed and named like any root."""
    store = PosixStore(absolute("/"))
    assert {entry.name for entry in await store.list("")} == set(os.listdir("/"))
    assert store.root == ""
    assert await store.locate("/tmp/x") == "tmp/x"


async def test_b24_brackets_and_stars_are_only_characters(tmp_path: Path) -> None:
    """Nothing in a path is a pattern: a sibling that a glob would match is left alone."""
    root = Root(tmp_path / "lr=[1e-5, 2e-5]*?{a,b}$HOME", attempt="a*[b]").make()
    sibling = Root(root.path, attempt="abb")
    saves = [root.hf(5), sibling.hf(5)]
    store = PosixStore(str(root.path))
    await store.delete_tree(f"exec/{root.attempt}/checkpoint-5")
    assert [save.exists() for save in saves] == [False, True]


LOCATED = [
    ("{root}/exec/1/x", "exec/1/x"),
    ("{root}/exec/1/x/", "exec/1/x"),
    ("{root}//exec/./1//x", "exec/1/x"),
    ("{root}/../root/exec/1/x", "exec/1/x"),
    ("{alias}/exec/1/x", "exec/1/x"),
    ("{root}/link/x", "link/x"),
    ("{root}/exec/1/../1/x", "exec/1/../1/x"),
    ("exec/1/x", "exec/1/x"),
    ("./x", "x"),
]


@pytest.mark.parametrize(("save", "key"), LOCATED)
async def test_a_save_is_located_by_the_root_s_identity(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, root: Root, store: PosixStore, save: str, key: str
) -> None:
    """The root is known by device and inode under any name; what lies below it is taken as written."""
    (root.path / "exec" / "1" / "x").mkdir(parents=True)
    (root.path / "link").symlink_to("exec/1")
    (tmp_path / "alias").symlink_to(root.path)
    monkeypatch.chdir(root.path)
    assert await store.locate(save.format(root=root.path, alias=tmp_path / "alias")) == key


@pytest.mark.parametrize("save", ["{root}", "{root}/", "{root}/.", "/", "", ".", "/nowhere/x", "{root}2/x"])
async def test_a_save_elsewhere_is_not_located(monkeypatch: pytest.MonkeyPatch, root: Root, store: PosixStore, save: str) -> None:
    """Neither the root itself, nor what is around or beside it, is a save."""
    monkeypatch.chdir(root.path)
    with pytest.raises(NotPublished):
        await store.locate(save.format(root=root.path))


async def test_a_name_limit_is_asked_of_the_file_system(root: Root, store: PosixStore) -> None:
    """The limit is that of the file system, before and after pub/ is made."""
    wanted = os.pathconf(root.path, "PC_NAME_MAX")
    assert await store.name_limit() == wanted
    await store.create(ENTRY)
    assert await store.name_limit() == wanted


async def test_kinds_of_all_things(root: Root, store: PosixStore, save: Path) -> None:
    """A listing tells files, folders, links and everything else apart."""
    for number, make in enumerate(NO_FILES.values()):
        make(root.path / str(number))
    kinds = {entry.name: entry.kind for entry in await store.list("")}
    wanted = [Kind.OTHER] * 3 + [Kind.FOLDER] + [Kind.LINK] * 4
    assert kinds == {"exec": Kind.FOLDER, **{str(number): kind for number, kind in enumerate(wanted)}}


async def test_a_cancelled_operation_runs_to_its_end(root: Root, store: PosixStore, save: Path) -> None:
    """An await that is given up leaves no half step: the deletion that had begun is finished unseen."""
    task = asyncio.create_task(store.delete_tree(SAVE))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    async with asyncio.timeout(20):
        while save.exists():
            await asyncio.sleep(0.01)


async def test_an_existing_entry_is_told_from_a_new_one(root: Root, store: PosixStore) -> None:
    """Exclusive creation holds between stores too: the second is told that it exists."""
    await store.create(ENTRY)
    before = root.tree()
    with pytest.raises(AlreadyExists):
        await PosixStore(str(root.path)).create(ENTRY)
    assert root.tree() == before


# Errors where nobody expects one


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
async def test_rule15_an_error_of_fstat_is_the_store_s(
    monkeypatch: pytest.MonkeyPatch, root: Root, store: PosixStore, number: int
) -> None:
    """Looking at a descriptor may fail on NFS like anything else."""
    root.hf(500)
    (root.path / "pub").mkdir()

    def failing(_: int) -> os.stat_result:
        raise OSError(number, os.strerror(number))

    for call in (store.create(ENTRY), store.move(ENTRY, RECORD), store.delete(ENTRY), store.delete_tree(SAVE)):
        with monkeypatch.context() as patch:
            patch.setattr("publishd.stores.posix.os.fstat", failing)
            with pytest.raises(StoreError):
                await call


async def test_an_error_of_close_after_reading_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, root: Root, store: PosixStore
) -> None:
    """A descriptor that was only read from has nothing to lose when it is closed."""
    root.hf(500)
    real = os.close

    def failing(fd: int) -> None:
        real(fd)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("publishd.stores.descriptors.os.close", failing)
    assert {child.name for child in await store.list(SAVE)} == {"model.safetensors", "trainer_state.json"}
    await store.sync(SAVE, recursive=True)
    await store.delete_tree(SAVE)
    assert not (root.path / SAVE).exists()


async def test_rule11_a_folder_made_anew_during_the_deletion_stays(
    monkeypatch: pytest.MonkeyPatch, root: Root, store: PosixStore, tmp_path: Path
) -> None:
    """The deletion goes through a descriptor of the folder that was there: one put in its place loses nothing."""
    save = root.hf(500)

    def replaced() -> None:
        save.rename(tmp_path / "old")
        root.hf(500)

    real = os.unlink
    calls = iter([replaced])

    def unlink(*arguments: Any, **options: Any) -> None:
        next(calls, lambda: None)()
        real(*arguments, **options)

    monkeypatch.setattr("publishd.stores.posix.os.unlink", unlink)
    assert await error_of(store.delete_tree(SAVE, ["trainer_state.json"]))
    assert sorted(os.listdir(save)) == ["model.safetensors", "trainer_state.json"]


async def test_rule2_a_save_that_is_a_link_is_synced_where_it_leads(
    monkeypatch: pytest.MonkeyPatch, root: Root, store: PosixStore, tmp_path: Path
) -> None:
    """A save published by hand through a link is made durable at the link's end."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "weights").touch()
    (root.path / "linked").symlink_to(tmp_path / "elsewhere")
    synced: list[str] = []

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr("publishd.stores.posix.os.fsync", fsync)
    await store.sync("linked", recursive=True)
    assert synced[:2] == [f"{tmp_path}/elsewhere/weights", f"{tmp_path}/elsewhere"]
