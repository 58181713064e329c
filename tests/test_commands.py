"""The commands as their users run them: answers to the byte, exit codes, and one line for whatever goes wrong."""

from __future__ import annotations

import array
import ast
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import termios
import unicodedata
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import publishd
from commands import (
    ATTEMPT,
    BIN,
    EPOCH,
    ORDINARY_USER,
    PUBLISHD,
    Job,
    Ran,
    Root,
    Watch,
    environment,
    eventually,
    require,
    require_program,
    run,
)
from preload import Pause, faults

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMANDS = ("resolve", "watch", "publish", "prune", "list")
ABOVE = EPOCH + 1


def published(root: Root, *steps: int) -> Root:
    for step in steps:
        root.publish(root.hf(step), step)
    return root


def unchanged_by(root: Root, command: str, *arguments: str | os.PathLike[str], **options: object) -> Ran:
    """Run a command that must leave the root as it was."""
    before = root.tree()
    ran = root.run(command, *arguments, **options)
    assert root.tree() == before
    return ran


def started(root: Root, command: str, *arguments: str | Path, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a command in the background."""
    return subprocess.Popen(
        [PUBLISHD, command, "-checkpoint", root.path, *arguments],
        env=env or environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def ended(process: subprocess.Popen[bytes]) -> Ran:
    """Wait for the end of a command."""
    out, err = process.communicate(timeout=60)
    return Ran(process.returncode, out, err)


# Answers


def test_resolve_prints_the_absolute_path_of_the_latest_save(root: Root) -> None:
    """The answer is the path and a newline, and reading leaves no trace."""
    published(root, 500, 1000)
    unchanged_by(root, "resolve").succeeded(b"%s/exec/1.4101.0/checkpoint-1000\n" % bytes(root.path))


def test_resolve_verify_prints_the_newest_complete_save_and_names_those_passed_over(root: Root) -> None:
    """Rule 8: a save that is gone, one that is torn and one whose marker is wrong are each named on stderr."""
    published(root, 500, 600, 700, 800)
    shutil.rmtree(root.execution / "checkpoint-800")
    (root.execution / "checkpoint-700" / "checkpoint-is-incomplete.txt").touch()
    (root.execution / "checkpoint-600" / "trainer_state.json").write_text('{"global_step": 60')
    ran = root.run("resolve", "-verify").succeeded(b"%s\n" % bytes(root.execution / "checkpoint-500"))
    assert [line.split(": ")[2].rpartition("-")[2] for line in ran.err.splitlines()] == ["800", "700", "600"]


def test_resolve_verify_fails_where_no_publication_is_left(root: Root) -> None:
    """Rule 8: publications, but none whose save is there and complete, are an error; none at all are not."""
    root.run("resolve", "-verify").succeeded(b"")
    published(root, 500)
    shutil.rmtree(root.execution / "checkpoint-500")
    ran = unchanged_by(root, "resolve", "-verify")
    assert (ran.code, ran.out) == (1, b"")


def test_resolve_verify_only_looks_whether_a_save_of_no_framework_is_there(root: Root) -> None:
    """Rule 8: what was published by hand under another name must exist, no more."""
    save = root.execution / "final"
    save.mkdir()
    root.publish(save, 9)
    root.run("resolve", "-verify").succeeded(b"%s\n" % bytes(save))


def test_resolve_refuses_a_save_that_the_trainer_marks_as_torn(root: Root) -> None:
    """Trainer's own sign in the latest save stops resolve, which says how to go on."""
    published(root, 400, 500)
    (root.execution / "checkpoint-500" / "checkpoint-is-incomplete.txt").touch()
    unchanged_by(root, "resolve").failed("checkpoint-500", "checkpoint-is-incomplete.txt", "-verify")


def test_resolve_fails_and_names_the_latest_save_when_it_is_gone(root: Root) -> None:
    """Rule 8: an older publication is never a silent substitute."""
    published(root, 400, 500)
    shutil.rmtree(root.execution / "checkpoint-500")
    unchanged_by(root, "resolve").failed(f"{root.execution}/checkpoint-500", "gone")


def test_resolve_lists_once_more_when_the_save_is_gone(root: Root, tmp_path: Path) -> None:
    """Rule 8: a publication withdrawn between the two listings is not missed, the one that is the latest now is printed."""
    published(root, 400, 500)
    pause = Pause("fdopendir", root.execution, tmp_path / "pause")
    with started(root, "resolve", env=pause.environment) as process:
        pause.reached()
        shutil.rmtree(root.execution / "checkpoint-500")
        (root.path / "pub" / root.pub[-1]).unlink()
        pause.go_on()
        ran = ended(process)
    ran.succeeded(b"%s\n" % bytes(root.execution / "checkpoint-400"))


def test_list_prints_every_publication_latest_last(root: Root) -> None:
    """Epoch, step, path and presence, separated by tabs, one line each."""
    published(root, 500, 1000)
    root.publish("exec/9.1.0/step-7", 7, ABOVE)
    unchanged_by(root, "list").succeeded(
        b"1000000\t500\texec/1.4101.0/checkpoint-500\tpresent\n"
        b"1000000\t1000\texec/1.4101.0/checkpoint-1000\tpresent\n"
        b"1000001\t7\texec/9.1.0/step-7\tgone\n"
    )


def test_prune_prints_the_saves_it_removed_oldest_first(root: Root) -> None:
    """What was removed is named by its absolute path, and nothing else is printed."""
    published(root, 1, 2, 3)
    gone = b"".join(b"%s\n" % bytes(root.execution / f"checkpoint-{step}") for step in (1, 2))
    root.run("prune", "-keep", "1").succeeded(gone)
    assert sorted(os.listdir(root.execution)) == ["checkpoint-3"]


def test_publish_prints_nothing_on_stdout(root: Root) -> None:
    """The entry is empty and made; what happened is said on stderr."""
    save = root.hf(500)
    ran = root.run("publish", save, "500").succeeded(b"").said_one_line("published", str(save))
    assert ran.err.startswith("publishd publish: ")
    assert root.pub == ["00000000000001000000-00000000000000000500-MV4GKYZPGEXDIMJQGEXDAL3DNBSWG23QN5UW45BNGUYDA"]
    assert (root.path / "pub" / root.pub[0]).read_bytes() == b""


def test_json_has_one_object_per_publication(root: Root) -> None:
    """resolve, list and prune print the same five fields, in the same order."""
    published(root, 1, 2)
    expected = [
        {"epoch": EPOCH, "step": step, "path": f"exec/{ATTEMPT}/checkpoint-{step}", "save": f"{save}", "present": True}
        for step in (1, 2)
        for save in [root.execution / f"checkpoint-{step}"]
    ]
    assert root.run("list", "-json").succeeded().json == expected
    assert root.run("resolve", "-json").succeeded().json == expected[1:]
    assert root.run("prune", "-keep=1", "-dry-run", "-json").succeeded().json == expected[:1]
    pruned = root.run("prune", "-keep=1", "-json").succeeded().json
    assert pruned == [{**expected[0], "present": False}]
    assert list(pruned[0]) == ["epoch", "step", "path", "save", "present"]


@pytest.mark.parametrize("arguments", [["resolve"], ["list"], ["prune", "-keep", "1"], ["prune", "-keep", "1", "-dry-run"]])
def test_json_of_nothing_is_no_line(root: Root, arguments: list[str]) -> None:
    """Where there is nothing to answer stdout stays empty, in JSON too."""
    unchanged_by(root, *arguments, "-json").succeeded(b"")


# Help, version, flags


@pytest.mark.parametrize("flag", ["-h", "-help", "--help"])
def test_help_ends_with_the_exit_status(flag: str) -> None:
    """Help of the program goes to stdout, names every command, and ends with the three exit codes."""
    ran = run(flag).succeeded()
    out = ran.out.decode()
    assert all(f"\n  {command} " in out for command in COMMANDS)
    assert [line.split()[0] for line in out.partition("\nEXIT STATUS\n")[2].splitlines()] == ["0", "1", "2"]
    assert ran.err == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_ends_with_the_exit_status(command: str) -> None:
    """It wins over whatever else is missing or wrong on the command line."""
    out = run(command, "-nonsense", "--help", env=environment(DISPATCH_ATTEMPT=None)).succeeded().out.decode()
    assert f"usage: publishd {command} " in out
    assert [line.split()[0] for line in out.partition("\nEXIT STATUS\n")[2].splitlines()] == ["0", "1", "2"]


@pytest.mark.parametrize("program", ["publishd", "publish"])
def test_both_programs_are_the_same(root: Root, program: str) -> None:
    """`publish` is the same program under another name, down to its messages."""
    path = str(BIN / program)
    run("--version", program=path).succeeded(b"publishd %s\n" % publishd.__version__.encode())
    root.run("publish", root.hf(5), "5", program=path).succeeded()
    root.run("resolve", "-chek", program=path).failed("publishd resolve: unknown flag", code=2)


def test_the_module_is_the_same_program(root: Root) -> None:
    """`python -m publishd` answers as the installed scripts do."""
    published(root, 5)
    run("-m", "publishd", "resolve", "-checkpoint", root.path, program=sys.executable).succeeded(
        b"%s\n" % bytes(root.execution / "checkpoint-5")
    )


@pytest.mark.parametrize("keep", [["-keep", "1"], ["-keep=1"], ["--keep", "1"], ["--keep=1"]])
def test_flags_have_four_spellings(root: Root, keep: list[str]) -> None:
    """One dash or two, a space or an equals sign."""
    published(root, 1, 2)
    root.run("prune", *keep).succeeded()
    assert root.steps == [2]


def test_flags_may_follow_the_arguments(root: Root) -> None:
    """Flags and arguments mix; `--` ends the flags, so that a save may begin with a dash."""
    save = root.hf(5, folder="-checkpoint-5")
    run("publish", "--no-sync", "-checkpoint", root.path, "--", save.name, "5", cwd=root.execution).succeeded()
    run("publish", save, "6", "-checkpoint", root.path, "-epoch", "7", "-attempt", "other").succeeded()
    assert [name[:41] for name in root.pub] == [f"{7:020d}-{6:020d}", f"{EPOCH:020d}-{5:020d}"]


def test_the_execution_may_be_given_by_flags_alone(root: Root) -> None:
    """-attempt and -epoch stand in for the environment's variables."""
    env = environment(DISPATCH_ATTEMPT=None, DISPATCH_EPOCH=None)
    root.run("publish", "-attempt", "1.2.3", "-epoch", "18446744073709551615", root.hf(5), "5", env=env).succeeded()
    assert root.pub[0].startswith("18446744073709551615-")


# The root


def test_b69_a_fresh_root_is_nothing_yet(root: Root) -> None:
    """A root with no entry: exit 0, empty stdout, and nothing is created, with or without exec/ and an empty pub/."""
    unchanged_by(root, "resolve").succeeded(b"")
    shutil.rmtree(root.path / "exec")
    unchanged_by(root, "resolve").succeeded(b"")
    (root.path / "pub").mkdir()
    unchanged_by(root, "resolve").succeeded(b"")


def test_a_root_written_in_any_way_is_that_root(root: Root) -> None:
    """A root is made absolute and otherwise printed as written; slashes at its end are not doubled."""
    published(root, 5)
    save = f"exec/{ATTEMPT}/checkpoint-5"
    link = root.path.parent / "link"
    link.symlink_to(root.path)
    above = root.path.parent
    for written, printed in {
        "root": f"{above}/root",
        "./root/": f"{above}/./root",
        f"{root.path}///": f"{root.path}",
        f"//{root.path}": f"//{root.path}",
        "root/exec/..": f"{above}/root/exec/..",
        "link": f"{above}/link",
        f"{link}/exec/../": f"{link}/exec/..",
    }.items():
        run("resolve", "-checkpoint", written, cwd=above).succeeded(f"{printed}/{save}\n".encode())
    run("resolve", "-checkpoint", ".", cwd=root.path).succeeded(f"{root.path}/./{save}\n".encode())
    run("resolve", "-checkpoint", "..", cwd=root.path / "exec").succeeded(f"{root.path}/exec/../{save}\n".encode())


def test_dots_in_the_root_are_the_kernels_to_resolve(root: Root, tmp_path: Path) -> None:
    """`..` behind a link leads out of the link's target, not back to where the link stands."""
    published(root, 5)
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "link").symlink_to(root.path / "exec")
    written = f"{tmp_path}/far/link/.."
    run("resolve", "-checkpoint", written).succeeded(f"{written}/exec/{ATTEMPT}/checkpoint-5\n".encode())


