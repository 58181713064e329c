"""`publishd env`: attempt and epoch of a scheduler's job."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from commands import BIN, environment, run

if TYPE_CHECKING:
    from pathlib import Path


def slurm(job: str | None = "4101", restart: str | None = None, **changes: str | None) -> dict[str, str]:
    return environment(SLURM_JOB_ID=job, SLURM_RESTART_COUNT=restart, **changes)


@pytest.mark.parametrize(
    ("job", "restart", "line"),
    [
        ("4101", None, b"export DISPATCH_ATTEMPT=4101.0 DISPATCH_EPOCH=4101000000\n"),
        ("4101", "0", b"export DISPATCH_ATTEMPT=4101.0 DISPATCH_EPOCH=4101000000\n"),
        ("4101", "12", b"export DISPATCH_ATTEMPT=4101.12 DISPATCH_EPOCH=4101000012\n"),
        ("4102", None, b"export DISPATCH_ATTEMPT=4102.0 DISPATCH_EPOCH=4102000000\n"),
        ("4294967295", "999999", b"export DISPATCH_ATTEMPT=4294967295.999999 DISPATCH_EPOCH=4294967295999999\n"),
    ],
)
def test_a_slurm_job_s_attempt_and_epoch(job: str, restart: str | None, line: bytes) -> None:
    """One line for a shell; a requeue is greater than the run before it, and a new submission than any requeue."""
    assert run("env", env=slurm(job, restart)).succeeded(line).err == ""
    assert run("env", "-scheduler", "slurm", env=slurm(job, restart)).succeeded(line).err == ""


def test_what_a_predecessor_handed_on_is_not_looked_at() -> None:
    """A job that submits its successor exports its own attempt and epoch to it."""
    run("env", env=slurm(DISPATCH_ATTEMPT="4000.7", DISPATCH_EPOCH="4000000007")).succeeded(
        b"export DISPATCH_ATTEMPT=4101.0 DISPATCH_EPOCH=4101000000\n"
    )


@pytest.mark.parametrize(
    ("job", "restart", "variable"),
    [
        (None, None, "SLURM_JOB_ID"),
        (None, "1", "SLURM_JOB_ID"),
        ("", None, "SLURM_JOB_ID"),
        ("4101; reboot", None, "SLURM_JOB_ID"),
        ("-1", None, "SLURM_JOB_ID"),
        ("٤", None, "SLURM_JOB_ID"),
        ("4101", "", "SLURM_RESTART_COUNT"),
        ("4101", "one", "SLURM_RESTART_COUNT"),
        ("4101", "1000000", "SLURM_RESTART_COUNT"),
    ],
)
def test_what_is_no_job_s_is_an_error(job: str | None, restart: str | None, variable: str) -> None:
    """Nothing on stdout that a shell could evaluate; one line names the variable, and does not repeat what it says."""
    ran = run("env", env=slurm(job, restart)).failed(variable, code=2)
    assert "reboot" not in ran.err


def test_an_epoch_that_no_entry_can_hold_is_an_error() -> None:
    """18446744073709551615 is the last."""
    run("env", env=slurm("18446744073709", "551615")).succeeded()
    for job, restart in (("18446744073709", "551616"), ("18446744073710", "0")):
        run("env", env=slurm(job, restart)).failed("SLURM_JOB_ID", code=2)


@pytest.mark.parametrize(
    "arguments", [("-scheduler", "pbs"), ("-scheduler",), ("-checkpoint", "/x"), ("-creds", "env"), ("extra",), ("-json",)]
)
def test_usage(arguments: tuple[str, ...]) -> None:
    """It takes -scheduler, and nothing of what has to do with a root."""
    run("env", *arguments, env=slurm()).failed(code=2)


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_shell_evaluates_it(shell: str) -> None:
    """As the scripts do, with -e or without."""
    script = "set -eu; EXECUTION=$(publishd env) || exit 1; eval \"$EXECUTION\"; sh -c 'echo $DISPATCH_ATTEMPT $DISPATCH_EPOCH'"
    env = slurm(PATH=f"{BIN}:/usr/bin:/bin", DISPATCH_ATTEMPT=None, DISPATCH_EPOCH=None)
    ran = subprocess.run([shell, "-c", script], env=env, capture_output=True, check=True)
    assert ran.stdout == b"4101.0 4101000000\n"


def test_it_needs_neither_a_root_nor_a_current_folder(tmp_path: Path) -> None:
    """It looks at nothing but its environment."""
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f'cd "{gone}"; rmdir "{gone}"; exec "$0" env'
    ran = subprocess.run(["sh", "-c", script, str(BIN / "publishd")], env=slurm(), capture_output=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert ran.stdout.startswith(b"export ")
