"""`publishd run`: COMMAND as a child, with a watch around it, as a process of its own."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import pytest

from commands import (
    ATTEMPT,
    EPOCH,
    ORDINARY_USER,
    PUBLISHD,
    Background,
    Ran,
    Root,
    environment,
    eventually,
    require,
    require_program,
)
from faulty_calls import FOREVER, faulty
from hanging import hanging
from paused_start import PausedStart

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from s3_roots import S3Root

# The saves of a COMMAND written in Python: save(STEP) makes a complete one, wait(FILE) waits until the file is there.
PRELUDE = """
import os, signal, subprocess, sys, time
from pathlib import Path
out = Path(os.environ["PUBLISHD_OUT"])
def save(step):
    (out / f"checkpoint-{step}").mkdir(exist_ok=True)
    (out / f"checkpoint-{step}" / "trainer_state.json").write_text('{"global_step": %d}' % step)
def wait(name):
    deadline = time.monotonic() + 60  # a test that fails leaves nobody behind for longer
    while not Path(name).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
def heard(number, *_):
    with open("heard", "a") as file:
        file.write(signal.Signals(number).name + "\\n")
def hear(*numbers):
    for number in numbers:
        signal.signal(number, heard)
    Path("ready").touch()
"""


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", PRELUDE + code)


class Run(Background):
    """A run in the background, in a folder and a session of its own: signals to its group are no affair of the tests."""

    def __init__(
        self,
        root: Root,
        folder: Path,
        command: Sequence[str],
        *flags: str,
        interval: str = "1h",
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.folder = folder
        arguments = ["run", "-checkpoint", str(root.path), "-framework", "hf", "-interval", interval, *flags, "--", *command]
        super().__init__(*arguments, env=environment() if env is None else env, cwd=folder, start_new_session=True, **options)

    @property
    def heard(self) -> list[str]:
        """The signals that COMMAND has noted."""
        try:
            return (self.folder / "heard").read_text().split()
        except FileNotFoundError:
            return []

    def ready(self) -> Self:
        """Wait until COMMAND hears signals, and the watch has begun."""
        eventually((self.folder / "ready").exists, "COMMAND")
        return self.says("watching: ")


def of(root: Root, *command: str, **options: Any) -> Ran:
    """Run COMMAND to its end; the watch scans at its start and at the end only."""
    return root.run("run", "-framework", "hf", "-interval", "1h", "--", *command, start_new_session=True, **options)


# How COMMAND ends

ENDS = {
    "0": ("", 0),
    "3": ("sys.exit(3)", 3),
    "255": ("sys.exit(255)", 255),
    "an exception": ("raise ValueError", 1),
    "2, which is no usage error of ours": ("sys.exit(2)", 2),
    "127 of its own": ("sys.exit(127)", 127),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", 143),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", 137),
    "SIGSEGV": ("os.kill(os.getpid(), signal.SIGSEGV)", 139),
    "SIGABRT": ("os.abort()", 134),
    "SIGINT": ("signal.signal(signal.SIGINT, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGINT)", 130),
    "SIGUSR1": ("os.kill(os.getpid(), signal.SIGUSR1)", 138),
    "a real-time signal": ("os.kill(os.getpid(), signal.SIGRTMIN + 3)", 128 + signal.SIGRTMIN + 3),
    "_exit": ("os._exit(4)", 4),
    "closed stdout": ("os.close(1); os.close(0); sys.exit(6)", 6),
    "much output": ("sys.stdout.write('x' * 5_000_000); sys.exit(5)", 5),
    "while a signal is on its way to it": ("signal.signal(10, signal.SIG_IGN); os.kill(os.getppid(), 10); os._exit(11)", 11),
    "stopped and continued": (
        "subprocess.Popen(['sh', '-c', 'until grep -q State:.T /proc/$0/status; do sleep 0.05; done; kill -CONT $0',"
        "str(os.getpid())]); os.kill(os.getpid(), signal.SIGSTOP); sys.exit(7)",
        7,
    ),
    "its child outlives it": ("subprocess.Popen(['sleep', '1'], stdout=subprocess.DEVNULL); sys.exit(8)", 8),
    "a daemon outlives it": (
        "os.fork() and os._exit(9); os.setsid(); os.fork() and os._exit(0); os.execvp('sleep', ['sleep', '1'])",
        9,
    ),
    "it becomes another program": ("os.execvp('sh', ['sh', '-c', 'exit 10'])", 10),
    "it kills its group's other members": ("os.setpgid(0, 0); os.killpg(0, signal.SIGKILL)", 137),
}


@pytest.mark.parametrize("way", ENDS)
def test_the_status_is_command_s_and_its_last_save_is_published(root: Root, way: str) -> None:
    """128+n after signal n; whichever way it ends, a final scan finds what it saved in its last moment."""
    code, status = ENDS[way]
    ran = of(root, *python(f"save(500); {code}"))
    assert ran.code == status, ran
    assert "Traceback" not in ran.err or way == "an exception", ran
    assert root.steps == [500]
    name = signal.Signals(status - 128).name if way.startswith("SIG") else ""
    assert f"exit status {status}{f', as after {name}' if name else ''}" in ran.err


def script(folder: Path, text: str, mode: int = 0o755) -> str:
    path = folder / "command"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize(
    ("text", "mode", "status", "said"),
    [
        (None, 0, 127, "No such file or directory"),
        ("#!/bin/sh\n", 0o644, 126, "Permission denied"),
        ("#!/no/such/interpreter\n", 0o755, 126, "the interpreter that its first line names is missing"),
        ("exit 0\n", 0o755, 126, "Exec format error"),
    ],
)
def test_a_command_that_cannot_be_started(
    root: Root, tmp_path: Path, text: str | None, mode: int, status: int, said: str
) -> None:
    """127 where there is none, 126 where there is; one line says why, and no watch begins."""
    command = str(tmp_path / "nothing") if text is None else script(tmp_path, text, mode)
    of(root, command, "-secret", prefix=ORDINARY_USER).failed("run: cannot start: ", command, said, code=status)
    assert root.pub == []


@pytest.mark.parametrize(("command", "status"), [("no-such-program", 127), ("/", 126), ("/etc/passwd/x", 126)])
def test_a_command_that_is_none(root: Root, command: str, status: int) -> None:
    """By a name that PATH does not have, a folder, a path through a file."""
    of(root, command).failed("run: cannot start: ", command, code=status)


def test_a_command_is_found_as_a_shell_would(root: Root, tmp_path: Path) -> None:
    """In the PATH that was given, or relative to the current folder."""
    script(tmp_path, "#!/bin/sh\nexit 11\n")
    assert of(root, "command", env=environment(PATH=f"{tmp_path}:{os.environ['PATH']}")).code == 11
    assert of(root, "./command", cwd=tmp_path).code == 11


def test_a_save_that_stays_unpublished_makes_a_good_status_1(root: Root) -> None:
    """And leaves a bad one as it is."""
    (root.path / "pub").mkdir()
    (root.path / "prune").mkdir()
    (root.path / "pub").chmod(0o555)
    flags = ("-framework", "hf", "-drain", "1s", "--")
    assert root.run("run", *flags, *python("save(500)"), prefix=ORDINARY_USER).code == (1 if ORDINARY_USER else 0)
    assert root.run("run", *flags, *python("save(500); sys.exit(3)"), prefix=ORDINARY_USER).code == 3


def test_a_save_that_no_entry_has_room_for_makes_a_good_status_1(root: Root) -> None:
    """An entry fits for the first steps, and no longer for later ones; what fits is published, what does not is named."""
    attempt = "x" * (133 - len("exec//checkpoint-50"))
    given = environment(DISPATCH_ATTEMPT=attempt)
    ran = of(root, *python("save(50); save(500)"), env=given)
    assert ran.code == 1, ran
    assert root.steps == [50]
    assert f"not published: {root.path}/exec/{attempt}/checkpoint-500" in ran.err
    assert of(root, *python("sys.exit(3)"), env=given).code == 3


def test_a_daemon_that_outlives_command_does_not_hold_the_run(root: Root, tmp_path: Path) -> None:
    """Nor does it get the signal that is for COMMAND; it has stdout, stderr and whatever else COMMAND had."""
    code = """
