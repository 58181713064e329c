"""The watch as a process: its signals, its exit status, what it says, and what no trouble may make of it: alive but deaf."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from commands import ATTEMPT, EPOCH, ORDINARY_USER, Root, Watch, environment, eventually, require_program
from faulty_calls import FOREVER, faulty
from publishd.publications import Publication

SLOW = "10m"
"""An interval after which no test waits: what is published was found by the first scan or the last."""


def shell(script: str) -> tuple[str, ...]:
    """A prefix that runs the command as `"$@"` of a shell script."""
    return ("sh", "-c", script, "sh")


def published(root: Root, *steps: int) -> None:
    """Wait until these steps are published, and nothing else."""
    eventually(lambda: root.steps == list(steps), f"the publication of just {steps}")


def published_at_least(root: Root, count: int) -> None:
    """Wait until so many are."""
    eventually(lambda: len(root.pub) >= count, f"{count} publications")


def signals(pid: int, which: str) -> set[int]:
    """The signals that a process catches (SigCgt) or ignores (SigIgn), as the kernel has them."""
    with suppress(FileNotFoundError):
        status = Path(f"/proc/{pid}/status").read_text()
        mask = int(re.findall(rf"{which}:\s*(\w+)", status)[0], 16)
        return {number for number in range(1, 65) if mask >> (number - 1) & 1}
    return set()


def size(pid: int, which: str) -> int:
    """VmRSS or VmHWM of a process, in KiB."""
    return int(re.findall(rf"{which}:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())[0])


# Rule 4: markers


@pytest.mark.parametrize("kind", ["fifo", "socket", "folder", "link", "loop", "device"])
def test_rule_4_a_marker_that_is_no_file_neither_hangs_nor_fools_the_watch(
    root: Root, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stands in the marker's place, the save is not complete, the reason is said once, and other saves are published."""
    marker = root.hf(500) / "trainer_state.json"
    right = marker.rename(root.path / "right")
    monkeypatch.chdir(marker.parent)  # the whole path is too long for a socket
    with socket.socket(socket.AF_UNIX) as unix:
        make: dict[str, Callable[[], object]] = {
            "fifo": lambda: os.mkfifo(marker),
            "socket": lambda: unix.bind(marker.name),
            "folder": marker.mkdir,
            "link": lambda: marker.symlink_to(right),
            "loop": lambda: marker.symlink_to(marker),
            "device": lambda: os.mknod(marker, 0o020666, os.makedev(1, 5)),
        }
        try:
            make[kind]()
        except PermissionError:
            pytest.skip("only root may make a device")
    with Watch(root) as watch:
        ended = watch.scanned().scanned().scanned().stop().succeeded(b"")
    assert root.steps == [1, 2, 3]
    assert ended.err.count("not complete yet: ") == 1, ended


def test_rule_4_a_reason_is_said_once_and_another_one_again(root: Root) -> None:
    """Over many scans a reason is logged once per save, and each further reason once."""
    marker = root.hf(500, 400) / "trainer_state.json"
    root.hf(501, 400)
    with Watch(root) as watch:
        watch.scanned().scanned().scanned()
        marker.write_text("{")
        watch.says("does not decode").scanned()
        marker.write_text('{"global_step": 400}')
        ended = watch.scanned().scanned().stop().succeeded(b"")
    assert ended.err.count("says global_step 400") == 2 + 2, ended  # twice more at the end, as what is left
    assert ended.err.count("does not decode") == 1, ended


# Rule 3: names that do not fit


def test_rule_3_an_attempt_none_of_whose_saves_could_fit_ends_the_watch_at_once(root: Root) -> None:
    """With 116 bytes of attempt not even checkpoint-0 fits into 133 bytes of path: exit 1 with the limit in the message."""
    ended = root.run("watch", "-framework", "hf", env=environment(DISPATCH_ATTEMPT="a" * 116))
    ended.failed("133")
    assert root.pub == []


def test_rule_3_a_single_save_too_long_is_said_once_and_named_at_the_end(tmp_path: Path) -> None:
    """With 115 bytes of attempt checkpoint-0 fits and checkpoint-10 does not, which costs only that one."""
    root = Root(tmp_path / "root", "a" * 115).make()
    root.hf(0)
    root.hf(10)
    with Watch(root, env=environment(DISPATCH_ATTEMPT=root.attempt)) as watch:
        published(root, 0)
        ended = watch.scanned().scanned().stop()
    assert (ended.code, root.steps) == (1, [0, 1, 2])
    assert ended.err.count("names on this store can carry 133") == 2, ended  # when it was met, and at the end
    assert re.search("not published: .*/checkpoint-10: .*133", ended.err), ended