@pytest.mark.parametrize("written", ["/", "///", "/."])
def test_the_root_of_the_file_system_may_be_asked(written: str) -> None:
    """`/` is a folder like another: with no pub/ in it, there is nothing yet."""
    require("bare", "there is a /pub on this machine" if os.path.lexists("/pub") else None)
    run("resolve", "-checkpoint", written).succeeded(b"")
    assert not os.path.lexists("/pub")


def test_a_checkpoint_root_may_be_the_root_of_the_file_system(root: Root) -> None:
    """In a container whose `/` is the checkpoint root, answers have one slash in front, and SAVE is found below it."""
    require("root", None if os.geteuid() == 0 else "chroot needs root")
    root.hf(5)
    save = f"/exec/{ATTEMPT}/checkpoint-5"
    inside = (
        "import asyncio, concurrent.futures.thread, os, sys, publishd.cli, publishd.stores.posix, publishd.signals\n"
        "os.chroot(sys.argv[1]); os.chdir('/')\n"
        "publishd.cli.main(sys.argv[2:], publishd.signals.Signals().install())"
    )
    chrooted = (sys.executable, "-c", inside, str(root.path))
    run("-checkpoint", "/", save, "5", program="publish", prefix=chrooted).succeeded()
    run("-checkpoint", "/", program="resolve", prefix=chrooted).succeeded(f"{save}\n".encode())


