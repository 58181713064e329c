"""A file system that hangs for as long as a file stands: a shim under the command's own libc calls (LD_PRELOAD)."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from commands import require_program

if TYPE_CHECKING:
    from pathlib import Path

_SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void hang(const char *path) {
    const char *folder = getenv("HANG_FOLDER"), *flag = getenv("HANG_FLAG");
    if (folder && flag && !strncmp(path, folder, strlen(folder)))
        while (!access(flag, F_OK)) usleep(10000);
}
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
        hang(path); \
        return ((int (*)(const char *, int, ...)) dlsym(RTLD_NEXT, #name))(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
"""


def hanging(library: Path, folder: str, flag: str) -> dict[str, str]:
    """The variables with which a program's opens below `folder` (absolute) hang while the file `flag` stands.

    The library is made where it is not there yet.
    """
    if not library.exists():
        command = [require_program("gcc", "gcc"), "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(library), "-ldl"]
        subprocess.run(command, input=_SHIM, text=True, check=True)
    return {"LD_PRELOAD": str(library), "HANG_FOLDER": folder, "HANG_FLAG": flag}
