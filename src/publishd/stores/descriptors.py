"""Errors, and walking folders by descriptors, on a POSIX file system.

Whoever walks by descriptors is never led astray by a link that somebody swaps in meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING, Self

from publishd.errors import (
    AlreadyExists,
    Denied,
    Linked,
    NoSpace,
    NotAFile,
    NotAFolder,
    NotFound,
    StoreError,
    Unavailable,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
"""How folders are opened; with O_NOFOLLOW where a link must not be followed."""

_OPEN_FOLDERS = 64

_ERRORS: dict[int, type[StoreError]] = {
    errno.ENOENT: NotFound,
    errno.EEXIST: AlreadyExists,
    errno.ENOTDIR: NotAFolder,
    errno.EISDIR: NotAFile,
    errno.ENXIO: NotAFile,
    errno.ELOOP: Linked,
    errno.EACCES: Denied,
    errno.EPERM: Denied,
    errno.EROFS: Denied,
    errno.ENOSPC: NoSpace,
    errno.EDQUOT: NoSpace,
}

_REMEDIES: dict[type[StoreError], str] = {
    Denied: "see its owner and mode, and those of the folders above",
    NoSpace: "free space, or raise the quota",
}


def _translate(what: str, path: str, error: OSError) -> StoreError:
    """The one place where errno becomes an error of ours; what it does not know is Unavailable."""
    kind = _ERRORS.get(error.errno or 0, Unavailable)
    return kind(what, path, error.strerror or str(error), _REMEDIES.get(kind, ""))


@contextlib.contextmanager
def translated(what: str, path: str) -> Iterator[None]:
    """Turn every OSError inside into a StoreError that says what could not be done to which path."""
    try:
        yield
    except OSError as error:
        raise _translate(what, path, error) from error


def close_read(fd: int) -> None:
    """Give back a descriptor that was only read from: what its close may fail with (NFS, FUSE) changes nothing."""
    with contextlib.suppress(OSError):
        os.close(fd)


class Place:
    """A descriptor of a folder and a name in it."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd, self.name = fd, name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the descriptor back."""
        close_read(self.fd)

    def replace(self, fd: int) -> None:
        """Step to another folder."""
        close_read(self.fd)
        self.fd = fd

    def is_taken(self) -> bool:
        """Whether anything stands under the name."""
        try:
            os.stat(self.name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True


class Folder:
    """A folder met by `folders_bottom_up`: its descriptor, which it takes over, its parent's, and its children."""

    def __init__(self, name: str, path: str, fd: int) -> None:
        self.name, self.path, self.fd, self.parent = name, path, fd, -1
        try:
            self.identity = _identity(fd)
            with os.scandir(fd) as scan:
                children = list(scan)
            self.folders = [child.name for child in children if child.is_dir(follow_symlinks=False)]
            self.others = [child for child in children if not child.is_dir(follow_symlinks=False)]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the descriptor back, if it is open."""
        if self.fd >= 0:
            close_read(self.fd)
            self.fd = -1

    def reopen(self, below: int) -> None:
        """Open again, as the parent of a folder in it, what was closed on the way down."""
        self.fd = os.open("..", FOLDER, dir_fd=below)
        if _identity(self.fd) != self.identity:
            raise OSError(errno.ESTALE, "it was moved meanwhile")


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def folders_bottom_up(parent: int, top: Folder, what: str, *, one_device: bool = False) -> Iterator[Folder]:
    """Each folder from the deepest up to `top`, which stands in `parent`, entered through descriptors only.

    No link is followed. `one_device`: raise Denied at a folder on another device than the parent's. A folder that
    vanished meanwhile is passed over. However deep they are, not many are open at a time; all are closed in the end.
    """
    device = os.fstat(parent).st_dev
    stack = [top]

    def enter(above: Folder, child: str) -> None:
        path = f"{above.path}/{child}"
        with translated(what, path), contextlib.suppress(FileNotFoundError):
            stack.append(Folder(child, path, os.open(child, FOLDER | os.O_NOFOLLOW, dir_fd=above.fd)))
            if one_device and stack[-1].identity[0] != device:
                raise Denied(what, path, "another file system is mounted here")
        if len(stack) > _OPEN_FOLDERS:
            stack[-1 - _OPEN_FOLDERS].close()

    try:
        while stack:
            inner = stack[-1]
            if inner.folders:
                enter(inner, inner.folders.pop())
                continue
            above = stack[-2] if len(stack) > 1 else None
            if above and above.fd < 0:
                with translated(what, above.path):
                    above.reopen(inner.fd)
            inner.parent = above.fd if above else parent
            yield inner
            stack.pop().close()
    finally:
        for folder in stack:
            folder.close()