if not os.fork():
    os.setsid()
    Path("daemon").write_text(str(os.getpid()))
    wait("end")
    os._exit(0)
wait("daemon")
save(500)
sys.exit(3)
"""
    with Run(root, tmp_path, python(code)) as running:
        assert running.process.wait(20) == 3
        assert is_running(int((tmp_path / "daemon").read_text()))
        (tmp_path / "end").touch()
    assert root.steps == [500]


# What COMMAND is given


def test_stdin_and_stdout_are_command_s(root: Root) -> None:
    """Byte for byte, and publishd adds nothing."""
    with tempfile.TemporaryFile() as stdin:
        stdin.write(b"\x00\xff in\n")
        stdin.seek(0)
        command = [PUBLISHD, "run", "-checkpoint", str(root.path), "-framework", "hf", "--", "cat"]
        ran = subprocess.run(command, stdin=stdin, env=environment(), capture_output=True, check=True)
    assert ran.stdout == b"\x00\xff in\n"


def test_the_environment_is_as_it_was_and_has_two_variables_more(root: Root) -> None:
    """Proxies, credentials and odd bytes included, under a locale that is none, too."""
    odd = {
        "HTTPS_PROXY": "http://u:p@h:1",
        "no_proxy": "*",
        "AWS_SECRET_ACCESS_KEY": "k",
        "VAULT_TOKEN": "t",
        "SSL_CERT_FILE": "/x",
    }
    given = environment(**odd, LC_ALL="C", ODD=os.fsdecode(b"\xff\n="), PYTHONUTF8=None)
    ran = of(root, "env", "-0", env=given).succeeded()
    got = dict(line.split(b"=", 1) for line in ran.out.rstrip(b"\0").split(b"\0"))
    wanted = {os.fsencode(name): os.fsencode(value) for name, value in given.items()}
    assert got == wanted | {b"PUBLISHD_OUT": os.fsencode(root.execution), b"PUBLISHD_RESUME": b""}


@pytest.mark.parametrize(
    "locale", [{}, {"LANG": "C"}, {"LC_CTYPE": "C"}, {"LC_CTYPE": "POSIX"}, {"LC_CTYPE": "C.UTF-8"}], ids=str
)
def test_the_locale_is_as_it_was(root: Root, locale: dict[str, str]) -> None:
    """Where there is none Python makes itself one, and would hand it on."""
    given = environment(LANG=None, LC_CTYPE=None, LC_ALL=None, PYTHONUTF8=None, PYTHONCOERCECLOCALE=None) | locale
    ran = of(root, "env", env=given).succeeded()
    assert {line for line in ran.out.decode().splitlines() if line.startswith(("LANG=", "LC_"))} == {
        f"{name}={value}" for name, value in locale.items()
    }


def test_it_resumes_from_what_resolve_says(root: Root) -> None:
    """The latest publication, as an absolute path."""
    save = root.hf(500)
    root.publish(save, 500, EPOCH - 1)
    later = Root(root.path, "1.4102.0")
    code = "import os; print(os.environ['PUBLISHD_RESUME'], os.environ['PUBLISHD_OUT'])"
    ran = of(root, sys.executable, "-c", code, env=environment(DISPATCH_ATTEMPT="1.4102.0"))
    ran.succeeded(f"{save} {later.execution}\n".encode())
    assert f"resuming from: {save}" in ran.err


@pytest.mark.parametrize("name", [b"a b", b"caf\xe9", "läuf".encode()])
def test_odd_roots(tmp_path: Path, name: bytes) -> None:
    """Bytes that are no text reach COMMAND as they are."""
    root = Root(Path(os.fsdecode(bytes(tmp_path) + b"/" + name)))
    root.path.mkdir()
    out = of(root, "sh", "-c", 'echo "$PUBLISHD_OUT"', env=environment(LC_ALL="C")).succeeded().out
    assert out == os.fsencode(root.execution) + b"\n"


def test_the_execution_s_folder_is_there_before_command(tmp_path: Path) -> None:
    """Made with its parents below the root, through a link, too."""
    root = Root(tmp_path / "root")
    (tmp_path / "elsewhere").mkdir()
    root.path.mkdir()
    (root.path / "exec").symlink_to(tmp_path / "elsewhere")
    of(root, "sh", "-c", 'cd "$PUBLISHD_OUT"').succeeded()
    assert (tmp_path / "elsewhere" / ATTEMPT).is_dir()


def test_descriptors_that_were_open_reach_command_and_none_of_ours_do(root: Root, tmp_path: Path) -> None:
    """A job script's lock, or a process substitution, is for COMMAND."""
    code = "import os, sys; os.dup2(int(sys.argv[1]), 9); os.execv(sys.argv[2], sys.argv[2:])"
    with (tmp_path / "nine").open("w") as file:
        given = (sys.executable, "-c", code, str(file.fileno()))
        listing = ("sh", "-c", "echo into >&9; exec ls /proc/self/fd")
        ran = of(root, *listing, prefix=given, pass_fds=(file.fileno(),)).succeeded()
        direct = [*given, "/bin/sh", *listing[1:]]
        alone = subprocess.run(direct, pass_fds=(file.fileno(),), capture_output=True, check=True)
    assert ran.out == alone.stdout
    assert (tmp_path / "nine").read_text() == "into\n" * 2


