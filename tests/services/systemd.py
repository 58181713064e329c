"""A real systemd as PID 1 of namespaces of its own: nothing of the host's boot, and nothing of it stays.

Its root is an overlay over the host's, with all writes in a tmpfs; units are read from one folder only, so that none of the
host's starts. The network is the host's.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import publishd
from commands import eventually, require
from services.programs import Program

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOTS = "/srv/roots"
"""Where the folder of checkpoint roots is seen inside."""
_UNITS = "/run/units"
_SYSTEMD = Path("/lib/systemd/systemd")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# $1 is a folder for mounts, $2 the folder of roots, $3 the base of this Python, $4 its packages, $5 the source.
_BOOT = f"""
set -eu
PATH={_PATH}
mount --make-rprivate /
mount -t tmpfs -o mode=755,size=1g tests "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
R=$1/root
mount -t proc proc "$R/proc"
mount -t sysfs -o ro sysfs "$R/sys"
mount -t cgroup2 cgroup2 "$R/sys/fs/cgroup"
mount --bind /dev "$R/dev"
mount --bind /dev/pts "$R/dev/pts"
mount --bind /dev/shm "$R/dev/shm"
mount -t tmpfs -o mode=755,size=128m run "$R/run"
mount -t tmpfs -o mode=1777,size=128m tmp "$R/tmp"
see() {{ mkdir -p "$R$2"; mount --bind "$1" "$R$2"; }}
see "$2" {ROOTS}
see "$3" /opt/python
see "$4" /opt/publishd/packages
see "$5" /opt/publishd/source
mkdir -p "$R/opt/publishd/bin" "$R/etc/publishd" "$R{_UNITS}/tests.target.wants" "$R/.old" "$R/run/lock"
cat >"$R/opt/publishd/bin/publishd" <<'PROGRAM'
#!/bin/sh
export PYTHONPATH=/opt/publishd/source:/opt/publishd/packages LD_LIBRARY_PATH=/opt/python/lib
exec /opt/python/bin/python{sys.version_info.major}.{sys.version_info.minor} -m publishd "$@"
PROGRAM
chmod 755 "$R/opt/publishd/bin/publishd"
echo 'publishd:x:4711:4711::/:/usr/sbin/nologin' >>"$R/etc/passwd"
echo 'alice:x:4712:4712::/:/usr/sbin/nologin' >>"$R/etc/passwd"
printf 'publishd:x:4711:\\nalice:x:4712:\\n' >>"$R/etc/group"
for target in tests sysinit basic shutdown local-fs umount final timers paths sockets slices network network-online \\
    remote-fs multi-user; do
    printf '[Unit]\\nDefaultDependencies=no\\n' >"$R{_UNITS}/$target.target"
done
journal=systemd-journald
for unit in $journal.service $journal.socket $journal-dev-log.socket; do
    sed -e '/^\\(Wants\\|After\\|Before\\|Requires\\|Conflicts\\|Sockets\\)=/d' -e '/^Watchdog/d' \\
        "/lib/systemd/system/$unit" >"$R{_UNITS}/$unit"
done
echo "Sockets=$journal.socket $journal-dev-log.socket" >"$R/run/sockets"
sed -i "/^\\[Service\\]/r $R/run/sockets" "$R{_UNITS}/$journal.service"
ln -s ../$journal.service "$R{_UNITS}/tests.target.wants/"
echo 0123456789abcdef0123456789abcdef >"$R/etc/machine-id"
rm -rf "$R/var/log/journal"
cd "$R"
pivot_root . .old
cd /
umount -l /.old
rmdir /.old
mount --make-rshared / # as after a real boot: credentials reach a unit by propagation
exec env -i container=tests PATH={_PATH} SYSTEMD_UNIT_PATH={_UNITS} \\
    {_SYSTEMD} --system --unit=tests.target --show-status=no --log-target=journal
