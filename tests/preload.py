"""A library to preload, which makes system calls fail, wait or kill, so that a fault comes at one exact instant."""

from __future__ import annotations

import atexit
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from commands import environment, eventually, require_program

_SOURCE = r"""
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name)) dlsym(RTLD_NEXT, #name))

/* FAULT_KILL_AT=N: SIGKILL in place of the N-th call that changes a folder. */
static void change(void)
{
    static atomic_int count;
    const char *at = getenv("FAULT_KILL_AT");
    if (at && atomic_fetch_add(&count, 1) + 1 == atoi(at))
        kill(getpid(), SIGKILL);
}

/* FAULT_WAIT_CALL, _AT, _FILE: at that call on a folder whose path ends so, make FILE.reached and wait for FILE.go, once. */
static void wait_at(const char *call, int fd)
{
    static atomic_int done;
    const char *wanted = getenv("FAULT_WAIT_CALL"), *at = getenv("FAULT_WAIT_AT"), *file = getenv("FAULT_WAIT_FILE");
    char link[64], path[4096], flag[4096];
    if (!wanted || !at || !file || strcmp(call, wanted))
        return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < (ssize_t) strlen(at))
        return;
    path[length] = 0;
    if (strcmp(path + length - strlen(at), at) || atomic_exchange(&done, 1))
        return;
    snprintf(flag, sizeof flag, "%s.reached", file);
    close(open(flag, O_WRONLY | O_CREAT, 0666));
    snprintf(flag, sizeof flag, "%s.go", file);
    while (access(flag, F_OK))
        usleep(5000);
}

/* FAULT_NO_RENAME: a file system that has neither link nor rename. */
static int no_rename(int number)
{
    if (!getenv("FAULT_NO_RENAME"))
        return 0;
    errno = number;
    return 1;
}

DIR *fdopendir(int fd)
{
    wait_at("fdopendir", fd);
    return NEXT(fdopendir)(fd);
}

int fsync(int fd)
{
    wait_at("fsync", fd);
    return NEXT(fsync)(fd);
}

int rename(const char *from, const char *to)
{
    return no_rename(ENOSYS) ? -1 : NEXT(rename)(from, to);
}

int renameat(int at, const char *from, int to_at, const char *to)
{
    change();
    return no_rename(ENOSYS) ? -1 : NEXT(renameat)(at, from, to_at, to);
}

int renameat2(int at, const char *from, int to_at, const char *to, unsigned flags)
{
    change();
    return no_rename(ENOSYS) ? -1 : NEXT(renameat2)(at, from, to_at, to, flags);
}

int link(const char *from, const char *to)
{
    return no_rename(EPERM) ? -1 : NEXT(link)(from, to);
}

int linkat(int at, const char *from, int to_at, const char *to, int flags)
{
    return no_rename(EPERM) ? -1 : NEXT(linkat)(at, from, to_at, to, flags);
}

int unlinkat(int at, const char *name, int flags)
{
    wait_at("unlinkat", at);
    change();
    return NEXT(unlinkat)(at, name, flags);
}

int mkdirat(int at, const char *name, mode_t mode)
{
    change();
    return NEXT(mkdirat)(at, name, mode);
}
"""


@cache
def _library() -> str:
    compiler = require_program("gcc", "gcc")
    folder = mkdtemp(prefix="publishd-preload-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = f"{folder}/faults.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, "-x", "c", "-", "-ldl"]
    subprocess.run(command, input=_SOURCE.encode(), check=True)
    return library


def faults(**settings: object) -> dict[str, str]:
    """The environment in which a command suffers these faults, such as `faults(kill_at=3)`."""
    changes = {f"FAULT_{name.upper()}": str(value) for name, value in settings.items()}
    return environment(LD_PRELOAD=_library(), PYTHONDONTWRITEBYTECODE="1", **changes)


class Pause:
    """The first call of its kind on a folder waits: run the command in `environment`, wait for `reached`, then `go_on`."""

    def __init__(self, call: str, at: Path, flag: Path) -> None:
        self._flag = flag
        self.environment = faults(wait_call=call, wait_at=at, wait_file=flag)

    def reached(self) -> None:
        eventually(Path(f"{self._flag}.reached").exists, "the pause")

    def go_on(self) -> None:
        Path(f"{self._flag}.go").touch()