def test_command_s_signals_are_as_they_were(root: Root) -> None:
    """Nothing is blocked, and nothing ignored but what was."""
    show = ("sed", "-n", "/^Sig[BIC]/p", "/proc/self/status")
    for given in ((), ("sh", "-c", "trap '' HUP INT USR1; exec \"$@\"", "sh")):
        alone = subprocess.run([*given, *show], capture_output=True, check=True).stdout
        assert of(root, *show, prefix=given).succeeded().out == alone


def test_a_parent_that_ignores_its_children_hides_no_status(root: Root) -> None:
    """With SIGCHLD ignored the kernel would forget how COMMAND ended."""
    code = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    assert of(root, "sh", "-c", "exit 3", prefix=(sys.executable, "-c", code)).code == 3


# Signals

FORWARDED = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
HEAR_ALL = f"hear(*map(signal.Signals, {list(map(int, FORWARDED))})); wait('end')"


@pytest.mark.parametrize("number", FORWARDED)
def test_each_signal_is_forwarded_once_however_often_it_comes(root: Root, tmp_path: Path, number: signal.Signals) -> None:
    """To COMMAND and not to its children; from then on a scan a second, until COMMAND ends."""
    code = "child = subprocess.Popen(['sleep', '60']); %s; Path('alive').write_text(str(child.poll())); child.kill(); save(500)"
    with Run(root, tmp_path, python(f"{code % HEAR_ALL}; sys.exit(3)")) as running:
        running.ready().send(number)
        eventually(lambda: running.heard == [number.name], number.name)
        last = signal.SIGUSR2 if number == signal.SIGUSR1 else signal.SIGUSR1
        for _ in range(0 if number == signal.SIGINT else 3):  # a second SIGINT has a meaning of its own
            running.send(number)
            time.sleep(0.1)  # in which it would be forwarded
        running.send(last)
        eventually(lambda: last.name in running.heard)
        root.hf(400)
        eventually(lambda: root.steps == [400], "a scan meanwhile")
        (tmp_path / "end").touch()
        assert running.ended().code == 3
        assert running.heard == [number.name, last.name]
    assert root.steps == [400, 500]
    assert (tmp_path / "alive").read_text() == "None"