# Rule 7: strangers in pub/


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, lambda path: path.symlink_to("/")], ids=["file", "folder", "link"])
def test_rule_7_a_stray_in_pub_costs_no_save(root: Root, make: Callable[[Path], None]) -> None:
    """What is no entry is said once, with its path, and saves are published all the same."""
    (root.path / "pub").mkdir()
    stray = root.path / "pub" / "README"
    make(stray)
    root.hf(500)
    with Watch(root, "hf", "-keep", "5") as watch:
        watch.says("published: ")
        for step in (501, 502):
            root.hf(step)
            watch.says(f"step {step}")
        ended = watch.stop().succeeded(b"")
    assert ended.err.count(f"not a publication: {stray}") - ended.err.count("prune: not a publication") == 1, ended


# Rule 15: trouble passes, the watch stays


Heal = Callable[[], object]


def root_is_away(root: Root) -> Heal:
    away = root.path.with_name("away")
    root.path.rename(away)
    return lambda: away.rename(root.path)


def execution_is_a_file(root: Root) -> Heal:
    shutil.rmtree(root.execution)
    root.execution.touch()
    return root.execution.unlink


def pub_is_a_file(root: Root) -> Heal:
    moved = (root.path / "pub").rename(root.path / "moved")
    (root.path / "pub").touch()
    root.hf(800)

    def heal() -> None:
        (root.path / "pub").unlink()
        moved.rename(root.path / "pub")

    return heal


def pub_is_read_only(root: Root) -> Heal:
    (root.path / "pub").chmod(0o555)
    root.hf(800)
    return lambda: (root.path / "pub").chmod(0o755)


def execution_is_unreadable(root: Root) -> Heal:
    root.execution.chmod(0)
    return lambda: root.execution.chmod(0o755)


def save_is_unreadable(root: Root) -> Heal:
    save = root.hf(800)
    save.chmod(0)
    return lambda: save.chmod(0o755)


TROUBLES = [
    (root_is_away, "No such file"),
    (execution_is_a_file, "Not a directory"),
    (pub_is_a_file, "Not a directory"),
    (pub_is_read_only, "Permission denied"),
    (execution_is_unreadable, "Permission denied"),
    (save_is_unreadable, "Permission denied"),
]


@pytest.mark.parametrize(("harm", "said"), TROUBLES, ids=[harm.__name__ for harm, _ in TROUBLES])
def test_rule_15_b50_trouble_is_said_once_and_the_watch_goes_on(root: Root, harm: Callable[[Root], Heal], said: str) -> None:
    """What the store refuses is said once over many scans, and once it is mended a new save is published."""
    root.hf(500)
    with Watch(root, interval="20ms", prefix=ORDINARY_USER) as watch:
        watch.says(" published: ")
        heal = harm(root)
        watch.says(said)
        time.sleep(0.3)  # many scans; fewer on a busy machine only make the test milder
        assert watch.log.count(said) == 1, watch.log
        heal()
        root.hf(900)
        eventually(lambda: 900 in root.steps, "a publication after the trouble")
        watch.stop().succeeded(b"")


def test_b50_no_descriptors_left(root: Root) -> None:
    """While the process may open nothing more, nothing is published; as soon as it may, the save is."""
    with Watch(root) as watch:
        watch.scanned()
        pid = watch.process.pid
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
        root.hf(900)
        watch.says("Too many open files")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        eventually(lambda: 900 in root.steps, "a publication after EMFILE")
        watch.stop().succeeded(b"")


@pytest.mark.parametrize("limit", [4, 6, 8, 10, 12, 16])
def test_b50_few_descriptors_from_the_start(root: Root, limit: int) -> None:
    """With so few descriptors the watch publishes, or ends non-zero at once; it is never alive but deaf."""
    root.hf(900)
    with Watch(root, prefix=shell(f'ulimit -n {limit}; exec "$@"')) as watch:
        eventually(lambda: watch.process.poll() is not None or root.steps == [900], "either")
        if root.steps == [900]:
            watch.stop().succeeded(b"")
        assert watch.process.wait(20) == (0 if root.steps else watch.process.returncode or -1)