def test_a_deleted_current_folder_does_not_matter_to_absolute_paths(root: Root, tmp_path: Path) -> None:
    """Only a relative root needs the current folder."""
    save = root.hf(5)
    gone = tmp_path / "gone"
    prefix = ("sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh")
    for arguments in (["publish", save, "5"], ["resolve"], ["list"], ["prune", "-keep", "1"]):
        gone.mkdir()
        root.run(*arguments, cwd=gone, prefix=prefix).succeeded()
    gone.mkdir()
    run("resolve", "-checkpoint", "root", cwd=gone, prefix=prefix).failed("current folder", code=2)


@pytest.mark.parametrize("damage", ["missing", "file", "dangling", "long"])
def test_a_root_that_is_not_there_is_an_error(root: Root, damage: str) -> None:
    """Rule 6: a missing root is never 'nothing yet', and no command makes one."""
    path = root.path.parent / ("x" * 300 if damage == "long" else "other")
    if damage == "file":
        path.touch()
    if damage == "dangling":
        path.symlink_to("nowhere")
    before = Root(root.path.parent).tree()
    for command in (["resolve"], ["list"], ["prune", "-keep", "1"], ["publish", f"{path}/exec/a/s", "1"]):
        run(*command, "-checkpoint", path).failed(path.name)
    assert Root(root.path.parent).tree() == before


