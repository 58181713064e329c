"""A child that waits while it is no longer the program it was forked from, and not yet the one it becomes (LD_PRELOAD)."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Literal

from commands import environment, eventually, require_program

if TYPE_CHECKING:
    from pathlib import Path

_SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void pause_at(const char *call) {
    const char *wanted = getenv("PAUSE_CALL"), *file = getenv("PAUSE_FILE");
    char name[4096];
    if (!wanted || !file || strcmp(wanted, call)) return;
    snprintf(name, sizeof name, "%s.pid", file);
    FILE *pid = fopen(name, "w");
    fprintf(pid, "%d\n", getpid());
    fclose(pid);
    snprintf(name, sizeof name, "%s.go", file);
    while (access(name, F_OK)) usleep(5000);
}

pid_t fork(void) {
    pid_t child = ((__typeof__(&fork)) dlsym(RTLD_NEXT, "fork"))();
    if (!child) pause_at("fork");
    return child;
}

int execve(const char *path, char *const argv[], char *const envp[]) {
    pause_at("execve");
    return ((__typeof__(&execve)) dlsym(RTLD_NEXT, "execve"))(path, argv, envp);
}
"""


class PausedStart:
    """Whatever `publishd run` starts in `environment` waits just after its fork, or just before its execve, until `go_on`."""

    def __init__(self, call: Literal["fork", "execve"], folder: Path) -> None:
        library = folder / "paused_start.so"
        command = [require_program("gcc", "gcc"), "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(library), "-ldl"]
        subprocess.run(command, input=_SHIM, text=True, check=True)
        self._file = folder / "start"
        self.environment = environment(LD_PRELOAD=str(library), PAUSE_CALL=call, PAUSE_FILE=str(self._file))

    def reached(self) -> int:
        """Wait until the child waits; its process."""
        return int(eventually(lambda: (pid := self._file.with_suffix(".pid")).exists() and pid.read_text().strip(), "the child"))

    def go_on(self) -> None:
        self._file.with_suffix(".go").touch()
