"""A checkpoint root in a folder of a shared POSIX file system.

Each operation is one synchronous function run in a thread. Folders are opened afresh each time, level by level: that is
what makes an NFS client ask its server. Whatever creates, moves or deletes walks from a descriptor of the root and
follows no link below it. Nothing is retried here: the callers' next scan or next run is the retry.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

from publishd.errors import (
    Denied,
    Linked,
    NotAFile,
    NotAFolder,
    NotFound,
    NotPublished,
    StoreError,
    SyncFailed,
    TooLarge,
    Unavailable,
    UsageError,
)
from publishd.stores import PRUNE, PUB, Entry, Finding, Kind
from publishd.stores.descriptors import FOLDER, Folder, Place, close_read, folders_bottom_up, translated

if TYPE_CHECKING:
    import builtins
    from collections.abc import AsyncGenerator, Callable, Collection

    from aiofiles.threadpool.binary import AsyncBufferedReader

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_PIECE = 1 << 20
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
# Some file systems have no fsync for a folder; any other failure of it is one (fsync(2), cockroachdb/cockroach#60477).
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
# Object stores behind FUSE have no rename, and pub/ and prune/ may lie on two metadata servers.
_NO_RENAME = {errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV}


def absolute(root: str) -> str:
    """The root as an absolute path, otherwise as written (`..` is the kernel's to resolve), without a trailing slash.

    Raises UsageError where the current folder, which a relative root needs, is gone.
    """
    try:
        return _from_current_folder(root).rstrip("/")
    except OSError as error:
        raise UsageError("bad flag", "-checkpoint", f"the current folder is gone: {error.strerror}") from error


def _from_current_folder(path: str) -> str:
    return path if path.startswith("/") else os.path.join(os.getcwd(), path)


class PosixStore:
    """See `publishd.stores.Store`; `root` is an absolute path."""

    consistent = False
    concurrency = 1  # threads would only wait for one another

    def __init__(self, root: str, *, sync: bool = True) -> None:
        self.root = root
        self._sync_wanted = sync
        self._closing: set[asyncio.Future[None]] = set()

    async def list(self, folder: str, prefix: str = "") -> list[Entry]:
        return await asyncio.to_thread(self._list, folder, prefix)

    async def exists(self, key: str) -> bool:
        return await asyncio.to_thread(self._exists, key)

    async def read(self, key: str, limit: int) -> bytes:
        async with self._open(key, limit) as file:
            with translated("cannot read", self._path(key)):
                content = await file.read(limit + 1)
        if len(content) > limit:
            raise TooLarge("cannot read", self._path(key), f"larger than {limit} bytes")
        return content

    async def stream(self, key: str) -> AsyncGenerator[bytes, None]:
        async with self._open(key) as file:
            with translated("cannot read", self._path(key)):
                while piece := await file.read(_PIECE):
                    yield piece

    async def create(self, key: str) -> None:
        await asyncio.to_thread(self._create, key)

    async def make_folder(self, folder: str) -> None:
        await asyncio.to_thread(self._make_folder, folder)

    async def move(self, key: str, to: str) -> None:
        await asyncio.to_thread(self._move, key, to)

    async def delete(self, key: str) -> None:
        await asyncio.to_thread(self._delete, key)

    async def delete_tree(self, key: str, first: Collection[str] = ()) -> None:
        await asyncio.to_thread(self._delete_tree, key, first)

    async def sync(self, key: str, *, recursive: bool) -> None:
        if self._sync_wanted:
            await asyncio.to_thread(self._sync, key, recursive)

    async def locate(self, save: str) -> str:
        return await asyncio.to_thread(self._locate, save)

    async def name_limit(self) -> int:
        return await asyncio.to_thread(self._name_limit)

    async def diagnose(self) -> builtins.list[Finding]:
        from publishd.stores.filesystem import diagnose

        return await asyncio.to_thread(diagnose, self._path(""))

    async def aclose(self) -> None:
        pass

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}" if key else self.root or "/"

    # Reading

    def _list(self, folder: str, prefix: str = "") -> builtins.list[Entry]:
        fd = self._open_folder(folder)
        try:
            # NFSv3 tells that a folder changed by its time alone; what changed twice within a tick of the server's clock
            # stays hidden for good behind a listing made in between. This drops the client's copy of it; elsewhere it is nothing.
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            with translated("cannot list", self._path(folder)), os.scandir(fd) as children:
                return [
                    Entry(child.name, kind, child.inode())
                    for child in children
                    if child.name.startswith(prefix) and (kind := _kind(child))
                ]
        finally:
            close_read(fd)

    def _open_folder(self, folder: str) -> int:
        """Open root and folders one by one, following links except where publishd's own folders should be."""
        path = self.root
        with translated("cannot list", path or "/"):
            fd = os.open(path or "/", FOLDER)
        for name in folder.split("/") if folder else ():
            flags = FOLDER | os.O_NOFOLLOW if path == self.root and name in (PUB, PRUNE) else FOLDER
            path = f"{path}/{name}"
            try:
                with translated("cannot list", path):
                    below = os.open(name, flags, dir_fd=fd)
            finally:
                close_read(fd)
            fd = below
        return fd

    def _exists(self, key: str) -> bool:
        try:
            with translated("cannot look for", self._path(key)):
                os.stat(self._path(key), follow_symlinks=False)
        except (NotFound, NotAFolder):
            return False
        return True

    @contextlib.asynccontextmanager
    async def _open(self, key: str, limit: int | None = None) -> AsyncGenerator[AsyncBufferedReader, None]:
        import aiofiles

        path = self._path(key)
        with translated("cannot read", path):
            file = await aiofiles.open(path, "rb", opener=_guard(limit))
        cancelled = False
        try:
            yield file
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            closing = asyncio.ensure_future(file.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closed)
            if not cancelled:  # a read that hangs holds the file, and closing waits for it: nobody else may
                await asyncio.wait([closing])

    def _closed(self, closing: asyncio.Future[None]) -> None:
        self._closing.discard(closing)
        if not closing.cancelled():
            closing.exception()  # taken note of, and no more: what was read was read

    def _name_limit(self) -> int:
        """PC_NAME_MAX of `pub/`, or of the root as long as there is no `pub/`."""
        try:
            fd = self._open_folder(PUB)
        except NotFound:
            fd = self._open_folder("")
        try:
            with translated("cannot ask for the name limit of", self._path(PUB)):
                return os.fpathconf(fd, "PC_NAME_MAX")
        finally:
            close_read(fd)

    def _locate(self, save: str) -> str:
        with translated("cannot use the root", self._path("")):
            root = os.stat(self._path(""))
        with translated("cannot find the save", save):
            parts = [part for part in _from_current_folder(save).split("/") if part not in ("", ".")]
        unseen = None
        for depth in range(len(parts) - 1, -1, -1):
            above = "/" + "/".join(parts[:depth])
            try:
                with translated("cannot find the save", above):
                    ancestor = os.stat(above)
            except (NotFound, NotAFolder):
                continue
            except StoreError as error:  # it may have been the root
                unseen = unseen or error
                continue
            if (ancestor.st_dev, ancestor.st_ino) == (root.st_dev, root.st_ino):
                return "/".join(parts[depth:])
        if unseen:
            raise unseen
        cause = f"it does not lie below the checkpoint root {self._path('')}"
        raise NotPublished("cannot publish", "/" + "/".join(parts), cause, "a relative SAVE is taken from the current folder")

    # Creating, moving, deleting: from a descriptor of the root, following no link below it

    def _enter(self, key: str, what: str, *, make: bool = False) -> Place:
        """Open the folder that holds the key. Raises NotFound or NotAFolder where that is missing, Linked at a link."""
        *folders, name = key.split("/")
        try:
            with translated(what, self._path("")):
                place = Place(os.open(self._path(""), FOLDER), name)
        except NotFound as error:
            raise Unavailable(what, self._path(""), f"the root is gone: {error.cause}") from error
        path = self.root
        try:
            with translated(what, self._path("")):
                device = os.fstat(place.fd).st_dev
            for folder in folders:
                path = f"{path}/{folder}"
                with translated(what, path):
                    place.replace(_step_down(place.fd, folder, path, make=make, sync=self._sync_wanted))
                    if os.fstat(place.fd).st_dev != device:
                        raise Denied(what, path, "another file system is mounted here")
        except BaseException:
            place.close()
            raise
        return place

    def _create(self, key: str) -> None:
        path = self._path(key)
        with self._enter(key, "cannot create", make=True) as folder, translated("cannot create", path):
            try:
                fd = os.open(folder.name, _NEW_FILE | os.O_EXCL, 0o666, dir_fd=folder.fd)
            except FileExistsError:
                if not stat.S_ISREG(os.stat(folder.name, dir_fd=folder.fd, follow_symlinks=False).st_mode):
                    raise NotAFile("cannot create", path, "something that is not a regular file stands there") from None
                # Whoever created it may have died before it was durable.
                if self._sync_wanted:
                    _sync_folder(folder.fd, os.path.dirname(path))
                raise
            try:
                try:
                    if self._sync_wanted:
                        _sync_file(fd, path)
                finally:
                    os.close(fd)
                if self._sync_wanted:
                    _sync_folder(folder.fd, os.path.dirname(path))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(folder.name, dir_fd=folder.fd)
                raise

    def _make_folder(self, folder: str) -> None:
        path = self.root
        for name in folder.split("/"):
            path = f"{path}/{name}"
            with translated("cannot make", path), contextlib.suppress(FileExistsError):
                os.mkdir(path)
        close_read(self._open_folder(folder))

    def _move(self, key: str, to: str) -> None:
        with (
            self._enter(to, "cannot record", make=True) as new,
            self._enter(key, "cannot withdraw") as old,
            translated("cannot withdraw", self._path(key)),
        ):
            try:
                os.rename(old.name, new.name, src_dir_fd=old.fd, dst_dir_fd=new.fd)
            except FileNotFoundError:
                # A rename whose answer was lost is sent again by NFS, and then finds nothing (measured on ganesha).
                if not new.is_taken():
                    raise
            except OSError as error:
                if error.errno not in _NO_RENAME:
                    raise
                os.stat(old.name, dir_fd=old.fd, follow_symlinks=False)
                os.close(os.open(new.name, _NEW_FILE, 0o666, dir_fd=new.fd))
                os.unlink(old.name, dir_fd=old.fd)

    def _delete(self, key: str) -> None:
        try:
            place = self._enter(key, "cannot delete")
        except (NotFound, NotAFolder):
            return
        with place, translated("cannot delete", self._path(key)), contextlib.suppress(FileNotFoundError):
            os.unlink(place.name, dir_fd=place.fd)

    def _delete_tree(self, key: str, first: Collection[str]) -> None:
        path = self._path(key)
        try:
            place = self._enter(key, "cannot delete")
        except (NotFound, NotAFolder):
            return
        with place, translated("cannot delete", path), contextlib.suppress(FileNotFoundError):
            found = os.stat(place.name, dir_fd=place.fd, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                raise Linked("cannot delete", path, "it is a symbolic link")
            if stat.S_ISDIR(found.st_mode):
                _remove_folder(place, path, first)
            else:
                os.unlink(place.name, dir_fd=place.fd)

    # Durability

    def _sync(self, key: str, recursive: bool) -> None:
        """Sync the save's files, its folders bottom-up, then each parent up to the root; links inside are left alone."""
        *folders, name = key.split("/")
        path = self._path(key)
        parent = self._open_folder("/".join(folders))
        try:
            with translated("cannot sync", path):
                is_folder = stat.S_ISDIR(os.stat(name, dir_fd=parent).st_mode)
                fd = os.open(name, FOLDER if is_folder else _FILE & ~os.O_NOFOLLOW, dir_fd=parent)
                if is_folder and recursive:
                    _sync_tree(parent, Folder(name, path, fd))
                else:
                    try:
                        (_sync_folder if is_folder else _sync_file)(fd, path)
                    finally:
                        close_read(fd)
        finally:
            close_read(parent)
        for depth in range(len(folders), -1, -1):
            folder = "/".join(folders[:depth])
            fd = self._open_folder(folder)
            try:
                _sync_folder(fd, self._path(folder))
            finally:
                close_read(fd)


def _kind(child: os.DirEntry[str]) -> Kind | None:
    """What a name stands for; None where it went while it was listed, as only a look beyond the listing can tell."""
    if child.is_file(follow_symlinks=False):
        return Kind.FILE
    if child.is_dir(follow_symlinks=False):
        return Kind.FOLDER
    if child.is_symlink():
        return Kind.LINK
    try:
        child.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return Kind.OTHER


def _guard(limit: int | None) -> Callable[[str, int], int]:
    """An opener that neither waits for nor follows anything, and gives up what is not a regular file of at most `limit` bytes."""

    def opener(path: str, _flags: int) -> int:
        try:
            fd = os.open(path, _FILE)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise NotAFile("cannot read", path, "not a regular file") from error
            raise
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise NotAFile("cannot read", path, "not a regular file")
            if limit is not None and found.st_size > limit:
                raise TooLarge("cannot read", path, f"larger than {limit} bytes")
        except BaseException:
            os.close(fd)
            raise
        return fd

    return opener


def _step_down(fd: int, name: str, path: str, *, make: bool, sync: bool) -> int:
    """Open one folder below `fd`, never through a link; with `make`, make it where it is missing."""
    try:
        return os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=fd)
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            raise Linked("will not go through", path, "it is a symbolic link") from None
        raise
    except FileNotFoundError:
        if not make:
            raise
    # prune/ comes first: a prune on a full disk needs it to stand already.
    for wanted in (PRUNE, PUB) if name == PUB else (name,):
        with contextlib.suppress(FileExistsError):
            os.mkdir(wanted, dir_fd=fd)
    if sync:
        _sync_folder(fd, os.path.dirname(path))
    return os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=fd)


