"""What `publishd probe` can tell of a file system.

Which types and mount options weaken what publishd promises comes from the semantics their makers document (tmpfs(5),
nfs(5), mountpoint-s3's SEMANTICS.md, s3fs-fuse's limitations); `docs/reference.md`, probe, says what to do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
import uuid
from typing import TYPE_CHECKING, NamedTuple

from publishd.errors import StoreError, printable
from publishd.stores import PRUNE, PUB, Finding, Verdict
from publishd.stores.descriptors import FOLDER, close_read, translated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_GIB = 1 << 30
_FEW_INODES = 10_000
_CLOCK_SECONDS = 2.0  # FAT counts in steps of two
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}

_MEMORY = "it is this node's memory: no other node sees it, and a restart empties it"
_LAYER = "it is a container's own layer: no other node sees it, and it goes with the container"
_FAT = "it has no journal: a crash may damage what was synced, and no permissions protect it"
_OBJECTS = "it is an object store mounted as a folder: two nodes may both create one name; use an s3:// root where you can"
_WEAK = {
    **dict.fromkeys(("tmpfs", "ramfs"), _MEMORY),
    **dict.fromkeys(("overlay", "aufs"), _LAYER),
    **dict.fromkeys(("msdos", "vfat", "exfat"), _FAT),
    **dict.fromkeys(
        (
            "fuse.mountpoint-s3",
            "fuse.s3fs",
            "fuse.goofys",
            "fuse.geesefs",
            "fuse.rclone",
            "fuse.gcsfuse",
            "fuse.blobfuse",
            "fuse.blobfuse2",
        ),
        _OBJECTS,
    ),
}
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "bcachefs"}


class Mount(NamedTuple):
    """A line of /proc/self/mountinfo (proc(5)): type and source of a file system, where it is mounted, and how."""

    type: str
    source: str
    point: str
    options: frozenset[str]


def diagnose(root: str) -> list[Finding]:
    """One finding per check of the file system that holds the root; what cannot be checked is a finding, never an error.

    A file of a fresh random name stands in the root for a moment.
    """
    try:
        with translated("cannot open", root):
            fd = os.open(root, FOLDER)
    except StoreError as error:
        return [Finding("file system", Verdict.FAIL, str(error))]
    try:
        return [
            _checked("file system", lambda: _file_system(fd)),
            _checked("folders", lambda: _own_folders(fd, root)),
            _checked("free space", lambda: _free_space(fd)),
            _checked("free inodes", lambda: _free_inodes(fd)),
            *_fresh_file(fd, root),
        ]
    finally:
        close_read(fd)


def _checked(check: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except OSError as error:
        return Finding(check, Verdict.WARN, f"could not be looked at: {error.strerror or error}")


# The mount


def _file_system(fd: int) -> Finding:
    mount = mounted(fd)
    where = printable(f"{mount.type}, mounted at {mount.point}")
    reasons = list(weaknesses(mount))
    if reasons:
        return Finding("file system", Verdict.WARN, f"{where}: {'; '.join(reasons)}")
    return Finding("file system", Verdict.OK, f"{where}{': only this node sees it' if mount.type in _LOCAL else ''}")


def weaknesses(mount: Mount) -> Iterator[str]:
    """Why publishd's promises are weaker on such a mount."""
    for name in (mount.type, f"{mount.type}.{mount.source}"):
        if name in _WEAK:
            yield _WEAK[name]
    if mount.type in ("nfs", "nfs4") and "nocto" in mount.options:
        yield "nocto: what other nodes publish or delete is seen late, or not at all; mount it without"
    if "ro" in mount.options:
        yield "it is mounted read-only: nothing can be published or pruned"