@pytest.mark.parametrize(
    ("flags", "sent", "heard"),
    [
        (("-forward", "TERM=USR1"), [signal.SIGTERM], ["SIGUSR1"]),
        (("-forward=SIGTERM=SIGUSR1"), [signal.SIGTERM], ["SIGUSR1"]),
        (("-forward", "TERM=none"), [signal.SIGTERM, signal.SIGUSR2], ["SIGUSR2"]),
        (("-forward", "TERM=none,USR1=TERM"), [signal.SIGTERM, signal.SIGUSR1], ["SIGTERM"]),
        (("-forward", "TERM=none", "-forward", "USR2=HUP"), [signal.SIGTERM, signal.SIGUSR2], ["SIGHUP"]),
        (("-forward", "TERM=none", "-forward", "TERM=USR1"), [signal.SIGTERM], ["SIGUSR1"]),
    ],
)
def test_forward_maps(root: Root, tmp_path: Path, flags: Sequence[str], sent: list[int], heard: list[str]) -> None:
    """Signals go as they are mapped, one after the other."""
    flags = (flags,) if isinstance(flags, str) else flags
    with Run(root, tmp_path, python(f"{HEAR_ALL}; sys.exit(3)"), *flags) as running:
        running.ready()
        for number in sent:
            running.send(number).says(f"{signal.Signals(number).name}: ")
        eventually(lambda: running.heard == heard)
        (tmp_path / "end").touch()
        assert running.ended().code == 3
        assert running.heard == heard


@pytest.mark.parametrize(
    "value", ["", "TERM", "TERM=", "=USR1", "TERM=FOO", "KILL=TERM", "CHLD=TERM", "TERM=USR1,", "term=usr1", "15=10"]
)
def test_a_bad_map_is_a_usage_error(root: Root, value: str) -> None:
    """Nothing is started."""
    root.run("run", "-framework", "hf", "-forward", value, "--", "echo").failed("-forward", code=2)
    assert os.listdir(root.path) == ["exec"]


@pytest.mark.parametrize(
    ("number", "does", "status"),
    [
        (signal.SIGTERM, "signal.signal(15, lambda *_: (save(500), os._exit(0)))", 0),
        (signal.SIGTERM, "signal.signal(15, lambda *_: (save(500), os._exit(5)))", 5),
        (signal.SIGTERM, "save(500)", 143),
        (signal.SIGUSR1, "signal.signal(10, lambda *_: (save(500), os._exit(0)))", 0),
        (signal.SIGUSR1, "save(500)", 138),
        (signal.SIGHUP, "save(500)", 129),
    ],
)
def test_a_command_that_ends_when_told(root: Root, tmp_path: Path, number: int, does: str, status: int) -> None:
    """Its last save is published, its status is kept, and nothing is pruned: there may be no time."""
    for step in (1, 2, 3):
        root.publish(root.hf(step), step)
    with Run(root, tmp_path, python(f"{does}; hear(); wait('never')"), "-keep", "1") as running:
        ended = running.ready().send(number).ended()
    assert ended.code == status
    assert root.steps == [1, 2, 3, 500]


def test_without_a_signal_it_prunes_at_the_end_and_not_before(root: Root, tmp_path: Path) -> None:
    """-keep is for the end of it all."""
    with Run(root, tmp_path, python("save(1); save(2); save(3); wait('end')"), "-keep", "1", interval="100ms") as running:
        eventually(lambda: root.steps == [1, 2, 3])
        (tmp_path / "end").touch()
        assert running.ended().code == 0
        assert running.log.count("pruned: ") == 2
    assert root.steps == [3]


def test_a_prune_that_fails_makes_a_good_status_1(root: Root) -> None:
    """It is named, and the others went."""
    saves = [root.hf(step) for step in (1, 2)]
    for step, save in enumerate(saves, 1):
        root.publish(save, step)
    root.execution.chmod(0o555)
    try:
        ran = root.run("run", "-framework", "hf", "-keep", "1", "--", "true", prefix=ORDINARY_USER)
    finally:
        root.execution.chmod(0o755)
    assert ran.code == (1 if ORDINARY_USER else 0)
    assert "cannot delete" in ran.err