@pytest.mark.parametrize("folder", ["", "pub"])
def test_a_folder_that_cannot_be_read_is_an_error(root: Root, folder: str) -> None:
    """Rule 6: no right to look is not 'nothing yet'."""
    published(root, 5)
    (root.path / folder).chmod(0o311)
    try:
        for command in (["resolve"], ["resolve", "-verify"], ["list"], ["prune", "-keep", "1"]):
            root.run(*command, prefix=ORDINARY_USER).failed("Permission denied")
    finally:
        (root.path / folder).chmod(0o755)
    assert root.steps == [5]


@pytest.mark.parametrize("damage", ["file", "dangling", "link", "loop"])
def test_a_pub_that_is_no_folder_is_an_error(root: Root, damage: str) -> None:
    """Rule 6: pub/ is a folder or absent; anything else, even a link to a folder, is doubt."""
    pub = root.path / "pub"
    if damage == "file":
        pub.touch()
    else:
        pub.symlink_to({"dangling": "nowhere", "link": "exec", "loop": "pub"}[damage])
    save = root.hf(5)
    for command in (["resolve"], ["list"], ["prune", "-keep", "1"], ["publish", save, "5"]):
        unchanged_by(root, *command).failed(str(pub))


@pytest.mark.parametrize("target", ["nowhere", "file"])
def test_a_save_behind_a_link_that_leads_nowhere_is_gone(root: Root, target: str) -> None:
    """Rules 8 and 10: -verify passes over it, list says so, prune does not count it and does not stop."""
    published(root, 1, 2)
    root.publish("exec/9.1.0/step-7", 7, ABOVE)
    (root.path / "file").touch()
    (root.path / "exec" / "9.1.0").symlink_to(root.path / target)
    assert root.run("list").succeeded().out.endswith(b"\tgone\n")
    root.run("resolve").failed("9.1.0/step-7")
    root.run("resolve", "-verify").succeeded(b"%s\n" % bytes(root.execution / "checkpoint-2"))
    root.run("prune", "-keep", "1").succeeded(b"%s\n" % bytes(root.execution / "checkpoint-1"))


# Publishing by hand


def test_publishing_twice_is_success_and_touches_nothing(root: Root) -> None:
    """Rule 1: 'it already exists' is said on stderr, exit 0."""
    save = root.hf(5)
    root.run("publish", save, "5").succeeded()
    unchanged_by(root, "publish", save, "5").succeeded(b"").said_one_line("already exists")


def test_b22_many_publishers_at_once(root: Root) -> None:
    """Rule 1: of 30 publishers and 3 watches of one save all succeed, and one entry is there, and no temporary file."""
    save = root.hf(1200)
    with Watch(root) as one, Watch(root) as two, Watch(root) as three:
        for publisher in [started(root, "publish", save, "1200") for _ in range(30)]:
            ended(publisher).succeeded(b"").said_one_line(str(save))
        for watch in (one, two, three):
            watch.watching().stop().succeeded(b"")
    assert root.steps == [1200]
    assert sorted(os.listdir(root.path)) == ["exec", "prune", "pub"]


def test_a_save_may_be_named_in_any_way(root: Root, tmp_path: Path) -> None:
    """Absolute, relative, with a slash at its end, or through a link to the root: the root is recognised by its inode."""
    save = root.hf(5)
    (tmp_path / "alias").symlink_to(root.path)
    (tmp_path / "inside").symlink_to(root.path / "exec")
    here, name = root.execution, f"exec/{ATTEMPT}/checkpoint-5"
    for step, written in enumerate(
        [str(save), f"{save}//", f"{tmp_path}/alias/{name}", f"{tmp_path}/inside/../{name}", "checkpoint-5", "./checkpoint-5/."]
    ):
        run("publish", "-checkpoint", root.path, written, str(step), cwd=here).succeeded()
        run("publish", "-checkpoint", tmp_path / "alias", written, str(step), cwd=here).succeeded().said_one_line("already")
    run("publish", "-checkpoint", "root", f"root/{name}", "99", cwd=tmp_path).succeeded()
    assert {line.split("\t")[2] for line in root.run("list").out.decode().splitlines()} == {name}
    assert root.steps == [0, 1, 2, 3, 4, 5, 99]


def test_a_save_below_a_bind_mount_of_the_root_is_recognised(root: Root, tmp_path: Path) -> None:
    """Another path to the same folder is the same root, also where no link shows it."""
    alias = tmp_path / "alias"
    alias.mkdir()
    mounted = subprocess.run(["mount", "--bind", root.path, alias], capture_output=True, check=False)
    require("mount", "mounting is not allowed" if mounted.returncode else None)
    try:
        root.hf(5)
        root.run("publish", alias / "exec" / ATTEMPT / "checkpoint-5", "5").succeeded()
    finally:
        subprocess.run(["umount", alias], check=True)
    assert root.resolved() == f"exec/{ATTEMPT}/checkpoint-5"


def test_a_save_may_be_a_file_or_a_link(root: Root) -> None:
    """What lies below the root is taken as written: links are not resolved."""
    (root.path / "model.bin").touch()
    (root.execution / "latest").symlink_to(root.hf(5))
    root.run("publish", root.path / "model.bin", "1").succeeded()
    root.run("publish", root.execution / "latest", "2").succeeded()
    assert root.resolved() == f"exec/{ATTEMPT}/latest"