@pytest.mark.parametrize("limit", [12, 13, 14])
def test_b50_out_of_descriptors_at_an_import_is_one_line(root: Root, limit: int) -> None:
    """No traceback, and what to do about it."""
    ran = root.run("watch", "-framework", "hf", "-once", "-drain", "2s", prefix=shell(f'ulimit -n {limit}; exec "$@"'))
    assert "Traceback" not in ran.err
    assert ran.code == 0 or "Too many open files" in ran.err


def test_b50_json_too_deep_to_decode_costs_only_that_save(root: Root) -> None:
    """A state file nested 10,000 deep is not complete, whatever that does to the decoder."""
    (root.hf(800) / "trainer_state.json").write_text('{"a":' * 10_000 + "1" + "}" * 10_000)
    with Watch(root) as watch:
        watch.says("does not decode")
        root.hf(900)
        published(root, 900)
        watch.stop().succeeded(b"")


@pytest.mark.parametrize("stream", ["2>&-", "2>&- >&- <&-", "2>/dev/full"])
def test_b50_no_stderr_to_write_to(root: Root, stream: str) -> None:
    """Without a place for its log the watch publishes as it does with one, and never writes into a file that it opened."""
    with Watch(root, prefix=shell(f'exec "$@" {stream}')) as watch:
        root.hf(900)
        published(root, 900)
        watch.stop().succeeded(b"")
    assert {entry.stat().st_size for entry in (root.path / "pub").iterdir()} == {0}


def test_b50_stderr_is_a_pipe_whose_reader_went_away(root: Root) -> None:
    """Neither SIGPIPE nor EPIPE ends the watch."""
    reader, writer = os.pipe()
    with Watch(root, stderr=writer) as watch:
        os.close(writer)
        os.close(reader)
        root.hf(900)
        published(root, 900)
        watch.stop().succeeded(b"")


def test_b50_stderr_is_a_full_pipe_that_nobody_reads(root: Root) -> None:
    """A log that blocks holds up neither a publication nor the end."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"x" * 4096)
    try:
        with Watch(root, stderr=writer) as watch:
            for step in range(900, 905):
                root.hf(step)
            published(root, *range(900, 905))
            watch.stop(seconds=15).succeeded(b"")
    finally:
        os.close(reader)
        os.close(writer)


# Rule 16: the end


def test_rule_16_what_is_complete_is_published_before_the_exit(root: Root) -> None:
    """The wait is cut short by SIGTERM, the final scan finds the save, and nothing is printed."""
    with Watch(root, interval=SLOW) as watch:
        watch.watching()
        root.hf(500)
        watch.stop().succeeded(b"")
    assert root.steps == [500]


def test_rule_16_an_incomplete_save_is_left_and_the_exit_is_0(root: Root) -> None:
    """What is not complete at the end is not published, and is no failure."""
    root.hf(500)
    (root.hf(600) / "trainer_state.json").unlink()
    ended = root.run("watch", "-framework", "hf", "-once").succeeded(b"")
    assert root.steps == [500]
    assert "checkpoint-600: not complete: no trainer_state.json yet" in ended.err


def test_rule_16_each_complete_save_that_stays_unpublished_is_named(root: Root) -> None:
    """Where no entry can be made the exit is 1, after the time that -drain gives for trying again."""
    (root.path / "pub").mkdir(mode=0o555)
    for step in (500, 600):
        root.hf(step)
    started = time.monotonic()
    ended = root.run("watch", "-framework", "hf", "-once", "-drain", "2s", prefix=ORDINARY_USER)
    assert (ended.code, ended.out, root.pub) == (1, b"", [])
    assert time.monotonic() - started > 2
    for step in (500, 600):
        assert re.search(f"not published: {root.execution}/checkpoint-{step}: .*Permission denied", ended.err), ended


def test_rule_16_what_fails_is_tried_again_during_the_drain(root: Root, tmp_path: Path) -> None:
    """An entry that can't be made at the first two tries is made at the third, still within the drain."""
    name = Publication(EPOCH, 500, os.path.relpath(root.hf(500), root.path)).name
    ended = root.run("watch", "-framework", "hf", "-once", env=faulty(tmp_path, "open", name, errno.EIO, times=2))
    ended.succeeded(b"")
    assert root.pub == [name]
    assert ended.err.count("Input/output error") == 1, ended


