"""A file system that fails, hangs or dawdles on demand: a shim under the command's own libc calls (LD_PRELOAD)."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from commands import environment, require_program

if TYPE_CHECKING:
    from pathlib import Path

_SHIM = r"""
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int told(const char *call, const char *path) {
    static int met;
    const char *effect = getenv("FAULT_EFFECT"), *times = getenv("FAULT_TIMES"), *wanted = getenv("FAULT_PATH");
    size_t length = strlen(path), least = wanted ? strlen(wanted) : 0;
    if (!effect || strcmp(call, getenv("FAULT_CALL")) || length < least || strcmp(path + length - least, wanted)) return 0;
    if (__sync_fetch_and_add(&met, 1) >= atoi(times)) return 0;
    if (!strncmp(effect, "wait ", 5)) { usleep(1000 * atoi(effect + 5)); return 0; }
    return errno = atoi(effect);
}

static int told_fd(const char *call, int fd) {
    char link[64], path[4096];
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (length < 0) return 0;
    path[length] = 0;
    return told(call, path);
}

#define REAL(name, ...) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))(__VA_ARGS__)
#define MODE va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest)

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        MODE; \
        return told("open", path) ? -1 : REAL(name, path, flags, mode); \
    }
#define OPENAT(name) \
    int name(int at, const char *path, int flags, ...) { \
        MODE; \
        return told("open", path) ? -1 : REAL(name, at, path, flags, mode); \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
ssize_t read(int fd, void *into, size_t size) { return told_fd("read", fd) ? -1 : REAL(read, fd, into, size); }
int fsync(int fd) { return told_fd("fsync", fd) ? -1 : REAL(fsync, fd); }
struct dirent *readdir(DIR *folder) { return told_fd("readdir", dirfd(folder)) ? 0 : REAL(readdir, folder); }
struct dirent64 *readdir64(DIR *folder) { return told_fd("readdir", dirfd(folder)) ? 0 : REAL(readdir64, folder); }
"""

FOREVER = "wait 3600000"


def faulty(where: Path, call: str, path: str, effect: int | str, *, times: int = 1_000_000) -> dict[str, str]:
    """The environment of a command in which the first `times` calls on names that end in `path` go wrong.

    `call` is open, read, fsync or readdir; `effect` an errno, or `wait MILLISECONDS`.
    """
    library = where / "faulty.so"
    if not library.exists():
        compiler = require_program("gcc", "gcc")
        command = [compiler, "-shared", "-fPIC", "-w", "-O1", "-x", "c", "-", "-o", os.fspath(library), "-ldl"]
        subprocess.run(command, input=_SHIM, text=True, check=True)
    fault = {"FAULT_CALL": call, "FAULT_PATH": path, "FAULT_EFFECT": str(effect), "FAULT_TIMES": str(times)}
    return environment(LD_PRELOAD=os.fspath(library), **fault)