@pytest.mark.parametrize(
    ("save", "said"),
    [
        ("{root}", "does not lie below"),
        ("{root}/exec/..", "'..' component"),
        ("{above}", "does not lie below"),
        ("{above}/outside/s", "does not lie below"),
        ("{above}/root2/s", "does not lie below"),
        ("{root}/exec", "one execution's folder"),
        ("{root}/exec/1.4101.0", "one execution's folder"),
        ("{root}/exec/1.4101.0/", "one execution's folder"),
        ("{root}/exec/1.4101.0/missing", "no such save"),
        ("{root}/exec/9.9.9/missing", "no such save"),
        ("{root}/exec/1.4101.0/../1.4101.0/checkpoint-5", "'..' component"),
        ("../1.4101.0/checkpoint-5", "'..' component"),
        ("{root}/pub/x", "pub/ is publishd's own"),
        ("{root}/prune/x", "prune/ is publishd's own"),
        ("{root}/exec/1.4101.0/a\nrm -rf x", r"a\x0arm -rf x"),
        ("{root}/exec/1.4101.0/newline\n", r"newline\x0a"),
        ("{root}/exec/1.4101.0/\x1b[2J", r"\x1b[2J"),
    ],
)
def test_b26_a_save_that_may_not_be_published_is_refused(root: Root, save: str, said: str) -> None:
    """One line says why, control characters escaped, and nothing is created."""
    root.hf(5)
    for name in ("a\nrm -rf x", "newline\n", "\x1b[2J"):
        (root.execution / name).mkdir()
    (root.path.parent / "outside" / "s").mkdir(parents=True)
    (root.path.parent / "root2" / "s").mkdir(parents=True)
    written = save.format(root=root.path, above=root.path.parent)
    unchanged_by(root, "publish", written, "5", cwd=root.execution).failed(said)


def test_an_empty_save_is_refused_wherever_the_command_stands(root: Root) -> None:
    """An unset variable must not publish the current folder."""
    save = root.hf(5)
    unchanged_by(root, "publish", "", "5", cwd=save).failed("SAVE", code=2)


def test_a_path_too_long_for_the_store_is_refused_with_the_limit(root: Root) -> None:
    """Rule 3: 133 bytes of path fit into a name of 255, 134 do not."""
    fits = "x" * (133 - len(f"exec/{ATTEMPT}/"))
    for name in (fits, fits + "x"):
        (root.execution / name).mkdir()
    root.run("publish", root.execution / fits, "1").succeeded()
    unchanged_by(root, "publish", root.execution / (fits + "x"), "1").failed("134 bytes", "133")


@pytest.mark.parametrize("recorded", ["s", "s/inner", "."])
def test_a_save_that_a_prune_is_removing_is_not_published(root: Root, recorded: str) -> None:
    """Rule 5: a record that names it, something inside it or something around it: exit 1, no entry, not for a moment."""
    save = root.execution / "around" / "s"
    (save / "inner").mkdir(parents=True)
    name = root.publish(os.path.normpath(save.parent / recorded), 1)
    (root.path / "pub" / name).rename(root.path / "prune" / name)
    changed = (root.path / "pub").stat().st_mtime_ns
    unchanged_by(root, "publish", save, "5").failed(str(save), "prune")
    assert (root.path / "pub").stat().st_mtime_ns == changed


@pytest.mark.parametrize("loss", ["gone", "recorded"])
def test_an_entry_is_taken_back_when_its_save_is_lost_meanwhile(root: Root, tmp_path: Path, loss: str) -> None:
    """Rule 5: after the create the publisher looks again, removes its own entry and fails."""
    save = root.hf(5)
    other = root.publish("exec/9.9.9/other", 1)
    pause = Pause("fsync", root.path / "pub", tmp_path / "pause")
    with started(root, "publish", save, "5", env=pause.environment) as process:
        pause.reached()
        assert root.steps == [1, 5]
        if loss == "gone":
            shutil.rmtree(save)
        else:
            (root.path / "prune" / root.pub[-1]).touch()
        pause.go_on()
        ran = ended(process)
    ran.failed(str(save), "gone" if loss == "gone" else "prune")
    assert root.pub == [other]


@pytest.mark.parametrize("occupied", ["folder", "link", "fifo"])
def test_something_else_under_the_entrys_name_is_not_success(root: Root, occupied: str) -> None:
    """Rule 7: what bears the entry's name but is no regular file stops resolve, and publishing says that it exists."""
    save = root.hf(5)
    entry = root.path / "pub" / root.publish(save, 5)
    entry.unlink()
    if occupied == "link":
        entry.symlink_to(save)
    else:
        {"folder": os.mkdir, "fifo": os.mkfifo}[occupied](entry)
    unchanged_by(root, "publish", save, "5")
    unchanged_by(root, "resolve").failed(entry.name)


# Cases