def test_a_command_that_never_ends_is_watched_until_it_is_killed(root: Root, tmp_path: Path) -> None:
    """It ignores SIGTERM; what it saves meanwhile is published within a second or two, and after SIGKILL it is over."""
    code = (
        "signal.signal(15, signal.SIG_IGN); Path('pid').write_text(str(os.getpid())); hear(); wait('go'); save(500); wait('no')"
    )
    with Run(root, tmp_path, python(code)) as running:
        running.ready().send(signal.SIGTERM).send(signal.SIGTERM).says("SIGTERM: forwarded")
        (tmp_path / "go").touch()
        eventually(lambda: root.steps == [500])
        root.hf(501)
        eventually(lambda: root.steps == [500, 501], "a further scan", 5)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        assert running.ended().code == 137


def test_a_second_sigint_ends_it_at_once_and_command_is_told(root: Root, tmp_path: Path) -> None:
    """Exit 1; COMMAND gets SIGTERM from the kernel, which may send one for each thread of publishd's."""
    with Run(root, tmp_path, python(f"{HEAR_ALL}; sys.exit(3)"), "-forward", "INT=none") as running:
        running.ready().send(signal.SIGINT).says("SIGINT: not forwarded")
        assert running.interrupt_again(5) == 1
        assert "ended early: by SIGINT" in running.log
        eventually(lambda: running.heard, "SIGTERM")
        assert set(running.heard) == {"SIGTERM"}
        (tmp_path / "end").touch()


@pytest.mark.parametrize("at", ["once it runs", "at once"])
def test_killed_it_leaves_no_orphan(root: Root, tmp_path: Path, at: str) -> None:
    """SIGKILL for publishd is SIGTERM for COMMAND, also where COMMAND has only just begun."""
    code = "Path('pid').write_text(str(os.getpid()));"
    with Run(root, tmp_path, python(f"{code} wait('never')")) as running:
        if at == "once it runs":
            running.says("watching: ")
        eventually((tmp_path / "pid").exists)
        pid = int(eventually((tmp_path / "pid").read_text))
        running.send(signal.SIGKILL)
        running.process.wait()
    eventually(lambda: not is_running(pid), "the end of COMMAND", 5)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def arguments(pid: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread has just ended
            found += map(int, (task / "children").read_text().split())
    return found


@pytest.mark.parametrize("call", ["fork", "execve"])
def test_b68_a_signal_to_the_child_before_it_is_command_is_the_child_s(
    root: Root, tmp_path: Path, call: Literal["fork", "execve"]
) -> None:
    """Between fork and exec the child still has this program's handlers: SIGTERM ends it, and publishd is not told."""
    start = PausedStart(call, tmp_path)
    with Run(root, tmp_path, ("sleep", "60"), env=start.environment) as running:
        os.kill(start.reached(), signal.SIGTERM)
        start.go_on()
        assert running.ended().code == 143
        assert "forwarded" not in running.log
        assert "exit status 143, as after SIGTERM" in running.log


def test_a_signal_that_comes_while_command_is_started_is_not_lost(root: Root, tmp_path: Path) -> None:
    """It waits until there is a COMMAND to forward it to."""
    start = PausedStart("execve", tmp_path)
    with Run(root, tmp_path, ("sleep", "60"), env=start.environment) as running:
        start.reached()
        running.send(signal.SIGTERM)
        start.go_on()
        assert running.ended().code == 143
        assert running.log.count("SIGTERM: forwarded to: sleep") == 1


@pytest.mark.parametrize("call", ["fork", "execve"])
def test_killed_while_command_is_started_it_leaves_no_orphan(root: Root, tmp_path: Path, call: Literal["fork", "execve"]) -> None:
    """The child finds its parent gone, or is told so by the kernel."""
    start = PausedStart(call, tmp_path)
    with Run(root, tmp_path, ("sleep", "60"), env=start.environment) as running:
        child = start.reached()
        running.send(signal.SIGKILL).process.wait()
        start.go_on()
        eventually(lambda: not is_running(child), "the end of the child")


def test_told_before_command_was_started_it_starts_nothing(root: Root, tmp_path: Path) -> None:
    """Resolve hangs; SIGTERM comes; one line, exit 1."""
    hang = faulty(tmp_path, "open", str(root.path), FOREVER)
    with Run(root, tmp_path, ("touch", "started"), env=hang) as running:
        caught = 1 << (signal.SIGTERM - 1)
        status = Path(f"/proc/{running.process.pid}/status")
        eventually(lambda: any(int(line.split()[1], 16) & caught for line in status.read_text().splitlines() if "SigCgt" in line))
        running.send(signal.SIGTERM).ended(20).failed("run: not started: touch", code=1)
    assert not (tmp_path / "started").exists()


def test_a_signal_during_the_prune_ends_it_and_keeps_the_status(root: Root, tmp_path: Path) -> None:
    """What is left is the next prune's."""
    for step in range(1, 40):
        root.publish(root.hf(step), step)
    slow = faulty(tmp_path, "readdir", "/checkpoint-1", FOREVER)
    with Run(root, tmp_path, ("sh", "-c", "exit 3"), "-keep", "1", env=slow) as running:
        eventually(lambda: root.records, "the prune")
        ended = running.send(signal.SIGTERM).ended(10)
    assert ended.code == 3
    assert "prune: ended early" in ended.err
    root.run("prune", "-keep", "1").succeeded()
    assert (root.steps, root.records) == ([39], [])


def test_once_command_has_ended_nothing_is_sent_to_its_number(root: Root, tmp_path: Path) -> None:
    """It may be another's by then."""
    tracer = require_program("strace", "strace")
    trace, hang = tmp_path / "trace", tmp_path / "hang"
    hangs = environment(**hanging(tmp_path / "hang.so", str(root.path), str(hang)))
    command = ("env", "-u", "LD_PRELOAD", "touch", str(hang))
    traced = (tracer, "-f", "-qq", "-e", "trace=kill,tkill,tgkill", "-o", str(trace))
    with Run(root, tmp_path, command, "-drain", "30s", env=hangs, prefix=traced) as running:
        running.says("ended: env: exit status 0")
        (traced_one,) = eventually(lambda: [child for child in children(running.process.pid) if "publishd" in arguments(child)])
        os.kill(traced_one, signal.SIGTERM)
        eventually(lambda: "--- SIGTERM" in trace.read_text(), "the signal")
        hang.unlink()
        assert running.ended().code == 0
    assert "kill(" not in trace.read_text()


AS_PID_1 = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
IN_A_TERMINAL = (
    sys.executable,
    "-c",
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])",
)