def mounted(fd: int) -> Mount:
    """The mount through which a file was opened. Raises OSError where the kernel does not tell."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as lines:
        identity = next((line.split()[1] for line in lines if line.startswith("mnt_id:")), "")
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            if line.startswith(f"{identity} "):
                return parse_mount(line)
    raise OSError(0, "the kernel does not tell which mount it is")


def parse_mount(line: str) -> Mount:
    """One line of mountinfo: its fields, a variable number of tags, ` - `, then type, source and the file system's options."""
    here, _, there = line.partition(" - ")
    _, _, _, _, point, options = here.split(" ")[:6]
    kind, source, more = there.rstrip("\n").split(" ", 2)
    return Mount(kind, _unescaped(source), _unescaped(point), frozenset(f"{options},{more}".split(",")))


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _own_folders(fd: int, root: str) -> Finding:
    """Whether `pub/` and `prune/`, where they are there, are folders of this file system that this user may write to."""
    device = os.fstat(fd).st_dev
    for name in (PUB, PRUNE):
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            flaw = _flaw(found, device, writable=_writable(name, fd))
            if flaw:
                return Finding("folders", Verdict.FAIL, printable(f"{root}/{name}: {flaw}"))
    return Finding("folders", Verdict.OK, f"{PUB}/ and {PRUNE}/, where they are there, can be written")


def _flaw(found: os.stat_result, device: int, *, writable: bool) -> str:
    if not stat.S_ISDIR(found.st_mode):
        return "it is a symbolic link, which is not followed" if stat.S_ISLNK(found.st_mode) else "it is not a folder"
    if found.st_dev != device:
        return "another file system is mounted here, so that nothing can be moved between pub/ and prune/"
    return "" if writable else "this user may not write there: see its owner and mode"


def _writable(name: str, fd: int) -> bool:
    return os.access(name, os.R_OK | os.W_OK | os.X_OK, dir_fd=fd, effective_ids=True)


# Room


def _free_space(fd: int) -> Finding:
    status = os.statvfs(fd)
    if not status.f_blocks:
        return Finding("free space", Verdict.OK, "the file system does not say")
    free = status.f_bavail * status.f_frsize
    if free < _GIB:
        return Finding("free space", Verdict.WARN, f"{free / _GIB:.2f} GiB, which few saves fit into")
    return Finding("free space", Verdict.OK, f"{free / _GIB:,.1f} GiB (a quota may allow less)")


def _free_inodes(fd: int) -> Finding:
    status = os.statvfs(fd)
    if not status.f_files:
        return Finding("free inodes", Verdict.OK, "the file system has no limit, or does not say")
    verdict = Verdict.WARN if status.f_favail < _FEW_INODES else Verdict.OK
    return Finding("free inodes", verdict, f"{status.f_favail:,} (each file, folder and entry needs one)")


# Durability and time


def _fresh_file(fd: int, root: str) -> list[Finding]:
    """fsync, and the file system's clock, by a file that is removed again."""
    name = f"probe-{uuid.uuid4()}"
    path = f"{root.rstrip('/')}/{name}"
    try:
        with translated("cannot create", path):
            before = time.time()
            file = os.open(name, _NEW_FILE, 0o666, dir_fd=fd)
    except StoreError as error:
        return [Finding("fsync", Verdict.WARN, f"could not be tried: {error}")]
    try:
        try:
            with translated("cannot write", path):
                os.write(file, b"publishd")
            with translated("cannot sync", path):
                os.fsync(file)
            with translated("cannot look at", path):
                clock = _clock(before, os.fstat(file).st_mtime, time.time())
            return [_folder_sync(fd), clock]
        finally:
            close_read(file)
            with translated("left behind", path):
                os.unlink(name, dir_fd=fd)
    except StoreError as error:
        return [Finding("fsync", Verdict.FAIL, str(error))]


def _folder_sync(fd: int) -> Finding:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno in _NO_FOLDER_SYNC:
            detail = "a file was synced; folders can't be here, so that a crash may lose the latest entries"
            return Finding("fsync", Verdict.WARN, detail)
        return Finding("fsync", Verdict.FAIL, f"a file was synced, but not the root: {error.strerror}")
    return Finding("fsync", Verdict.OK, "a file and its folder were synced")


def _clock(before: float, stamped: float, after: float) -> Finding:
    """How far the clock that stamps files is from this node's; nothing of publishd depends on it."""
    seconds = min(stamped - before, 0) or max(stamped - after, 0)
    if abs(seconds) > _CLOCK_SECONDS:
        order = "ahead of" if seconds > 0 else "behind"
        detail = f"new files are stamped {abs(seconds):.0f} s {order} this node's clock: mind that where you compare times"
        return Finding("clock", Verdict.WARN, detail)
    return Finding("clock", Verdict.OK, f"new files are stamped within {_CLOCK_SECONDS:g} s of this node's clock")
