"""File systems in image files, and what a power cut would leave of them.

The image lies on a file system that clones files (XFS with reflinks), so that a copy of it is that of one instant, as the
disk has it then; what the kernel still keeps in memory is lost, as it would be.
"""

from __future__ import annotations

import subprocess
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

from commands import require

if TYPE_CHECKING:
    from collections.abc import Iterator

# Journals are written every second (ext4, btrfs) instead of every 5 to 30: a power cut is then soon a test.
KINDS = {
    "ext4": (["mkfs.ext4", "-q", "-F"], "commit=1", 64),
    "xfs": (["mkfs.xfs", "-q", "-f"], "", 320),
    "btrfs": (["mkfs.btrfs", "-q", "-f"], "commit=1", 160),
}


def _call(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


@contextmanager
def _mounted(image: Path, options: str = "") -> Iterator[Path]:
    """A loop mount that is gone at the end, even if something still uses it."""
    with tempfile.TemporaryDirectory(prefix="image-") as folder:
        _call("mount", "-o", ",".join(filter(None, ("loop", options))), image, folder)
        try:
            yield Path(folder)
        finally:
            _call("umount", "--lazy", folder)


class Disk:
    """A mounted file system of one kind."""

    def __init__(self, kind: str, host: Path) -> None:
        self.kind, self._host = kind, host
        self._image = host / f"{kind}.img"
        self._copies = 0
        make, self._options, size = KINDS[kind]
        with self._image.open("wb") as file:
            file.truncate(size << 20)
        _call(*make, self._image)

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        with _mounted(self._image, self._options) as folder:
            yield folder

    def cut(self) -> Path:
        """The disk as it is at this instant."""
        self._copies += 1
        copy = self._host / f"copy-{self._copies}.img"
        _call("cp", "--reflink=always", self._image, copy)
        return copy

    @contextmanager
    def after(self, copy: Path) -> Iterator[Path]:
        """What a mount after the power cut finds; the copy is gone at the end."""
        options = "nouuid" if self.kind == "xfs" else ""
        try:
            with _mounted(copy, options) as folder:
                yield folder
        finally:
            copy.unlink()


@contextmanager
def disk(kind: str) -> Iterator[Disk]:
    """A disk of that kind, in a folder of the temporary directory; a skip where there is no way to make one."""
    missing = [tool for tool in (KINDS[kind][0][0], "mkfs.xfs", "mount") if which(tool) is None]
    require("images", f"{', '.join(missing)} not installed" if missing else None)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disk-")))
        host = folder / "host.img"
        with host.open("wb") as file:
            file.truncate(2 << 30)
        _call("mkfs.xfs", "-q", "-f", "-m", "reflink=1", host)
        try:
            mounted = stack.enter_context(_mounted(host))
        except subprocess.CalledProcessError as error:
            require("images", f"no loop mounts here: {error.stderr.decode().strip()}")
            raise
        yield Disk(kind, mounted)