def test_ctrl_c_reaches_command_once(root: Root, tmp_path: Path) -> None:
    """The terminal tells its whole foreground; publishd does not tell COMMAND a second time, but of other signals it does."""
    master, slave = pty.openpty()
    command = python("hear(signal.SIGINT, signal.SIGTERM); wait('end'); save(500); sys.exit(3)")
    with Run(root, tmp_path, command, prefix=IN_A_TERMINAL, stdin=slave, stdout=slave) as running:
        os.close(slave)
        running.ready()
        os.write(master, b"\x03")
        running.says("SIGINT: not forwarded, the terminal sends it to both")
        running.send(signal.SIGTERM)
        eventually(lambda: "SIGTERM" in running.heard)
        (tmp_path / "end").touch()
        assert running.process.wait(20) == 3
        assert running.heard == ["SIGINT", "SIGTERM"]
    os.close(master)
    assert root.steps == [500]


def test_ctrl_c_reaches_command_once_where_publishd_is_pid_1(root: Root, tmp_path: Path) -> None:
    """The terminal tells the process that reaps, too, which does not pass it on; of others' SIGINT it does."""
    require("root", None if os.geteuid() == 0 else "only root can make a PID namespace")
    master, slave = pty.openpty()
    command = python("hear(signal.SIGINT); wait('end'); save(500); sys.exit(3)")
    with Run(root, tmp_path, command, prefix=(*IN_A_TERMINAL, *AS_PID_1), stdin=slave, stdout=slave) as running:
        os.close(slave)
        running.ready()
        os.write(master, b"\x03")
        running.says("SIGINT: not forwarded, the terminal sends it to both")
        time.sleep(0.6)  # after which another SIGINT would end it at once
        assert running.process.poll() is None
        (tmp_path / "end").touch()
        assert running.process.wait(20) == 3
        assert running.heard == ["SIGINT"]
    os.close(master)
    assert root.steps == [500]


def test_as_pid_1_a_flood_of_signals_changes_no_status(root: Root, tmp_path: Path) -> None:
    """Also of one that comes in the moment in which COMMAND and publishd end."""
    require("root", None if os.geteuid() == 0 else "only root can make a PID namespace")
    flood = "import os, sys\nwhile True:\n    for number in (1, 10, 12, 15): os.kill(int(sys.argv[1]), number)"
    for _ in range(5):
        with Run(root, tmp_path, python("hear(1, 10, 12, 15); wait('end'); os._exit(3)"), prefix=AS_PID_1) as running:
            running.ready()
            (first,) = children(running.process.pid)
            flooding = subprocess.Popen([sys.executable, "-c", flood, str(first)], stderr=subprocess.DEVNULL)
            (tmp_path / "end").touch()
            ended = running.ended()
            flooding.wait(20)
        assert ended.code == 3, ended
        (tmp_path / "end").unlink()
        (tmp_path / "ready").unlink()


def test_a_terminal_that_closes_is_one_hangup(root: Root, tmp_path: Path) -> None:
    """COMMAND hears of it once; publishd, whose stderr is gone with it, goes on to the end."""
    master, slave = pty.openpty()
    command = python("hear(signal.SIGHUP); wait('heard'); time.sleep(1); save(500); os._exit(3)")
    with Run(root, tmp_path, command, prefix=IN_A_TERMINAL, stdin=slave, stdout=slave, stderr=slave) as running:
        os.close(slave)
        eventually((tmp_path / "ready").exists, "COMMAND")
        os.close(master)
        assert running.process.wait(20) == 3
        assert running.heard == ["SIGHUP"]
    assert root.steps == [500]


# Before COMMAND


def refused(root: Root, *said: str, **options: Any) -> None:
    before = root.tree()
    ran = of(root, "touch", str(root.path / "started"), **options)
    ran.failed("publishd run: ", *said)
    assert root.tree() == before