"""


class System:
    """A booted systemd. Units and files are put into it from outside, commands run inside."""

    def __init__(self, process: int, roots: Path) -> None:
        self.roots = roots
        """The folder of checkpoint roots, as this process sees it."""
        self._process = process
        self.inside = Path(f"/proc/{process}/root")
        """Its root, as this process sees it."""

    def call(self, *command: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
        """Run a command inside; it may fail."""
        enter = ("nsenter", f"--target={self._process}", "--all", "--")
        environ = ("env", "-i", f"PATH={_PATH}", "SYSTEMD_PAGER=", "SYSTEMD_COLORS=0")
        return subprocess.run(
            [*enter, *environ, *command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
        )

    def systemctl(self, *arguments: str, timeout: float = 90) -> str:
        """What systemctl prints; it must succeed."""
        ran = self.call("systemctl", *arguments, timeout=timeout)
        assert ran.returncode == 0, f"systemctl {arguments}: {ran.stdout}{ran.stderr}"
        return ran.stdout

    def write(self, path: str, content: str, mode: int = 0o644) -> None:
        """Put a file inside."""
        file = Path(f"{self.inside}{path}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        file.chmod(mode)

    def install(self, *units: Path) -> None:
        for unit in units:
            self.write(f"{_UNITS}/{unit.name}", unit.read_text())
        self.systemctl("daemon-reload")

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.systemctl("show", "--value", f"--property={name}", unit).strip()

    def journal(self, unit: str) -> str:
        """What the unit, and systemd of it, said."""
        return self.call("journalctl", "--no-pager", "--output=cat", f"--unit={unit}").stdout


@contextlib.contextmanager
def system() -> Iterator[System]:
    """A booted systemd with publishd in /opt/publishd, and the accounts publishd and alice."""
    require("systemd", _why_not())
    folder = Path(tempfile.mkdtemp(prefix="publishd-systemd-"))
    folder.chmod(0o755)
    roots, mounts = folder / "roots", folder / "mounts"
    roots.mkdir()
    mounts.mkdir()
    with _cgroup() as cgroup:
        (folder / "boot.sh").write_text(_BOOT)
        # A process enters the cgroup first; that then becomes the root of the new namespace.
        enter = 'echo $$ >"$0/cgroup.procs"; exec "$@"'
        namespaces = ("unshare", "--mount", "--uts", "--ipc", "--cgroup", "--pid", "--fork", "--kill-child")
        seen = (str(mounts), str(roots), sys.base_prefix, sysconfig.get_path("purelib"), str(Path(publishd.__file__).parents[1]))
        program = Program(["sh", "-c", enter, str(cgroup), *namespaces, "sh", str(folder / "boot.sh"), *seen], folder)
        try:
            booted = System(_first_process(program), roots)
            eventually(lambda: _is_up(booted), "a running systemd")
            yield booted
            booted.call("systemctl", "stop", "publishd*", timeout=100)
            booted.call("systemctl", "--no-block", "poweroff", "-f")
        finally:
            program.stop(5)
            shutil.rmtree(folder, ignore_errors=True)


def _why_not() -> str | None:
    if os.geteuid() != 0:
        return "only root can boot it"
    if not _SYSTEMD.exists():
        return f"{_SYSTEMD} is not there"
    missing = [program for program in ("unshare", "nsenter", "systemctl") if not shutil.which(program)]
    if missing:
        return f"{', '.join(missing)} not installed"
    if not _cgroup2():
        return "no cgroup2 is mounted"
    return None


def _cgroup2() -> Path | None:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return next((Path(fields[1]) for fields in mounts if fields[2] == "cgroup2"), None)


@contextlib.contextmanager
def _cgroup() -> Iterator[Path]:
    above = _cgroup2()
    assert above
    cgroup = above / f"publishd-tests-{secrets.token_hex(4)}"
    cgroup.mkdir()
    try:
        yield cgroup
    finally:
        eventually(lambda: _removed(cgroup), "the end of all in the cgroup")


def _removed(cgroup: Path) -> bool:
    try:
        for path, _, _ in os.walk(cgroup, topdown=False):
            os.rmdir(path)
    except OSError:
        return False  # somebody in it is still ending
    return True


def _first_process(program: Program) -> int:
    """The number, outside, of PID 1 inside, once it is systemd."""
    outer = program.process.pid

    def find() -> int:
        assert not program.ended, program.log
        for child in Path(f"/proc/{outer}/task/{outer}/children").read_text().split():
            if Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
                return int(child)
        return 0

    found = eventually(find, "systemd as PID 1")
    assert isinstance(found, int)
    return found


def _is_up(booted: System) -> bool:
    return booted.call("systemctl", "is-system-running").stdout.strip() in ("running", "degraded")