def test_b16_the_order_is_by_number_never_by_time_or_text(root: Root) -> None:
    """10100 is later than 9900, whatever the modification times say; a greater epoch is later than any step."""
    published(root, 9000, 9900, 10000, 10100)
    for age, path in enumerate([*sorted((root.path / "pub").iterdir()), *sorted(root.execution.iterdir())]):
        os.utime(path, (2_000_000_000 - age, 2_000_000_000 - age))
    assert root.resolved() == f"exec/{ATTEMPT}/checkpoint-10100"
    root.run("prune", "-keep", "1").succeeded()
    assert root.resolved() == f"exec/{ATTEMPT}/checkpoint-10100"
    root.publish(root.hf(3), 3, ABOVE)
    assert root.resolved() == f"exec/{ATTEMPT}/checkpoint-3"


@pytest.mark.parametrize(
    "noise",
    [
        {"PYTHONWARNINGS": "always", "PYTHONASYNCIODEBUG": "1", "PYTHONDEVMODE": "1"},
        {"PYTHONWARNINGS": "error", "PYTHONOPTIMIZE": "2", "PYTHONUNBUFFERED": "1", "PYTHONINSPECT": "1"},
        {"PYTHONVERBOSE": "1", "PYTHONPROFILEIMPORTTIME": "1", "PYTHONIOENCODING": "utf-16", "PYTHONDONTWRITEBYTECODE": "1"},
    ],
)
def test_b18_nothing_else_comes_on_stdout(root: Root, noise: dict[str, str]) -> None:
    """Python's own switches change what stderr says at most."""
    env = environment(**noise)
    root.run("resolve", env=env).succeeded(b"")
    published(root, 5)
    root.run("resolve", env=env).succeeded(b"%s\n" % bytes(root.execution / "checkpoint-5"))
    root.run("publish", root.hf(6), "6", env=env).succeeded(b"")
    root.run("watch", "-framework", "hf", "-once", env=env).succeeded(b"")


def test_b20_roots_with_a_common_prefix_do_not_mix(tmp_path: Path) -> None:
    """What lies below `ft2` does not lie below `ft`, and pruning one leaves the other."""
    one, two = Root(tmp_path / "ft").make(), Root(tmp_path / "ft2").make()
    published(two, 1, 2)
    before = two.tree()
    one.run("publish", two.execution / "checkpoint-1", "1").failed("does not lie below")
    published(one, 3, 4).run("prune", "-keep", "1").succeeded()
    assert two.tree() == before


def test_b24_brackets_stars_and_dollars_are_only_letters(tmp_path: Path) -> None:
    """The job script works, prune included, in a root whose name a shell or a glob would read otherwise."""
    root = Root(tmp_path / "lr=[1e-5, 2e-5]*?{a,b}$HOME").make()
    sibling = published(Root(tmp_path / "lr=1xx{a,b}$HOME").make(), 10, 500)
    before = sibling.tree()
    with Job(root, MAX_STEPS="50", SAVE_SECONDS="0.1") as job:
        job.ended().succeeded()
    assert root.steps == [30, 40, 50]
    assert sorted(os.listdir(root.execution)) == ["checkpoint-30", "checkpoint-40", "checkpoint-50"]
    assert sibling.tree() == before


