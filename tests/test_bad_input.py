"""Whatever is wrong with the command line, the environment or pub/: the exact exit code, one line, nothing touched."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from commands import EPOCH, Ran, Root, environment, run
from publishd.errors import printable
from publishd.publications import Publication

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SECRET = "S3CRET"
LATER = f"{EPOCH + 1:020d}-{5:020d}-"


@pytest.fixture
def root(root: Root) -> Root:
    """A root with three publications, so that a prune that should not run would be seen."""
    for step in (1, 2, 3):
        root.publish(root.hf(step), step)
    return root


def refused(root: Root, *arguments: str, said: str = "", code: int = 2, env: dict[str, str] | None = None) -> Ran:
    """Run a command that must fail in one line, leave the root as it was and make nothing beside it."""
    command, *rest = arguments
    before = Root(root.path.parent).tree()
    ran = run(command, *rest, env=env, cwd=root.path.parent).failed(f"publishd {command}: ", said, code=code)
    assert SECRET not in ran.err
    assert Root(root.path.parent).tree() == before
    return ran


# Flags


@pytest.mark.parametrize("keep", ["0", "-1", "", "3.0", "1e3", "+1", " 1", "1 ", "0x1", "١", "1_0", "all", "--", "1\n", "-keep"])
def test_b29_a_bad_keep_deletes_nothing(root: Root, keep: str) -> None:
    """Rule 10: whatever is no whole number of at least 1 is a usage error."""
    refused(root, "prune", "-checkpoint", "root", "-keep", keep, said="-keep")


@pytest.mark.parametrize("keep", [[], ["-keep"], ["-keep="], ["--keep="], ["--keep=0"], ["-keep=-1"]])
def test_b29_a_missing_keep_deletes_nothing(root: Root, keep: list[str]) -> None:
    """There is no default of how many to keep."""
    refused(root, "prune", "-checkpoint", "root", *keep, said="-keep")


@pytest.mark.parametrize("keep", ["3", "99", "18446744073709551615"])
def test_b29_keeping_as_many_as_there_are_or_more_deletes_nothing(root: Root, keep: str) -> None:
    """N of at least the number of publications, however great, is no error."""
    before = root.tree()
    root.run("prune", "-keep", keep).succeeded(b"")
    assert root.tree() == before


def test_b29_the_last_publication_is_never_removed(root: Root) -> None:
    """Keeping one again and again leaves that one."""
    for _ in range(2):
        root.run("prune", "-keep", "1").succeeded()
        assert root.steps == [3]


WATCH = ["watch", "-checkpoint", "root", "-framework", "hf", "-once"]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(
            ("-interval", value)
            for value in ("0", "0s", "-1", "-1s", "1e3", "", " 1", "1 s", "10S", "1m30", "1d", "s", ".5", "٣s")
        ),
        *(("-interval", value) for value in ("10s\n", "inf", "nan", "1" * 30, "00:10", "1s-2s", "5,5")),
        ("-drain", "0"),
        ("-drain", "soon"),
        ("-linger", "-1"),
        ("-linger", ""),
        ("-keep", "0"),
        ("-framework", "HF"),
        ("-framework", ""),
        ("-framework", "hf,dcp"),
        ("-attempt", "a/b"),
        ("-attempt", ".."),
        ("-attempt", ""),
        ("-epoch", "-1"),
        ("-epoch", "18446744073709551616"),
        ("-once", "=yes"),
        ("-with-parent", "=1"),
        ("-no-sync", "=no"),
    ],
)
def test_a_bad_value_of_a_flag_of_watch_is_refused(root: Root, flag: str, value: str) -> None:
    """The flag is named, and nothing is scanned."""
    given = [f"{flag}{value}"] if value.startswith("=") else [flag, value]
    refused(root, *WATCH, *given, said=flag)


@pytest.mark.parametrize(
    "flag",
    [
        "-kee=3",
        "--kee=3",
        "-k=3",
        "-keeps=3",
        "-Keep=3",
        "---keep=3",
        "--check=x",
        "-keep:3",
        "-",
        "-=3",
        "-no-json",
        "-verify",
        "-j",
    ],
)
def test_flags_have_exact_names(root: Root, flag: str) -> None:
    """No abbreviation, no other case, no flag of another command."""
    refused(root, "prune", "-checkpoint", "root", "-keep", "1", flag)


@pytest.mark.parametrize("flag", ["-json=yes", "-json=", "-dry-run=1", "--dry-run=no"])
def test_a_switch_takes_no_value(root: Root, flag: str) -> None:
    """A dry run that was meant to be one is never the real thing."""
    refused(root, "prune", "-checkpoint", "root", "-keep", "1", flag, said=flag.lstrip("-").partition("=")[0])


def test_of_a_flag_given_twice_the_last_counts(root: Root) -> None:
    """As in Go: a script may append to the flags of another."""
    root.run("prune", "-keep", "1", "--keep=2").succeeded()
    assert root.steps == [2, 3]


@pytest.mark.parametrize("framework", [[], ["-framework"]])
def test_watch_needs_a_framework(root: Root, framework: list[str]) -> None:
    """A watch that would publish nothing does not start."""
    refused(root, "watch", "-checkpoint", "root", "-once", *framework, said="-framework")


@pytest.mark.parametrize("written", [[], ["-checkpoint="]])
@pytest.mark.parametrize("command", ["resolve", "watch", "publish", "prune", "list"])
def test_a_missing_or_empty_root_is_refused(root: Root, command: str, written: list[str]) -> None:
    """An unset variable never means the current folder or nothing yet."""
    needed = {"watch": ["-framework", "hf"], "publish": ["root/exec/1.4101.0/checkpoint-1", "1"], "prune": ["-keep", "1"]}
    refused(root, command, *needed.get(command, []), *written, said="-checkpoint")


@pytest.mark.parametrize("written", [["-checkpoint"], ["-checkpoint", ""], ["--checkpoint="]])
def test_an_empty_root_is_refused_in_every_spelling(root: Root, written: list[str]) -> None:
    """So is one whose value was forgotten."""
    refused(root, "resolve", *written, said="-checkpoint")


@pytest.mark.parametrize("text", ["ro\not", "root\n", "\x1b[2Jroot", "ro\x7fot", "ro\x85ot", "\t"])
def test_a_control_character_in_the_root_is_refused(root: Root, text: str) -> None:
    """Such a root could not be printed in one line."""
    refused(root, "resolve", "-checkpoint", text, said="-checkpoint")


@pytest.mark.parametrize("address", ["s3://bucket/prefix", "s3://bucket", "s3://"])
@pytest.mark.parametrize("command", [["resolve"], ["prune", "-keep", "1"]])
def test_a_root_on_s3_is_refused(root: Root, command: list[str], address: str) -> None:
    """What is not supported is said, and no folder of that name is looked for or made."""
    (root.path.parent / "s3:").mkdir()
    refused(root, *command, "-checkpoint", address, said="s3://")


@pytest.mark.parametrize(
    "arguments",
    [
        ["resolve", "-checkpoint", "root", "extra"],
        ["resolve", "-checkpoint", "root", "-1"],
        ["list", "-checkpoint", "root", ""],
        ["prune", "-checkpoint", "root", "-keep", "1", "2"],
        ["publish", "-checkpoint", "root"],
        ["publish", "-checkpoint", "root", "root/exec/1.4101.0/checkpoint-1"],
        ["publish", "-checkpoint", "root", "root/exec/1.4101.0/checkpoint-1", "7", "8"],
        [*WATCH, "extra"],
    ],
)
def test_a_wrong_number_of_arguments_is_refused(root: Root, arguments: list[str]) -> None:
    """What is too much may be a flag's value that went astray."""
    refused(root, *arguments, said="given")


