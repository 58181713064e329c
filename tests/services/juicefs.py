"""Two clients of one JuiceFS volume: two mounts of a shared file system with caches of their own, as on two nodes."""

from __future__ import annotations

import os
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from commands import eventually, require
from services.programs import Program, free_ports, installed

if TYPE_CHECKING:
    from collections.abc import Iterator


def _why_not() -> str | None:
    if os.geteuid():
        return "only root may mount"
    return None if Path("/dev/fuse").exists() else "there is no /dev/fuse"


@contextmanager
def two_clients() -> Iterator[tuple[Path, Path]]:
    """The mount points of both. Names that one makes the other lists at once; other things it may cache for a second."""
    require("juicefs", _why_not())
    juicefs = installed("juicefs")
    with tempfile.TemporaryDirectory(prefix="juicefs-") as name:
        folder = Path(name)
        database = f"sqlite3://{folder / 'meta.db'}"
        make = ["format", "--storage", "file", "--bucket", f"{folder / 'objects'}/", "--trash-days", "0", "--no-update"]
        subprocess.run([juicefs, *make, database, "volume"], check=True, capture_output=True, timeout=60)
        mounts, programs = [], []
        try:
            for client, port in zip("ab", free_ports(2), strict=True):
                mount, log = folder / client, folder / f"log-{client}"
                mount.mkdir()
                log.mkdir()
                options = ["--no-usage-report", "--no-syslog", "--backup-meta", "0", "--metrics", f"127.0.0.1:{port}"]
                options += ["--cache-dir", str(folder / f"cache-{client}")]
                programs.append(Program([juicefs, "mount", *options, database, str(mount)], log))
                mounts.append(mount)
            for mount, program in zip(mounts, programs, strict=True):
                eventually(lambda m=mount, p=program: m.is_mount() or p.ended, "a mount")  # type: ignore[misc]
                assert mount.is_mount(), program.log
            yield mounts[0], mounts[1]
        finally:
            for mount in mounts:
                subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)
            for program in programs:
                program.stop(grace=5)
