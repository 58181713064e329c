"""A real NFS server and two real NFS clients, each a user-mode-linux guest: a kernel of its own, run as an ordinary process.

The guests see the host's files, read-only, and run the installed publishd; what they write goes to the share, or is lost. They
are connected by a switch that is an ordinary process, too: nothing of the host's network is touched.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from commands import PUBLISHD, Ran, eventually, require
from services.programs import Program

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PROGRAMS = ("gcc", "linux.uml", "uml_switch", "mkfs.ext4", "mount", "ip", "exportfs", "rpcbind", "rpc.mountd", "rpc.nfsd")
# A guest is several processes, which outlive its first one but not a namespace whose first process that is.
_ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child")
_MODULES = Path("/usr/lib/uml/modules")
# Linux takes a process's extended registers only whole, and the guests' kernel knows nothing of those that came after
# AVX-512 (Intel's AMX): it hands over fewer bytes, is refused, and dies at its first program. What it left out is zero: unused.
_REGISTERS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/uio.h>

long ptrace(enum __ptrace_request request, ...)
{
    static char registers[1 << 16];
    static struct iovec whole = {registers, 0};
    long (*next)(int, ...) = (long (*)(int, ...)) dlsym(RTLD_NEXT, "ptrace");
    va_list arguments;
    va_start(arguments, request);
    pid_t pid = va_arg(arguments, pid_t);
    void *address = va_arg(arguments, void *), *data = va_arg(arguments, void *);
    va_end(arguments);
    if (request == PTRACE_SETREGSET && (long) address == NT_X86_XSTATE) {
        struct iovec *part = data;
        if (!whole.iov_len) {
            whole.iov_len = sizeof registers;
            if (next(PTRACE_GETREGSET, pid, address, &whole))
                whole.iov_len = 0;
            memset(registers, 0, sizeof registers);
        }
        if (part->iov_len < whole.iov_len) {
            memcpy(registers, part->iov_base, part->iov_len);
            data = &whole;
        }
    }
    return next(request, pid, address, data);
}
"""

_NETWORK = "10.77.0"
_DISK = 256 << 20
_MEMORY = "160M"
_BOOT_SECONDS = 60

# $1 is the guest's number, the rest the program that answers the tests.
_BOOT = """
export TMPDIR="$FOLDER/scratch" PYTHONDONTWRITEBYTECODE=1
NUMBER=$1
shift
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs scratch "$FOLDER/scratch"
echo "guest$NUMBER" >/proc/sys/kernel/hostname # by which a server of NFSv4 tells its clients apart
ip link set lo up
ip link set eth0 up
ip addr add {network}.$NUMBER/24 dev eth0
"$@"
echo o >/proc/sysrq-trigger
sleep 60
"""

# NFSv4 keeps a grace period, 90 s by default, in which nobody may open a file.
_SERVE = """
set -e
mount -t tmpfs run /run
mount -t tmpfs nfs /var/lib/nfs
mkdir /run/nfs /var/lib/nfs/v4recovery /var/lib/nfs/rpc_pipefs
touch /var/lib/nfs/etab /var/lib/nfs/rmtab
mount -t ext4 /dev/ubda "$FOLDER/disk"
chmod 1777 "$FOLDER/disk"
mount -t nfsd nfsd /proc/fs/nfsd
echo 10 >/proc/fs/nfsd/nfsv4leasetime
echo 10 >/proc/fs/nfsd/nfsv4gracetime
rpcbind -w
exportfs -o rw,sync,no_root_squash,no_subtree_check,fsid=0 "{network}.0/24:$FOLDER/disk"
rpc.mountd --port 20048
rpc.nfsd 4
echo Y >/proc/fs/nfsd/v4_end_grace
"""

# What mount.nfs would ask the server's portmapper, and its own address, are said here; the kernel takes its defaults else.
_MOUNT = {
    "4.2": f"vers=4.2,addr={_NETWORK}.1,clientaddr={_NETWORK}.{{number}}",
    "3": f"vers=3,nolock,proto=tcp,port=2049,mountproto=tcp,mountport=20048,addr={_NETWORK}.1,mountaddr={_NETWORK}.1",
}