@pytest.mark.parametrize(
    "arguments", [[], ["frobnicate"], ["Resolve"], ["resolv"], [""], ["-checkpoint", "root", "resolve"], ["--"]]
)
def test_an_unknown_command_is_refused_with_those_there_are(arguments: list[str]) -> None:
    """One line in the shape of all others, with no hole where the command would be."""
    ran = run(*arguments).failed("command", "resolve, watch, publish, prune, list", code=2)
    assert ran.err.startswith("publishd: ")


@pytest.mark.parametrize(
    "step", ["-1", "1e3", "", " 5", "5 ", "5.0", "0x10", "٥", "²", "5\n", "five", "18446744073709551616", "1" * 5000]
)
def test_a_malformed_step_is_refused(root: Root, step: str) -> None:
    """A step is a decimal below 2^64."""
    refused(root, "publish", "-checkpoint", "root", "root/exec/1.4101.0/checkpoint-1", step, said="STEP")


@pytest.mark.parametrize(
    "arguments",
    [
        ["-creds", f"vault:https://u:{SECRET}@host/x"],
        [f"-creds={SECRET}"],
        ["-proxy", f"http://u:{SECRET}@host:1"],
        [f"--proxy=http://u:{SECRET}@host:1"],
        [f"-prox=http://u:{SECRET}@host:1"],
        [f"-proxyhttp://u:{SECRET}@host:1"],
        [f"-{SECRET}"],
        ["-endpoint", f"https://{SECRET}@host"],
        [SECRET],
        ["-json=" + SECRET],
    ],
)
def test_a_secret_is_never_echoed(root: Root, arguments: list[str]) -> None:
    """Rule 20: S3's flags are usage errors on a folder, and neither a value nor a mistyped flag's value is repeated."""
    refused(root, "resolve", "-checkpoint", "root", *arguments)