def test_rule_16_a_publication_by_others_is_a_publication(root: Root) -> None:
    """A save that was published by hand, at whatever step, counts as published."""
    root.publish(root.hf(500), 7)
    root.run("watch", "-framework", "hf", "-once").succeeded(b"")
    assert root.steps == [7]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_b53_each_signal_is_one_drain(root: Root, tmp_path: Path, number: signal.Signals) -> None:
    """While the drain takes its time, SIGTERM twice and SIGCONT change nothing: all is published once, exit 0."""
    for step in range(500, 506):
        root.hf(step)
    with Watch(root, interval=SLOW, env=faulty(tmp_path, "fsync", "trainer_state.json", "wait 100")) as watch:
        for done, each in enumerate((number, signal.SIGTERM, signal.SIGCONT, signal.SIGTERM)):
            published_at_least(root, done + 1)
            watch.send(each)
        ended = watch.ended().succeeded(b"")
    assert root.steps == list(range(500, 506))
    assert ended.err.count(" published: ") == 6, ended


def test_b53_a_second_sigint_ends_it_at_once(root: Root, tmp_path: Path) -> None:
    """Whoever presses Ctrl-C twice does not want to wait for the drain: exit 1, and it is said why."""
    root.hf(500)
    with Watch(root, "hf", "-drain", "100s", env=faulty(tmp_path, "fsync", "trainer_state.json", FOREVER)) as watch:
        watch.watching().send(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            watch.process.wait(0.5)
        watch.interrupt_again(15)
        ended = watch.ended()
    assert (ended.code, ended.out) == (1, b"")
    assert "ended early: by SIGINT" in ended.err, ended


def test_one_ctrl_c_that_arrives_twice_is_one(root: Root) -> None:
    """As from `timeout -s INT`, which tells both its child and the group: what is complete is published, exit 0."""
    root.hf(500)
    with Watch(root, "hf", "-linger", "1s", interval="1h") as watch:
        watch.watching()
        root.hf(501)
        for _ in range(10):
            watch.send(signal.SIGINT)
            time.sleep(0.01)  # lest the kernel makes two of them one
        watch.ended().succeeded(b"")
    assert root.steps == [500, 501]


def test_a_flood_of_signals_is_borne(root: Root) -> None:
    """However many come, and however fast, they are as one."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    root.hf(500)
    with Watch(root, "hf", "-linger", "1500ms") as watch:
        watch.watching()
        flood = (
            "import os, sys\nfor _ in range(60_000):\n    for number in map(int, sys.argv[2:]): os.kill(int(sys.argv[1]), number)"
        )
        given = [sys.executable, "-c", flood, str(watch.process.pid), *(str(int(number)) for number in numbers)]
        floods = [subprocess.Popen(given, stderr=subprocess.DEVNULL) for _ in range(2)]
        try:
            ended = watch.ended()
        finally:
            for flooding in floods:
                flooding.kill()
                flooding.wait()
    # Python itself may warn that it could not note that many.
    assert (ended.code, ended.out, root.steps) == (0, b"", [500]), ended
    assert "RecursionError" not in ended.err


@pytest.mark.parametrize(("number", "name"), [(signal.SIGHUP, "HUP"), (signal.SIGINT, "INT")])
def test_b53_what_the_shell_has_ignored_stays_ignored(root: Root, number: signal.Signals, name: str) -> None:
    """Under nohup SIGHUP, and with `&` in a script SIGINT, is not the watch's to heed."""
    with Watch(root, prefix=shell(f'trap "" {name}; exec "$@"')) as watch:
        watch.scanned().send(number).send(number).scanned()
        assert number in signals(watch.process.pid, "SigIgn")
        watch.stop().succeeded(b"")


def test_b53_nohup_and_background_are_what_shells_make_of_them(root: Root) -> None:
    """`nohup publishd watch … &` in a script survives SIGHUP and SIGINT, and ends at SIGTERM."""
    with Watch(root, prefix=shell('nohup "$@" & trap "kill -TERM $!" TERM; wait $!; wait $!')) as shell_watch:
        shell_watch.scanned()
        pid = int(Path(f"/proc/{shell_watch.process.pid}/task/{shell_watch.process.pid}/children").read_text())
        os.kill(pid, signal.SIGHUP)
        os.kill(pid, signal.SIGINT)
        shell_watch.scanned().stop().succeeded(b"")


def test_b53_sigterm_is_heeded_even_where_it_was_ignored(root: Root) -> None:
    """No parent can make a watch deaf to SIGTERM."""
    with Watch(root, interval=SLOW, prefix=shell('trap "" TERM; exec "$@"')) as watch:
        watch.watching()
        root.hf(500)
        watch.stop().succeeded(b"")
    assert root.steps == [500]


def test_rule_16_a_sigterm_before_the_watch_has_begun_is_heeded(root: Root) -> None:
    """From the moment the handler stands, long before the first scan, a SIGTERM gets its final scan."""
    root.hf(500)
    with Watch(root, interval=SLOW) as watch:
        eventually(lambda: signal.SIGTERM in signals(watch.process.pid, "SigCgt"), "the handler")
        watch.stop().succeeded(b"")
    assert root.steps == [500]


def test_rule_16_no_moment_of_a_sigterm_gives_a_traceback(root: Root) -> None:
    """Whenever it comes, the process ends by it (before Python runs any of ours) or with its final scan."""
    ended = []
    for milliseconds in range(0, 160, 10):
        with Watch(root, interval=SLOW) as watch:
            time.sleep(milliseconds / 1000)
            ended.append(watch.stop())
    assert {one.code for one in ended} <= {0, -signal.SIGTERM}, ended
    assert not any("Traceback" in one.err for one in ended), ended


def test_rule_16_linger_scans_every_second_after_the_signal(root: Root) -> None:
    """With -linger a save that completes after SIGTERM is published, and so is the next, while the watch stays."""
    with Watch(root, "hf", "-linger", "10m", interval=SLOW) as watch:
        watch.watching().send(signal.SIGTERM)
        for steps in ([500], [500, 501], [500, 501, 502]):
            root.hf(steps[-1])
            published(root, *steps)
            assert watch.process.poll() is None


def test_rule_16_linger_ends(root: Root) -> None:
    """After -linger comes the final scan; both together are bounded."""
    with Watch(root, "hf", "-linger", "1s", interval=SLOW) as watch:
        watch.watching()
        started = time.monotonic()
        watch.stop(seconds=20).succeeded(b"")
    assert time.monotonic() - started >= 1


def test_rule_16_once_scans_once_and_ends(root: Root) -> None:
    """-once publishes what is complete and waits for no signal."""
    for step in (500, 501):
        root.hf(step)
    ended = root.run("watch", "-framework", "hf", "-once", "-interval", SLOW).succeeded(b"")
    assert root.steps == [500, 501]
    assert ended.err.count("published: ") == 2


HANGS = [
    ("open", ATTEMPT, ""),
    ("readdir", ATTEMPT, ""),
    ("open", "checkpoint-500", "checkpoint-500"),
    ("open", "trainer_state.json", "checkpoint-500"),
    ("read", "trainer_state.json", "checkpoint-500"),
    ("fsync", "trainer_state.json", "not published: .*checkpoint-500"),
    ("fsync", "/pub", "not published: .*checkpoint-500"),
    ("open", "pub", ""),
    ("open", "root", ""),
]


@pytest.mark.parametrize(("call", "path", "named"), HANGS, ids=[f"{call}-{path.strip('/')}" for call, path, _ in HANGS])
def test_rule_16_the_drain_is_a_deadline_however_the_file_system_hangs(
    root: Root, tmp_path: Path, call: str, path: str, named: str
) -> None:
    """With a call that never returns the watch ends within -drain and a little, exit 1, and names what is unpublished."""
    root.hf(500)
    with Watch(root, "hf", "-drain", "500ms", env=faulty(tmp_path, call, path, FOREVER)) as watch:
        eventually(lambda: signal.SIGTERM in signals(watch.process.pid, "SigCgt"), "the handler")
        ended = watch.stop(seconds=10)
    assert (ended.code, ended.out) == (1, b""), ended
    assert "time ran out after 0.5 s" in ended.err, ended
    assert re.search(named, ended.err), ended


def test_rule_16_a_save_that_was_never_judged_is_not_called_incomplete(root: Root, tmp_path: Path) -> None:
    """Where the final scan got stuck before it, nothing is known of a save, and it says so, naming it."""
    root.hf(500)
    root.hf(600)
    ended = root.run(
        "watch", "-framework", "hf", "-once", "-drain", "500ms", env=faulty(tmp_path, "open", "checkpoint-600", FOREVER)
    )
    assert ended.code == 1
    assert re.search(f"{root.execution}/checkpoint-500", ended.err), ended
    assert "not complete" not in ended.err, ended


def test_rule_15_errors_of_two_saves_are_both_said(root: Root, tmp_path: Path) -> None:
    """That one save can't be read hides no other that can't either."""
    root.hf(500)
    root.hf(600)
    ended = root.run(
        "watch", "-framework", "hf", "-once", "-drain", "500ms", env=faulty(tmp_path, "read", "trainer_state.json", errno.EIO)
    )
    assert (ended.code, root.pub) == (1, [])
    for step in (500, 600):
        assert re.search(f"checkpoint-{step}.*Input/output error", ended.err), ended


# B52: many saves, little time


def test_b52_a_thousand_saves_are_published_newest_first_within_the_drain(root: Root, tmp_path: Path) -> None:
    """1,000 complete saves at SIGTERM are published before the exit, in the order of their steps, the greatest first."""
    trace = tmp_path / "trace"
    strace = (require_program("strace", "strace"), "-D", "-f", "-qq", "-o", str(trace), "-e", "trace=openat", "--seccomp-bpf")
    root.hf(1)
    with Watch(root, "hf", "-no-sync", "-drain", "100s", interval=SLOW, prefix=strace) as watch:
        watch.says("published: ")  # the first scan is over
        for step in range(1000, 2000):
            root.hf(step)
        watch.stop(seconds=100).succeeded(b"")
    assert root.steps == [1, *range(1000, 2000)]
    created = [int(step) for step in re.findall(rf'"{EPOCH:020}-(\d+)-\w+", \S*O_EXCL', trace.read_text())]
    assert created == [1, *range(1999, 999, -1)]


def test_b52_killed_amid_the_drain_the_newest_are_published_whole_and_once_does_the_rest(root: Root) -> None:
    """After SIGKILL the published saves are the newest and complete; watch -once publishes the others."""
    root.hf(1)
    with Watch(root, "hf", interval=SLOW) as watch:
        watch.says("published: ")  # the first scan is over
        for step in range(1000, 2000):
            root.hf(step)
        watch.send(signal.SIGTERM)
        published_at_least(root, 50)
        watch.stop(signal.SIGKILL)
    first, *done = root.steps
    assert first == 1
    assert done == list(range(2000 - len(done), 2000))
    root.run("resolve", "-verify").succeeded(os.fsencode(root.execution / "checkpoint-1999\n"))
    root.run("watch", "-framework", "hf", "-once", "-no-sync", "-drain", "100s", timeout=110).succeeded(b"")
    assert root.steps == [1, *range(1000, 2000)]


# B54: the parent goes


def test_b54_with_parent_the_watch_ends_after_its_parent(root: Root) -> None:
    """When the shell is killed the watch makes its last scan, publishes what it finds, and ends."""
    script = shell('"$@" & echo $!; wait')
    with Watch(root, "hf", "-with-parent", interval=SLOW, prefix=script) as shell_watch:
        shell_watch.watching()
        assert shell_watch.process.stdout
        pid = int(shell_watch.process.stdout.readline())
        root.hf(500)
        shell_watch.process.kill()
        shell_watch.process.wait()
        try:
            eventually(lambda: not signals(pid, "SigCgt"), "the end of the watch")
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert "the parent is gone" in shell_watch.log
    assert root.steps == [500]


def test_b54_without_the_flag_the_watch_outlives_its_parent(root: Root) -> None:
    """A sidecar that was started by a wrapper that ends goes on."""
    with Watch(root, prefix=shell('"$@" & echo $!; wait')) as shell_watch:
        shell_watch.watching()
        assert shell_watch.process.stdout
        pid = int(shell_watch.process.stdout.readline())
        try:
            shell_watch.process.kill()
            shell_watch.process.wait()
            time.sleep(1.5)  # in which a watch that asks for its parent every second has asked
            root.hf(500)
            published(root, 500)
            assert signals(pid, "SigCgt")
        finally:
            os.kill(pid, signal.SIGKILL)


# B55: state files of a long training


def test_b55_large_state_files_cost_the_watch_neither_memory_nor_its_ears(root: Root) -> None:
    """Five state files of 100 MB: SIGTERM during the read is heeded, all are published, and the watch stays below 100 MB."""
    for step in range(500, 505):
        with (root.hf(step) / "trainer_state.json").open("w") as state:
            state.write(f'{{"log_history": {[1.5] * 10_000}, "x": "')
            state.write("x" * 100_000_000)
            state.write(f'", "global_step": {step}}}')
    with Watch(root, "hf", "-no-sync", "-drain", "100s", interval=SLOW) as watch:
        pid = watch.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        eventually(children.read_text, "a child that decodes")
        watch.send(signal.SIGTERM)
        eventually(lambda: 501 in root.steps, "some publications")
        peak = size(pid, "VmHWM")
        watch.ended(100).succeeded(b"")
    assert root.steps == list(range(500, 505))
    assert peak < 100_000, peak


# Rule 10: -keep on watch


def test_keep_prunes_to_the_n_latest_after_publishing(root: Root) -> None:
    """With -keep 2 the two latest publications and their saves are left at the end, beside what is unpublished."""
    (root.hf(499) / "trainer_state.json").unlink()
    with Watch(root, "hf", "-keep", "2") as watch:
        for step in range(500, 506):
            root.hf(step)
            watch.says(f"step {step}")
        ended = watch.stop().succeeded(b"")
    assert root.steps == [504, 505]
    assert sorted(save.name for save in root.execution.iterdir()) == ["checkpoint-499", "checkpoint-504", "checkpoint-505"]
    assert root.records == []
    assert ended.err.count("pruned: ") == 4, ended


def test_keep_is_true_at_the_end_of_once(root: Root) -> None:
    """With -once and -keep the watch publishes all, then prunes, before it ends."""
    for step in range(500, 510):
        root.hf(step)
    root.run("watch", "-framework", "hf", "-once", "-keep", "1").succeeded(b"")
    assert root.steps == [509]
    assert os.listdir(root.execution) == ["checkpoint-509"]


# Rule 17: the folder


def test_rule_17_the_folder_may_come_later(root: Root) -> None:
    """A watch that starts before training has made anything publishes what appears, and made nothing itself until then."""
    shutil.rmtree(root.path / "exec")
    with Watch(root) as watch:
        watch.watching()
        assert os.listdir(root.path) == []
        root.hf(500)
        published(root, 500)
        watch.stop().succeeded(b"")


def test_rule_17_a_folder_that_never_came_is_no_failure(root: Root) -> None:
    """A training that ended before it made its folder left nothing to publish: exit 0 at once, and a hint."""
    root.execution.rmdir()
    ended = root.run("watch", "-framework", "hf", "-once", timeout=15).succeeded(b"")
    assert "nothing found: " in ended.err.splitlines()[-1]


def test_rule_17_the_folder_may_be_a_link(root: Root, tmp_path: Path) -> None:
    """Saves below a linked folder are published under the path that the trainer uses."""
    root.execution.rmdir()
    root.execution.symlink_to(tmp_path / "scratch")
    (tmp_path / "scratch").mkdir()
    with Watch(root) as watch:
        root.hf(500)
        published(root, 500)
        watch.stop().succeeded(b"")
    assert root.resolved() == "exec/1.4101.0/checkpoint-500"


def test_rule_17_the_link_may_lead_nowhere_yet(root: Root, tmp_path: Path) -> None:
    """A link that stands before the folder it leads to is waited for like any folder, without a complaint."""
    root.execution.rmdir()
    root.execution.symlink_to(tmp_path / "scratch")
    with Watch(root) as watch:
        watch.watching()
        (tmp_path / "scratch").mkdir()
        root.hf(500)
        published(root, 500)
        ended = watch.stop().succeeded(b"")
    assert "trying again" not in ended.err, ended


def test_rule_17_the_folder_may_vanish_and_come_back(root: Root) -> None:
    """Moved away and back, and removed and made anew, it is watched on; what was published stays published once."""
    root.hf(500)
    with Watch(root) as watch:
        watch.says("step 500")
        away = root.execution.rename(root.path / "away")
        time.sleep(0.3)  # scans that miss it; fewer on a busy machine only make the test milder
        away.rename(root.execution)
        root.hf(501)
        watch.says("step 501")
        shutil.rmtree(root.execution)
        time.sleep(0.3)
        root.hf(502)
        ended = watch.says("step 502").stop().succeeded(b"")
    assert root.steps == [500, 501, 502]
    assert ended.err.count(" published: ") == 3, ended


# Rule 18: epochs


def test_rule_18_a_greater_epoch_in_pub_is_said_once(root: Root) -> None:
    """Whoever publishes below an epoch that is already there is told so, loudly and once, and published all the same."""
    root.publish("exec/1.4102.0/checkpoint-9", 9, EPOCH + 1)
    with Watch(root) as watch:
        ended = watch.scanned().scanned().stop().succeeded(b"")
    assert len(root.pub) == 3
    assert ended.err.count(f"epoch {EPOCH + 1} has published: ") == 1, ended
    assert ended.err.count("WRONG EPOCH?") == 1, ended


@pytest.mark.parametrize("other", [EPOCH - 1, EPOCH + 1])
def test_rule_18_own_saves_under_another_epoch_are_said_once_and_settled(root: Root, other: int) -> None:
    """This attempt's save that stands in pub/ under another epoch is not published again, which is said loudly."""
    root.publish(root.hf(500), 500, other)
    with Watch(root) as watch:
        ended = watch.scanned().scanned().stop().succeeded(b"")
    assert root.steps == sorted([500, 1, 2], key=lambda step: (other if step == 500 else EPOCH, step))
    assert ended.err.count(f"its saves were published as epoch {other}") == 1, ended


@pytest.mark.parametrize("epoch", [EPOCH - 1, EPOCH])
def test_rule_18_the_usual_is_not_said(root: Root, epoch: int) -> None:
    """An earlier execution's publications, and this one's own after a restart of the watch, are no cause for alarm."""
    attempt = ATTEMPT if epoch == EPOCH else "1.4100.0"
    root.publish(f"exec/{attempt}/checkpoint-500", 500, epoch)
    assert "WRONG" not in root.run("watch", "-framework", "hf", "-once").succeeded(b"").err


# Rules 9 and 14: what a steady scan costs


def settled(root: Root, count: int) -> None:
    """So many saves that are published already."""
    for step in range(count):
        save = root.execution / f"checkpoint-{step}"
        save.mkdir()
        root.publish(save, step)


def test_rule_14_a_scan_of_settled_saves_is_one_listing(root: Root, tmp_path: Path) -> None:
    """With 10,000 settled saves a scan opens the folder afresh, lists it once, and opens or asks for none of the saves."""
    settled(root, 10_000)
    calls = "trace=openat,open,stat,newfstatat,statx,lstat,getdents64"
    trace = tmp_path / "trace"
    strace = (require_program("strace", "strace"), "-D", "-f", "-qq", "-o", str(trace), "-e", calls)
    with Watch(root, prefix=strace) as watch:
        eventually(lambda: trace.exists() and trace.read_text().count(f'"{ATTEMPT}"') >= 4, "four scans")
        resident = size(watch.process.pid, "VmRSS")
        watch.stop().succeeded(b"")
    lines = [line for line in trace.read_text().splitlines() if "resumed" not in line]
    starts = [number for number, line in enumerate(lines) if f'"{ATTEMPT}"' in line]
    one_scan = [re.sub(r"^\d+\s+(\w+)\(.*", r"\1", line) for line in lines[starts[1] : starts[2]]]
    assert [call for call in one_scan if call != "getdents64"].count("openat") == 3, one_scan  # the root, exec/, the folder
    assert set(one_scan) <= {"openat", "getdents64", "newfstatat"}
    assert not re.search(r'"[^"]*checkpoint-\d', "\n".join(lines))
    assert resident <= 40_000, resident


TEN_THOUSAND_SCANS = """
import asyncio, sys, uvloop
from publishd.frameworks import FRAMEWORKS
from publishd.stores.posix import PosixStore
from publishd.watch import Watcher, WatchOptions

class Counted(PosixStore):
    scans = 0

    async def list(self, folder, prefix=""):
        if folder == "exec/1.4101.0":
            self.scans += 1
            if self.scans in (1000, 10_000):
                print(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])
            if self.scans == 10_000:
                stop.set()
        return await super().list(folder, prefix)

async def watch():
    global stop
    stop = asyncio.Event()
    options = WatchOptions("1.4101.0", 1, interval=1e-6)
    await Watcher(Counted(sys.argv[1]), FRAMEWORKS["hf"], options, stop).run()

uvloop.run(watch())
"""


def test_ten_thousand_scans_take_no_more_memory_than_one_thousand(root: Root) -> None:
    """With settled and incomplete saves in its folder the watch keeps nothing of what it has seen."""
    settled(root, 50)
    (root.hf(100) / "trainer_state.json").write_text("{")
    (root.hf(101) / "trainer_state.json").unlink()
    command = [sys.executable, "-c", TEN_THOUSAND_SCANS, str(root.path)]
    early, late = subprocess.run(command, capture_output=True, check=True, timeout=100).stdout.split()
    assert int(late) - int(early) < 1000, (early, late)