class Guest:
    """A machine of its own. What it is asked to do is a function of its Python, or of `nfs_guest`."""

    def __init__(self, folder: Path, number: int, *options: str) -> None:
        self.number, self._folder = number, folder
        self._log = (folder / f"log{number}").open("w+b")
        self._asked: dict[int, Future[Any]] = {0: Future()}
        self._numbers = itertools.count(1)
        self._asking = threading.Lock()
        boot = folder / f"boot{number}"
        arguments = (sys.executable, "-P", str(Path(__file__).with_name("nfs_guest.py")))
        script = shlex.join(["/bin/sh", str(folder / "boot.sh"), str(number), *arguments])
        boot.write_text(f"#!/bin/sh\nexport PATH={_PATH} HOME=/ FOLDER={shlex.quote(str(folder))}\nexec {script}\n")
        boot.chmod(0o755)
        in_, questions = os.pipe()
        answers, out = os.pipe()
        self._questions, self._answers = open(questions, "wb", buffering=0), open(answers, "rb")  # noqa: SIM115 - stop closes
        self._process = subprocess.Popen(
            [
                *_ENDS_WITH_US,
                *("linux.uml", "quiet", f"mem={_MEMORY}"),
                *("root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"init={boot}"),
                *("con=null", "con0=null,fd:2", f"con1=fd:{in_},fd:{out}"),
                f"eth0=daemon,fe:fd:00:00:77:{number:02x},unix,{folder}/switch",
                *(f"umid=guest{number}", f"uml_dir={folder}/uml"),
                *options,
            ],
            env={"PATH": os.environ["PATH"], "HOME": str(folder), "LD_PRELOAD": str(folder / "registers.so")},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(in_, out),
            start_new_session=True,
        )
        os.close(in_)
        os.close(out)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._answers:
            answer = json.loads(line)
            asked = self._asked.pop(answer["id"])
            if "error" in answer:
                asked.set_exception(AssertionError(f"guest {self.number}: {answer['error']}"))
            else:
                asked.set_result(answer["result"])

    @property
    def log(self) -> str:
        return os.pread(self._log.fileno(), 1 << 20, 0).decode("utf-8", "backslashreplace")

    def booted(self) -> None:
        """Wait until it answers."""
        answers = self._asked.get(0)

        def up() -> bool:
            assert self._process.poll() is None, f"guest {self.number} ended:\n{self.log}"
            return answers is None or answers.done()

        eventually(up, f"guest {self.number}", _BOOT_SECONDS)

    def ask(self, call: str, *arguments: object) -> Future[Any]:
        """Have something called there, and don't wait for it."""
        with self._asking:
            number = next(self._numbers)
            asked = self._asked[number] = Future()
            self._questions.write(json.dumps({"id": number, "call": call, "arguments": arguments}).encode() + b"\n")
        return asked

    def call(self, call: str, *arguments: object, seconds: float = 60) -> Any:
        """What a function returns there, as JSON can say it."""
        return self.ask(call, *arguments).result(seconds)

    def start(self, *arguments: str, **environ: str) -> Running:
        """Start a program there."""
        return Running(self, arguments, environ)

    def run(self, *arguments: str, seconds: float = 60, **environ: str) -> Ran:
        """Run a program there to its end."""
        return self.start(*arguments, **environ).ended(seconds)

    def publishd(self, command: str, root: str, *arguments: str, **environ: str) -> Running:
        return self.start(PUBLISHD, command, "-checkpoint", root, *arguments, **environ)

    def exists(self, path: str) -> bool:
        """Whether a file stands there as far as this machine believes, and it keeps to that belief for a while."""
        return bool(self.call("os.path:exists", path))

    def list(self, folder: str) -> list[str]:
        """The names in the folder, which is opened for that."""
        return sorted(self.call("os:listdir", folder))

    def pause(self) -> None:
        """It hangs, with all that runs on it."""
        os.kill(self._kernel(), signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._kernel(), signal.SIGCONT)

    def _kernel(self) -> int:
        """The process that is the guest's kernel; those that are its programs stand still without it."""
        keeper = self._process.pid
        (kernel,) = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
        return int(kernel)

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._questions.close()
        self._reader.join()
        self._answers.close()
        self._log.close()


class Running:
    """A program that runs in a guest."""

    def __init__(self, guest: Guest, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        self._guest = guest
        self._pid: int = guest.call("start", arguments, environ)

    @property
    def log(self) -> str:
        return str(self._guest.call("said", self._pid))

    def says(self, text: str) -> Self:
        """Wait until it has said this on standard error."""
        eventually(lambda: text in self.log, f"{text!r} in the log", 30)
        return self

    def send(self, number: int = signal.SIGTERM) -> Self:
        self._guest.call("send", self._pid, number)
        return self

    def ended(self, seconds: float = 60) -> Ran:
        """Wait for its end."""
        code, out, err = self._guest.call("ended", self._pid, seconds, seconds=seconds + 10)
        return Ran(code, out.encode(), err.encode())


class Lab:
    """One server and two clients, and the share that all three see."""

    def __init__(self, folder: Path, version: str) -> None:
        self.version = version
        self.share = folder / "share"
        """Where the clients have mounted it."""
        self.disk = folder / "disk"
        """Where the server has it, and nothing is cached."""
        self._folder = folder
        self._guests: list[Guest] = []
        self._image = -1

    def start(self) -> None:
        for name in ("share", "disk", "scratch"):
            (self._folder / name).mkdir()
        (self._folder / "boot.sh").write_text(_BOOT.format(network=_NETWORK))
        # In memory: a disk of the host's makes the server wait for what else is written there.
        self._image = os.memfd_create("disk")
        os.truncate(self._image, _DISK)
        image = f"/proc/{os.getpid()}/fd/{self._image}"
        # Without 256-byte inodes, which a disk so small is not given by default, times would be in whole seconds.
        _host("mkfs.ext4", "-q", "-I", "256", "-E", "lazy_itable_init=0,lazy_journal_init=0", image)
        (self._folder / "registers.c").write_text(_REGISTERS)
        _host("gcc", "-shared", "-fPIC", "-O2", "-o", f"{self._folder}/registers.so", f"{self._folder}/registers.c")
        for number, *options in ((1, f"ubd0={image}"), (2,), (3,)):
            self._guests.append(Guest(self._folder, int(number), *map(str, options)))
        for guest in self._guests:
            guest.booted()
        self.server.call("load", "nfsd")
        self.server.run("sh", "-c", _SERVE.format(network=_NETWORK)).succeeded()
        for client in self._guests[1:]:
            self._mount(client)

    def _mount(self, client: Guest) -> None:
        client.call("load", f"nfsv{self.version[0]}")
        source = f"{_NETWORK}.1:{'/' if self.version > '4' else self.disk}"
        options = _MOUNT[self.version].format(number=client.number)
        client.run("mount", "-i", "-n", "-t", "nfs", "-o", options, source, str(self.share)).succeeded()

    @property
    def server(self) -> Guest:
        return self._guests[0]

    @property
    def clients(self) -> tuple[Guest, Guest]:
        return self._guests[1], self._guests[2]

    def stop(self) -> None:
        for guest in self._guests:
            guest.stop()
        if self._image >= 0:
            os.close(self._image)


@contextlib.contextmanager
def lab(version: str) -> Iterator[Lab]:
    """A server and two clients that have mounted its share with this version of NFS, and with the default options."""
    require("nfs", _why_not())
    folder = Path(tempfile.mkdtemp(prefix="publishd-nfs-"))
    folder.chmod(0o755)
    (folder / "wire").mkdir()
    switch = Program([_program("uml_switch") or "", "-unix", str(folder / "switch")], folder / "wire")
    started = Lab(folder, version)
    try:
        eventually((folder / "switch").exists, "the switch")
        started.start()
        yield started
    finally:
        started.stop()
        switch.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _why_not() -> str | None:
    if os.geteuid() != 0:
        return "only root can start the guests"
    missing = [program for program in (*_PROGRAMS, "setpriv", "unshare") if not _program(program)]
    if missing:
        return f"{', '.join(missing)} not installed"
    return None if _MODULES.is_dir() else f"{_MODULES} is not there"


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:{_PATH}")


def _host(program: str, *arguments: str) -> None:
    path = _program(program)
    assert path
    ran = subprocess.run([path, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{program} {arguments}: {ran.stdout}{ran.stderr}"
