"""Roots to measure on, and the command as a process."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from commands import PUBLISHD, Root, environment

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PUBLISHD", "Root", "environment", "peer_program", "root", "saves"]

PEERS = Path(__file__).parent.parent / ".venv-peers" / "bin"
PYTHON = sys.executable


@contextmanager
def root() -> Iterator[Root]:
    """An empty root, in TMPDIR."""
    folder = Path(tempfile.mkdtemp(prefix="publishd-bench-"))
    try:
        yield Root(folder / "root").make()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def saves(into: Root, count: int, *, published: bool = True, files: int = 0, size: int = 1024) -> None:
    """Complete saves of steps 1 to `count`, with so many files beside the marker."""
    for step in range(1, count + 1):
        save = into.execution / f"checkpoint-{step}"
        save.mkdir(parents=True)
        (save / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        for number in range(files):
            (save / f"shard-{number:05}").write_bytes(b"\0" * size)
    if published:
        entries(into, count)


def entries(into: Root, count: int) -> None:
    """Entries of such saves, whether they are there or not."""
    from publishd.publications import Publication

    (into.path / "prune").mkdir(exist_ok=True)
    (into.path / "pub").mkdir(exist_ok=True)
    for step in range(1, count + 1):
        name = Publication(1_000_000, step, f"exec/{into.attempt}/checkpoint-{step}").name
        os.close(os.open(into.path / "pub" / name, os.O_CREAT | os.O_EXCL, 0o644))


def peer_program(name: str) -> str | None:
    """A program of the peers, if it is installed."""
    found = PEERS / name
    return str(found) if found.exists() else shutil.which(name)