@pytest.mark.parametrize("first", [f"-creds={SECRET}", f"--proxy=http://u:{SECRET}@h:1", f"http://u:{SECRET}@h:1", f"-p{SECRET}"])
def test_a_secret_before_the_command_is_never_echoed(root: Root, first: str) -> None:
    """Rule 20: nor where a command is looked for."""
    ran = run(first, "resolve", "-checkpoint", root.path).failed(code=2)
    assert SECRET not in ran.err


@pytest.mark.parametrize("arguments", [["-keep", SECRET], ["-interval", SECRET], ["-framework", SECRET], ["-epoch", SECRET]])
def test_a_flags_bad_value_is_never_echoed(root: Root, arguments: list[str]) -> None:
    """Rule 20: not even where no secret is expected."""
    refused(root, *WATCH, *arguments, said=arguments[0])


# The environment


BAD_EPOCHS = ["", "abc", "-1", "+1", "1e6", " 1000000", "1000000 ", "1" * 21, "18446744073709551616", "１", "1.0", "0x1", "1\n"]
BAD_ATTEMPTS = ["", "../../etc", ".", "..", "a/b", "/", "a\nb", "\x7f", "a/", "\x85"]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        *(("DISPATCH_EPOCH", value) for value in (None, *BAD_EPOCHS)),
        *(("DISPATCH_ATTEMPT", value) for value in (None, *BAD_ATTEMPTS)),
    ],
)
def test_b21_a_malformed_execution_is_refused(root: Root, variable: str, value: str | None) -> None:
    """One line that names the variable, exit 2, nothing created; resolve does not care."""
    env = environment(**{variable: value})
    refused(root, *WATCH, said=variable, env=env)


@pytest.mark.parametrize(("variable", "value"), [("DISPATCH_EPOCH", None), ("DISPATCH_EPOCH", "x"), ("DISPATCH_ATTEMPT", "a/b")])
def test_b21_publish_needs_the_execution_too(root: Root, variable: str, value: str | None) -> None:
    """The epoch of a publication is never guessed."""
    env = environment(**{variable: value})
    refused(root, "publish", "-checkpoint", "root", "root/exec/1.4101.0/checkpoint-1", "7", said=variable, env=env)


@pytest.mark.parametrize("value", [None, "", "../x"])
def test_b21_reading_and_pruning_need_no_execution(root: Root, value: str | None) -> None:
    """The commands resolve, list and prune work on a login node, whatever is in its environment."""
    env = environment(DISPATCH_ATTEMPT=value, DISPATCH_EPOCH=value)
    root.run("resolve", env=env).succeeded(b"%s\n" % bytes(root.execution / "checkpoint-3"))
    root.run("list", env=env).succeeded()
    root.run("prune", "-keep", "1", env=env).succeeded()
    assert root.steps == [3]