def _remove_folder(place: Place, path: str, first: Collection[str]) -> None:
    """Delete what this folder holds, through a descriptor of it: never what is made under its name meanwhile."""
    top = Folder(place.name, path, os.open(place.name, FOLDER | os.O_NOFOLLOW, dir_fd=place.fd))
    try:
        if top.identity[0] != os.fstat(place.fd).st_dev:
            raise Denied("cannot delete", path, "another file system is mounted here")
        for name in first:
            with translated("cannot delete", f"{path}/{name}"), contextlib.suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(name, dir_fd=top.fd)
    except BaseException:
        top.close()
        raise
    for inside in folders_bottom_up(place.fd, top, "cannot delete", one_device=True):
        for child in inside.others:
            with translated("cannot delete", f"{inside.path}/{child.name}"), contextlib.suppress(FileNotFoundError):
                os.unlink(child.name, dir_fd=inside.fd)
        with translated("cannot delete", inside.path), contextlib.suppress(FileNotFoundError):
            os.rmdir(inside.name, dir_fd=inside.parent)


def _sync_tree(parent: int, top: Folder) -> None:
    for inside in folders_bottom_up(parent, top, "cannot sync"):
        for child in inside.others:
            if child.is_file(follow_symlinks=False):
                _sync_child(child.name, inside)
        _sync_folder(inside.fd, inside.path)


def _sync_child(name: str, folder: Folder) -> None:
    path = f"{folder.path}/{name}"
    with translated("cannot sync", path), contextlib.suppress(FileNotFoundError):
        fd = os.open(name, _FILE, dir_fd=folder.fd)
        try:
            _sync_file(fd, path)
        finally:
            close_read(fd)


def _sync_file(fd: int, path: str) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        raise SyncFailed("cannot sync", path, error.strerror or str(error)) from error


def _sync_folder(fd: int, path: str) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise SyncFailed("cannot sync", path, error.strerror or str(error)) from error