def test_nothing_starts_where_resolve_has_no_answer(root: Root) -> None:
    """An entry that is none, a latest save that is gone."""
    root.publish("exec/x/checkpoint-1", 1, 1)
    refused(root, "cannot resume", "it was published, but it is gone")
    (root.path / "pub" / "junk").touch()
    refused(root, "not a publication")


@pytest.mark.parametrize("folder", ["", "pub"])
def test_nothing_starts_where_the_root_cannot_be_read(root: Root, folder: str) -> None:
    """An unreadable folder is no first run."""
    require("capabilities", None if ORDINARY_USER or os.geteuid() else "setpriv is not installed")
    root.publish(root.hf(5), 5)
    (root.path / folder).chmod(0)
    ran = of(root, "touch", "started", cwd=root.path.parent, prefix=ORDINARY_USER)
    (root.path / folder).chmod(0o755)
    ran.failed("run: cannot list", "Permission denied")
    assert os.listdir(root.path.parent) == ["root"]


def test_nothing_starts_without_a_root(tmp_path: Path) -> None:
    """An unmounted file system is no first run."""
    of(Root(tmp_path / "missing"), "true").failed("run: cannot list", "missing")
    assert os.listdir(tmp_path) == []


def test_rule_18_a_greater_epoch_is_refused(root: Root) -> None:
    """What this execution published would never be resolved."""
    root.publish(Root(root.path, "later").hf(5), 5, EPOCH + 1)
    refused(root, "not started", f"epoch {EPOCH + 1} has published", "greater epoch")


def test_rule_18_an_attempt_that_was_another_epoch_s_is_refused(root: Root) -> None:
    """Its saves are published, and stay so."""
    root.publish(root.hf(5), 5, EPOCH - 1)
    refused(root, "not started", f"published as epoch {EPOCH - 1}")


def test_its_own_attempt_and_epoch_may_go_on(root: Root) -> None:
    """Run again as the same execution it resumes from itself."""
    root.publish(root.hf(5), 5)
    assert of(root, "sh", "-c", 'test "$PUBLISHD_RESUME"').code == 0


def test_an_attempt_that_no_entry_has_room_for_is_refused(root: Root) -> None:
    """Before COMMAND trains for days."""
    refused(root, "even for its shortest save", env=environment(DISPATCH_ATTEMPT="x" * 120))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-framework", "hf"), "COMMAND"),
        (("-framework", "hf", "--"), "COMMAND"),
        (("-framework", "hf", "--", ""), "COMMAND"),
        (("-framework", "hf", "true"), "COMMAND"),
        (("-framework", "hf", "true", "--", "true"), "no arguments wanted"),
        (("--", "true"), "-framework"),
        (("-framework", "hf", "-linger", "1s", "--", "true"), "unknown flag"),
        (("-framework", "hf", "-once", "--", "true"), "unknown flag"),
        (("-framework", "hf", "-keep", "0", "--", "true"), "-keep"),
    ],
)
def test_usage(root: Root, arguments: Sequence[str], said: str) -> None:
    """COMMAND stands behind `--`, and nothing else does."""
    root.run("run", *arguments).failed("run: ", said, code=2)
    assert os.listdir(root.execution) == []


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DISPATCH_ATTEMPT", None),
        ("DISPATCH_ATTEMPT", ""),
        ("DISPATCH_ATTEMPT", "a/b"),
        ("DISPATCH_ATTEMPT", ".."),
        ("DISPATCH_EPOCH", None),
        ("DISPATCH_EPOCH", "1e6"),
        ("DISPATCH_EPOCH", "18446744073709551616"),
    ],
)
def test_an_execution_needs_its_attempt_and_epoch(root: Root, variable: str, value: str | None) -> None:
    """One line names the variable, and nothing is made."""
    before = root.tree()
    of(root, "true", env=environment(**{variable: value})).failed(variable, code=2)
    assert root.tree() == before


def test_attempt_and_epoch_may_be_flags(root: Root) -> None:
    """They come before the variables, which stay as they were in COMMAND's environment."""
    flags = ("-framework", "hf", "-attempt", "other.1", "-epoch", "7")
    command = ("sh", "-c", 'echo "$PUBLISHD_OUT $DISPATCH_ATTEMPT $DISPATCH_EPOCH"')
    ran = root.run("run", *flags, "--", *command)
    ran.succeeded(f"{root.path}/exec/other.1 {ATTEMPT} {EPOCH}\n".encode())


def test_what_stands_behind_the_dashes_is_command_s(root: Root) -> None:
    """Flags, help and further dashes go to it untouched."""
    of(root, "printf", "%s ", "-keep", "--", "--help", "-h", "-checkpoint=x").succeeded(b"-keep -- --help -h -checkpoint=x ")


# A store that hangs