@pytest.mark.parametrize("value", [None, "", "x"])
def test_b21_flags_win_over_the_environment(root: Root, value: str | None) -> None:
    """A malformed variable does not matter where the flag is given."""
    env = environment(DISPATCH_ATTEMPT=value, DISPATCH_EPOCH=value)
    root.run("watch", "-framework", "hf", "-once", "-attempt", "7", "-epoch", "0", env=env).succeeded(b"")


# What stands in pub/


def encoded(path: str) -> str:
    """An entry's name, the latest of all, whose path nobody has looked at."""
    return Publication(EPOCH + 1, 5, path).name


def empty(path: Path) -> None:
    path.touch()


def link(path: Path) -> None:
    path.symlink_to("../exec")


GOOD = encoded("exec/1.4101.0/checkpoint-3")
STRAYS: list[tuple[str, Callable[[Path], None]]] = [
    *(
        (name, empty)
        for name in (
            "README",
            ".nfs0000000000c0ffee00000001",
            ".hidden",
            "pub",
            "-",
            f"{GOOD}.tmp",
            f".{GOOD}",
            GOOD.lower(),
            GOOD[1:],
            f"0{GOOD}",
            f"{GOOD}\n",
            f"{GOOD} ",
            f"{GOOD}======",
            f"{2**64:020d}-{5:020d}-MV4GKYY",
            f"{5:020d}-{2**64:020d}-MV4GKYY",
            f"{LATER}",
            f"{LATER}MV4GKY1",
            f"{LATER}MV4GKYB",  # one spare bit set: the canonical name ends in another letter
            f"{LATER}MV4GKYYAA",  # a length that no bytes have
            f"{'１' * 20}-{5:020d}-MV4GKYY",
            os.fsdecode(b"\xff\xfe"),
            "\x1b[2J",
        )
    ),
    *((encoded(path), empty) for path in ("../other/x", "/abs", ".", "..", "exec", "pub", "prune", "pub/x", "prune/x/y")),
    *(
        (encoded(path), empty)
        for path in ("exec/a", "exec/a/", "exec/../x", "a//b", "a/./b", "a/", "exec/a/new\nline", "exec/a/\x85")
    ),
    (GOOD, os.mkdir),
    (GOOD, os.mkfifo),
    (GOOD, link),
    ("folder", os.mkdir),
]


@pytest.mark.parametrize(("name", "make"), STRAYS)
def test_b34_what_is_no_publication_stops_resolve_and_is_named(root: Root, name: str, make: Callable[[Path], None]) -> None:
    """Rule 7: it is never skipped, wherever in the order it would stand."""
    make(root.path / "pub" / name)
    refused(root, "resolve", "-checkpoint", "root", said=f"/pub/{printable(name)}: ", code=1)


@pytest.mark.parametrize("command", [["resolve", "-verify"], ["list", "-json"], ["prune", "-keep", "1"]])
@pytest.mark.parametrize(
    ("name", "make"), [STRAYS[0], (encoded("../other/x"), empty), (GOOD, os.mkdir), (GOOD, os.mkfifo), (GOOD, link)]
)
def test_b34_what_is_no_publication_stops_list_and_prune_too(
    root: Root, name: str, make: Callable[[Path], None], command: list[str]
) -> None:
    """Rule 7: prune, above all, deletes nothing as long as it does not understand everything."""
    make(root.path / "pub" / name)
    refused(root, *command, "-checkpoint", "root", said=f"/pub/{name}: ", code=1)


def test_b34_a_publication_that_is_a_hard_link_is_one(root: Root) -> None:
    """What counts is the name and that it is a regular file; content and links to it do not matter."""
    entry = root.path / "pub" / root.publish("exec/1.4101.0/checkpoint-3", 9)
    entry.write_text("somebody's note")
    os.link(entry, root.path / "note")
    assert root.resolved() == "exec/1.4101.0/checkpoint-3"