@pytest.fixture(params=["C", "ASCII", "C.UTF-8", "ISO-8859-1"])
def locale(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Locales of each kind; ASCII is the C locale without what Python does about it by itself."""
    if request.param == "ASCII":
        return {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    if request.param != "ISO-8859-1":
        return {"LC_ALL": request.param}
    program = require_program("localedef", "localedef")
    folder = tmp_path_factory.mktemp("locale")
    made = subprocess.run(
        [program, "-i", "en_US", "-f", "ISO-8859-1", folder / "en_US.ISO-8859-1"], capture_output=True, check=False
    )
    require("localedef", "its sources are not installed" if made.returncode else None)
    return {"LC_ALL": "en_US.ISO-8859-1", "LOCPATH": str(folder)}


def test_b25_names_are_bytes_under_any_locale(tmp_path: Path, locale: dict[str, str]) -> None:
    """Umlauts in both normal forms, spaces and bytes that are not UTF-8 come back as the file system has them."""
    attempt = os.fsdecode(b"caf\xe9")
    root = Root(tmp_path / "läuf 1", attempt).make()
    env = environment(DISPATCH_ATTEMPT=attempt, **locale)
    forms = [root.execution / unicodedata.normalize(form, "ü") for form in ("NFC", "NFD")]
    for step, save in enumerate(forms):
        save.mkdir()
        root.run("publish", save, str(step), env=env).succeeded(b"")
        root.run("resolve", env=env).succeeded(b"%s\n" % bytes(save))
    root.hf(500)
    root.run("watch", "-framework", "hf", "-once", env=env).succeeded(b"")
    for verify in ([], ["-verify"]):
        root.run("resolve", *verify, env=env).succeeded(b"%s\n" % bytes(root.execution / "checkpoint-500"))
    listed = root.run("list", env=env).succeeded().out
    assert [line.split(b"\t")[2] for line in listed.splitlines()[:2]] == [os.fsencode(f"exec/{attempt}/{p.name}") for p in forms]
    assert [found["save"] for found in root.run("list", "-json", env=env).json[:2]] == [str(path) for path in forms]
    root.run("prune", "-keep", "1", env=env).succeeded(b"".join(b"%s\n" % bytes(path) for path in forms))
    assert os.listdir(root.execution) == ["checkpoint-500"]


def test_b25_messages_escape_what_is_not_text(root: Root) -> None:
    """A message is one line of text, whatever the name."""
    missing = os.fsdecode(bytes(root.execution) + b"/caf\xe9")
    root.run("publish", missing, "1", env=environment(LC_ALL="C")).failed(r"caf\xe9")


def test_b27_a_file_system_without_link_and_rename(root: Root) -> None:
    """Publishing needs neither, and pruning finds another way."""
    env = faults(no_rename=1)
    for step in (1, 2, 3):
        root.run("publish", root.hf(step), str(step), env=env).succeeded()
    root.run("publish", root.hf(3), "3", env=env).succeeded().said_one_line("already exists")
    root.run("prune", "-keep", "1", env=env).succeeded()
    root.run("resolve", env=env).succeeded(b"%s\n" % bytes(root.execution / "checkpoint-3"))
    assert (root.steps, root.records, os.listdir(root.execution)) == ([3], [], ["checkpoint-3"])


def test_b27_a_permission_error_is_not_taken_for_an_entry_that_exists(root: Root) -> None:
    """No right to create in pub/: exit 1 and the cause."""
    published(root, 1)
    (root.path / "pub").chmod(0o555)
    root.run("publish", root.hf(5), "5", prefix=ORDINARY_USER).failed("Permission denied", "pub/")
    assert root.steps == [1]


# Streams and signals

CLOSED = {stream: ("sh", "-c", f'exec "$@" {stream}', "sh") for stream in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-")}


@pytest.mark.parametrize("stream", [">&-", ">/dev/full"])
@pytest.mark.parametrize("arguments", [["resolve"], ["list", "-json"], ["--help"], ["--version"]])
def test_an_answer_that_cannot_be_written_is_a_failure(root: Root, stream: str, arguments: list[str]) -> None:
    """A closed stdout and a full disk behind it: one line, exit 1."""
    published(root, 5)
    prefix = ("sh", "-c", f'exec "$@" {stream}', "sh")
    flags = [] if arguments[0].startswith("-") else ["-checkpoint", str(root.path)]
    run(*arguments, *flags, prefix=prefix).failed("stdout")


@pytest.mark.parametrize("command", ["resolve", "list"])
def test_an_answer_that_nobody_reads_is_a_failure(root: Root, command: str) -> None:
    """A closed pipe: one line, exit 1, no traceback."""
    published(root, 5)
    reader, writer = os.pipe()
    os.close(reader)
    try:
        root.run(command, stdout=writer).failed("stdout", "Broken pipe")
    finally:
        os.close(writer)


def test_a_closed_stdout_does_not_matter_where_nothing_is_printed(root: Root) -> None:
    """There is no answer to publish, and resolve has nothing to say yet."""
    root.run("resolve", prefix=CLOSED[">&-"]).succeeded(b"")
    root.run("publish", root.hf(5), "5", prefix=CLOSED[">&-"]).succeeded(b"")


@pytest.mark.parametrize("closed", CLOSED)
def test_closed_streams_never_write_into_the_checkpoint(root: Root, closed: str) -> None:
    """No file of the root gets the number of a closed stream, so no message lands in it."""
    root.run("publish", root.hf(5), "5", prefix=CLOSED[closed]).succeeded()
    root.run("watch", "-framework", "hf", "-once", prefix=CLOSED[closed]).succeeded()
    root.run("publish", root.execution / "missing", "5", prefix=CLOSED[closed])
    assert [(root.path / "pub" / name).read_bytes() for name in root.pub] == [b""]
    assert (root.execution / "checkpoint-5" / "model.safetensors").read_bytes() == b"weights of 5"


def test_a_closed_stderr_does_not_change_the_exit_code(root: Root) -> None:
    """What can't be said is lost, what was done is not."""
    prefix = CLOSED["2>&-"]
    assert repr(root.run("publish", root.execution / "missing", "5", prefix=prefix)) == "<exit 1, stdout b'', stderr ''>"
    assert repr(root.run("resolve", "-chek", prefix=prefix)) == "<exit 2, stdout b'', stderr ''>"
    published(root, 5)
    root.run("resolve", prefix=prefix).succeeded(b"%s\n" % bytes(root.execution / "checkpoint-5"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_that_the_file_system_holds(root: Root, tmp_path: Path, number: int) -> None:
    """One line and exit 1, although a thread is stuck in a listing."""
    published(root, 5)
    pause = Pause("fdopendir", root.path / "pub", tmp_path / "pause")
    with started(root, "resolve", env=pause.environment) as process:
        pause.reached()
        process.send_signal(number)
        ran = ended(process)
    ran.failed("publishd resolve: ", signal.Signals(number).name)


# The shape of the program

SOURCE = Path(publishd.__file__).parent
MODULES = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))
ADAPTERS = ("publishd.stores.posix", "publishd.stores.s3", "publishd.credentials", "aiofiles", "aiobotocore", "botocore", "hvac")


def imports(module: str) -> Iterator[str]:
    """Every module that a module imports, wherever in it."""
    for node in ast.walk(ast.parse((SOURCE / module).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, "relative imports are not the custom here"
            assert node.level == 0, "relative imports are not the custom here"
            yield from chain([node.module], (f"{node.module}.{alias.name}" for alias in node.names))


RULES = [module for module in MODULES if "/" not in module and module not in ("cli.py", "options.py", "__main__.py")]
BELOW = [module for module in MODULES if module.startswith(("stores/", "credentials/"))]


@pytest.mark.parametrize("module", RULES)
def test_the_rules_know_no_adapter(module: str) -> None:
    """What is decided above the store imports the protocol only."""
    assert [name for name in imports(module) if name.startswith(ADAPTERS)] == []


@pytest.mark.parametrize("module", BELOW)
def test_adapters_know_no_rule(module: str) -> None:
    """A store knows nothing of publications, prunes, frameworks and watches."""
    above = tuple(
        f"publishd.{name}"
        for name in ("cli", "fencing", "frameworks", "options", "probe", "prune", "publications", "run", "watch")
    )
    assert [name for name in imports(module) if name.startswith(above)] == []


@pytest.mark.parametrize("module", [module for module in MODULES if module not in ("cli.py", "__main__.py")])
def test_only_the_command_line_reads_the_environment_and_prints(module: str) -> None:
    """Everything else is told by its arguments, and answers by what it returns."""
    for node in ast.walk(ast.parse((SOURCE / module).read_text())):
        assert ast.unparse(node) not in {"os.environ", "os.environb", "os.getenv", "sys.stdout", "print"}
    assert not {"os.environ", "os.environb", "os.getenv", "sys.stdout"} & set(imports(module))


def test_resolve_on_a_folder_imports_nothing_that_only_others_need(root: Root) -> None:
    """Neither S3 nor Vault nor uvloop costs a resolve anything."""
    published(root, 5)
    arguments = ("-X", "importtime", "-m", "publishd", "resolve", "-checkpoint", root.path)
    ran = run(*arguments, program=sys.executable).succeeded(b"%s\n" % bytes(root.execution / "checkpoint-5"))
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in ran.err.splitlines()}
    assert "publishd" in imported
    assert not imported & {"aiobotocore", "botocore", "aiohttp", "hvac", "requests", "uvloop", "boto3", "urllib3", "argparse"}


@pytest.mark.parametrize("make", ["link to nothing", "fifo"])
def test_what_is_no_save_is_not_published(root: Root, make: str) -> None:
    """SAVE must be a file or a folder, be it through a link."""
    odd = root.execution / "odd"
    odd.symlink_to("nowhere") if make == "link to nothing" else os.mkfifo(odd)
    root.run("publish", odd, "5").failed("there is no such save")
    assert root.pub == []


@pytest.mark.parametrize("blocked", ["stdout", "stderr"])
def test_a_signal_ends_a_command_whose_output_nobody_reads(root: Root, blocked: str) -> None:
    """A pager that does not read on holds up neither SIGTERM nor Ctrl-C."""
    for step in range(1_500):
        root.publish(f"exec/{root.attempt}/checkpoint-{step}", step)
    command = ["list"] if blocked == "stdout" else ["prune", "-keep", "1"]
    stdout, stderr = (subprocess.PIPE if blocked == name else subprocess.DEVNULL for name in ("stdout", "stderr"))
    process = subprocess.Popen(
        [PUBLISHD, *command, "-checkpoint", str(root.path)], env=environment(), stdout=stdout, stderr=stderr
    )
    try:
        stream = process.stdout or process.stderr
        assert stream
        size = fcntl.fcntl(stream, fcntl.F_GETPIPE_SZ)
        eventually(lambda: waiting_in(stream.fileno()) > size - 4096, "a full pipe")
        process.send_signal(signal.SIGINT)
        # What it logs is read by nobody, so that it may be done by now and wait only for that.
        assert process.wait(20) in ((1,) if blocked == "stdout" else (0, 1))
    finally:
        process.kill()
        process.communicate()


def test_a_slow_reader_of_stderr_gets_every_line(root: Root) -> None:
    """A command does not end before its reasons are read."""
    for step in range(1_500):
        root.publish(f"exec/{root.attempt}/checkpoint-{step}", step)
    command = [PUBLISHD, "prune", "-keep", "1", "-checkpoint", str(root.path)]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)  # longer than a watch would wait for its log
        assert process.stderr
        assert len(process.stderr.readlines()) == 1_500
        assert process.wait(20) == 0


def waiting_in(pipe: int) -> int:
    """How many bytes wait in a pipe."""
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


@pytest.mark.parametrize("command", [("resolve",), ("watch", "-framework", "hf", "-once")])
def test_no_threads_left_is_one_line(root: Root, command: tuple[str, ...]) -> None:
    """Where no thread may be started the command says so, and does nothing."""
    strace = require_program("strace", "strace")
    fault = "inject=clone,clone3:error=EAGAIN:when=2+"
    prefix = (strace, "-f", "-qq", "-o", "/dev/null", "-e", "trace=clone,clone3", "-e", fault)
    root.run(*command, prefix=prefix).failed("cannot start: threads: can't start new thread")