def test_a_store_that_hangs_in_the_prune_holds_it_no_longer_than_the_drain(root: Root, tmp_path: Path) -> None:
    """The saves are published, so COMMAND's status stands; what is left is the next prune's."""
    for step in range(1, 6):
        root.publish(root.hf(step), step)
    hangs = faulty(tmp_path, "readdir", "/checkpoint-1", FOREVER)
    with Run(root, tmp_path, ("true",), "-keep", "1", "-drain", "2s", env=hangs) as running:
        running.says("pruning: the 1 latest stay")
        began = time.monotonic()
        ended = running.ended(20)
        assert time.monotonic() - began < 3.5
    assert ended.code == 0
    assert "prune: ended early after 2 s without an answer (the next prune finishes it)" in ended.err
    root.run("prune", "-keep", "1").succeeded()
    assert (root.steps, root.records) == ([5], [])


def test_a_slow_prune_is_not_cut_short(root: Root, tmp_path: Path) -> None:
    """It takes longer than the drain, but goes on."""
    for step in range(1, 102, 10):
        root.publish(root.hf(step), step)
    slow = faulty(tmp_path, "readdir", "1", "wait 60")
    with Run(root, tmp_path, ("true",), "-keep", "1", "-drain", "1s", env=slow) as running:
        running.says("pruning: the 1 latest stay")
        began = time.monotonic()
        assert running.ended().code == 0
        assert time.monotonic() - began > 1.5
    assert (root.steps, root.records) == ([101], [])


@pytest.mark.parametrize("keep", [(), ("-keep", "1")])
def test_a_store_that_hangs_at_the_end_holds_it_no_longer_than_the_drain(
    root: Root, tmp_path: Path, keep: tuple[str, ...]
) -> None:
    """COMMAND is over, the last scan never answers: -drain is the bound, and nothing is pruned after it."""
    root.publish(root.hf(1), 1)
    root.publish(root.hf(2), 2)
    variables = hanging(tmp_path / "hang.so", str(root.path), str(tmp_path / "hang"))
    command = ("env", "-u", "LD_PRELOAD", "touch", str(tmp_path / "hang"))
    with Run(root, tmp_path, command, "-drain", "2s", *keep, env=environment(**variables)) as running:
        running.says("ended: env: exit status 0")
        began = time.monotonic()
        ended = running.ended(20)
        assert time.monotonic() - began < 3.2
    assert ended.code == 1
    assert f"time ran out after 2 s: {root.path}: a scan has waited for an answer for 2 s" in ended.err
    assert root.steps == [1, 2]


# Elsewhere


def test_as_pid_1_it_reaps_forwards_and_ends_with_the_status(root: Root, tmp_path: Path) -> None:
    """In a container: orphans that end leave no zombie, SIGTERM reaches COMMAND, its status comes back."""
    require("root", None if os.geteuid() == 0 else "only root can make a PID namespace")
    code = """
signal.signal(15, lambda *_: (save(500), os._exit(3)))
def states():
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            found.append(status.read_text())
        except OSError:
            pass  # it has just ended
    return found
for _ in range(3):
    if not os.fork():
        os.fork() or os.execvp("sleep", ["sleep", "0.3"])
        os._exit(0)
    os.wait()
while any("(sleep) S" in state for state in states()):
    time.sleep(0.05)
deadline = time.monotonic() + 5
while any("(sleep)" in state for state in states()) and time.monotonic() < deadline:
    time.sleep(0.05)
Path("left").write_text(repr([state for state in states() if "(sleep)" in state]))
Path("ready").touch()
wait("never")
"""
    with Run(root, tmp_path, python(code), prefix=AS_PID_1) as running:
        running.ready()
        (first,) = children(running.process.pid)
        os.kill(first, signal.SIGTERM)
        ended = running.ended()
    assert (tmp_path / "left").read_text() == "[]"
    assert ended.code == 3
    assert root.steps == [500]


def test_on_s3_command_gets_addresses_and_keys(s3: S3Root) -> None:
    """PUBLISHD_OUT and PUBLISHD_RESUME are s3:// addresses; the keys that publishd uses are COMMAND's, too."""
    save = s3.hf(500)
    s3.publish(save, 500)
    command = ("sh", "-c", 'echo "$PUBLISHD_OUT $PUBLISHD_RESUME $AWS_ACCESS_KEY_ID"')
    ran = s3.run("run", "-framework", "hf", "-keep", "1", "--", *command)
    key = s3.environ["AWS_ACCESS_KEY_ID"]
    ran.succeeded(f"{s3.path}/{s3.execution} {s3.path}/{save} {key}\n".encode())


def test_on_s3_what_command_uploads_last_is_published(s3: S3Root, tmp_path: Path) -> None:
    """And what was published before is pruned."""
    s3.publish(s3.hf(1), 1)
    marker = tmp_path / "go"
    arguments = ["run", "-checkpoint", s3.path, *s3.flags, "-framework", "hf", "-interval", "1h", "-keep", "1", "--"]
    waits = ["sh", "-c", f"until [ -e {marker} ]; do sleep 0.05; done"]
    with subprocess.Popen([PUBLISHD, *arguments, *waits], env=s3.env(), stderr=subprocess.PIPE) as running:
        s3.hf(2)
        marker.touch()
        _, log = running.communicate(timeout=60)
    assert running.returncode == 0, log
    assert s3.steps == [2]
    with suppress(ProcessLookupError):
        running.kill()
