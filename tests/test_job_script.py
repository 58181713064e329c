"""The job script of examples/, word for word, run by bash around the stand-in trainer; and the demo that runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from commands import ATTEMPT, EPOCH, JOB_SCRIPT, PUBLISHD, STAND_IN, Job, Root, eventually

NEXT_ATTEMPT, NEXT_EPOCH = "1.4102.0", 2 * EPOCH

THE_SCRIPT = """\
CKPT=/lustre/team/finetune
RESUME=$(publish resolve -checkpoint "$CKPT") || exit 1
OUT=$CKPT/exec/$DISPATCH_ATTEMPT
publish watch -checkpoint "$CKPT" -framework hf &
WATCH=$!
python train.py --output_dir "$OUT" ${RESUME:+--resume_from_checkpoint "$RESUME"}
STATUS=$?
kill -TERM "$WATCH"; wait "$WATCH"
publish prune -checkpoint "$CKPT" -keep 3
exit $STATUS
"""

FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "training_args.bin",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "trainer_state.json",
]


@pytest.fixture
def empty(tmp_path: Path) -> Root:
    """A checkpoint root in which nothing was ever done."""
    root = Root(tmp_path / "root")
    root.path.mkdir()
    return root


def following(root: Root) -> Root:
    """The same root as the next execution sees it."""
    return Root(root.path, NEXT_ATTEMPT)


def trainer(folder: Path, code: str) -> Path:
    """A trainer of this code; returns the file."""
    file = folder / "a_trainer.py"
    file.write_text(code)
    return file


def stand_in(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, STAND_IN, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )


def saved_paths(root: Root) -> list[str]:
    """The published saves, oldest first."""
    return [line["path"] for line in root.run("list", "-json").succeeded().json]


def test_the_example_is_the_job_script() -> None:
    """examples/job.sh differs from the script that is promised to work in its comments and in taking CKPT from outside."""
    lines = [line for line in JOB_SCRIPT.read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "CKPT=${CKPT:-/lustre/team/finetune}"
    assert lines[1:] == THE_SCRIPT.splitlines()[1:]


def test_the_promised_text_itself_runs(empty: Root, tmp_path: Path) -> None:
    """The promised text runs as it stands, with only the root's place replaced."""
    script = tmp_path / "job.sh"
    script.write_text(THE_SCRIPT.replace("/lustre/team/finetune", str(empty.path)))
    with Job(empty, script=script, MAX_STEPS="10") as job:
        out = job.ended().succeeded().out
    assert out.endswith(b"train.py: saving checkpoint-10\ntrain.py: ended at step 10\n")
    assert empty.steps == [10]


def test_a_normal_end_leaves_the_three_latest(empty: Root) -> None:
    """All saves are published, and prune leaves three and prints what it removed."""
    with Job(empty, MAX_STEPS="50", SAVE_SECONDS="0.1") as job:
        ended = job.ended().succeeded()
    assert ended.err.count(" published: ") == 5
    assert empty.steps == [30, 40, 50]
    assert sorted(os.listdir(empty.execution)) == ["checkpoint-30", "checkpoint-40", "checkpoint-50"]
    removed = [f"{empty.execution}/checkpoint-{step}" for step in (10, 20)]
    assert ended.out.decode().splitlines()[-2:] == removed
    assert empty.records == []


def test_a_kill_in_the_middle_of_a_save_costs_only_that_save(empty: Root) -> None:
    """The save that a SIGKILL hit is not published; the next execution resumes from the one before and goes on to the end."""
    half = empty.execution / "checkpoint-20"
    with Job(empty, MAX_STEPS="60", SAVE_SECONDS="2") as job:
        eventually((half / "model.safetensors").exists, "a half-written save", 60)
        os.kill(job.child("train.py"), signal.SIGKILL)
        assert job.ended().code == 128 + signal.SIGKILL
    left = sorted(os.listdir(half))
    assert "trainer_state.json" not in left
    assert empty.resolved() == f"exec/{ATTEMPT}/checkpoint-10"
    with Job(following(empty), epoch=NEXT_EPOCH, MAX_STEPS="40", SAVE_SECONDS="0.1") as job:
        assert f"resuming from {empty.execution}/checkpoint-10 at step 10\n".encode() in job.ended().succeeded().out
    assert saved_paths(empty) == [f"exec/{NEXT_ATTEMPT}/checkpoint-{step}" for step in (20, 30, 40)]
    assert sorted(os.listdir(half)) == left


@pytest.mark.parametrize("status", [0, 1, 7, 143])
def test_the_exit_status_is_the_trainers(empty: Root, tmp_path: Path, status: int) -> None:
    """The script exits as the trainer did, whatever came after it."""
    with Job(empty, trainer(tmp_path, f"import time; time.sleep(1); raise SystemExit({status})")) as job:
        assert job.ended().code == status


def test_b20a_the_same_attempt_and_epoch_twice(empty: Root, tmp_path: Path) -> None:
    """An execution that is started again under its name and saves a step again finds it published; nothing is lost."""
    anew = trainer(tmp_path, f"import runpy, sys; del sys.argv[3:]; runpy.run_path({str(STAND_IN)!r}, run_name='__main__')")
    optimizer = empty.execution / "checkpoint-20" / "optimizer.pt"
    with Job(empty, anew, MAX_STEPS="20", SAVE_SECONDS="0.1") as job:
        job.ended().succeeded()
    entries, first = empty.pub, optimizer.read_bytes()
    with Job(empty, anew, MAX_STEPS="20", SAVE_SECONDS="0.1") as job:
        job.ended().succeeded()
    assert optimizer.read_bytes() != first
    assert empty.pub == entries
    assert empty.resolved() == f"exec/{ATTEMPT}/checkpoint-20"
    again = empty.run("publish", empty.execution / "checkpoint-20", "20").succeeded(b"")
    assert "it already exists" in again.err


def test_b54_term_to_the_shell_alone_leaves_trainer_and_watch_running(empty: Root) -> None:
    """A shell without a trap dies of SIGTERM at once; its trainer and its watch go on, and the watch still obeys."""
    with Job(empty, MAX_STEPS="20", SAVE_SECONDS="1") as job:
        training, watching = job.child("train.py"), job.child("watch")
        job.process.terminate()
        assert job.process.wait(20) == -signal.SIGTERM
        assert not {training, watching} - running()
        eventually((empty.execution / "checkpoint-20" / "trainer_state.json").exists, "the last save")
        os.kill(watching, signal.SIGTERM)
        eventually(lambda: watching not in running(), "the end of the watch")
        assert "checkpoint-20: epoch" in job.log
    assert empty.steps == [10, 20]


def test_b54_with_parent_the_watch_looks_a_last_time_and_ends(empty: Root, tmp_path: Path) -> None:
    """A watch that was started with -with-parent does not stay behind as an orphan, and publishes what is there."""
    script = tmp_path / "job.sh"
    script.write_text(JOB_SCRIPT.read_text().replace("-framework hf &", "-framework hf -with-parent -interval 1h &"))
    with Job(empty, script=script, MAX_STEPS="20000") as job:
        watching = job.child("watch")
        eventually(lambda: "watching: " in job.log, "its first look")
        step = 10 * len(os.listdir(empty.execution)) + 20 if empty.execution.exists() else 20
        eventually((empty.execution / f"checkpoint-{step}" / "trainer_state.json").exists, "a save after that")
        job.process.terminate()
        eventually(lambda: watching not in running(), "the end of the watch")
    assert step in empty.steps


def running() -> set[int]:
    """The processes of this machine that have not ended."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] not in "ZX":
                found.add(int(folder.name))
        except OSError:
            pass  # it has just ended
    return found


@pytest.mark.parametrize(
    "name", [b"a team's root", b'$HOME `id` "q" \\ *?[a-z] ; & #', "Größe 大".encode(), b"not-text-\xff\xfe", b"{a,b}~ -x"]
)
def test_roots_with_odd_names(tmp_path: Path, name: bytes) -> None:
    """Spaces, quotes, what a shell would expand, and bytes that are no text: the next execution resumes all the same."""
    root = Root(tmp_path / os.fsdecode(name))
    root.path.mkdir()
    with Job(root, MAX_STEPS="10", SAVE_SECONDS="0.1") as job:
        job.ended().succeeded()
    with Job(following(root), epoch=NEXT_EPOCH, MAX_STEPS="20", SAVE_SECONDS="0.1") as job:
        assert b"resuming from %s/checkpoint-10 at step 10\n" % os.fsencode(root.execution) in job.ended().succeeded().out
    assert saved_paths(root) == [f"exec/{ATTEMPT}/checkpoint-10", f"exec/{NEXT_ATTEMPT}/checkpoint-20"]


def test_a_missing_root_stops_the_script_before_anything_starts(tmp_path: Path) -> None:
    """Where resolve could not look, no training starts from nothing: exit 1, one line on stderr."""
    root = Root(tmp_path / "root")
    with Job(root) as job:
        job.ended().failed("resolve", str(root.path))
    assert not root.path.exists()


def test_an_entry_that_does_not_parse_stops_the_script_before_anything_starts(empty: Root) -> None:
    """Where resolve doubts, no training starts from nothing, either."""
    (empty.path / "pub").mkdir()
    (empty.path / "pub" / "stray").touch()
    with Job(empty) as job:
        job.ended().failed("resolve", "stray")
    assert not (empty.path / "exec").exists()


def test_the_stand_in_writes_trainers_files_in_its_order(tmp_path: Path) -> None:
    """The stand-in is like Trainer in what matters here: these files, its state last, a log that grows."""
    stand_in("--output_dir", tmp_path, "--max_steps", 20, "--save_steps", 10, "--save-seconds", 0.4)
    save = tmp_path / "checkpoint-20"
    assert sorted(os.listdir(save), key=lambda name: (save / name).stat().st_mtime_ns) == FILES
    states = [json.loads((tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text()) for step in (10, 20)]
    assert [state["global_step"] for state in states] == [10, 20]
    assert [len(state["log_history"]) for state in states] == [10, 20]


@pytest.mark.parametrize("missing", FILES)
def test_the_stand_in_refuses_an_incomplete_save(tmp_path: Path, missing: str) -> None:
    """Resuming from a save of which a file is missing fails, so that no test passes by resuming from a torn save."""
    stand_in("--output_dir", tmp_path, "--max_steps", 1, "--save-seconds", 0)
    (tmp_path / "checkpoint-1" / missing).unlink()
    refused = stand_in("--output_dir", tmp_path, "--resume_from_checkpoint", tmp_path / "checkpoint-1")
    assert refused.returncode == 1
    assert f"{missing} missing" in refused.stderr


def test_the_demo_goes_as_it_tells(tmp_path: Path) -> None:
    """scripts/demo checks itself and exits 0; it works from any folder, and removes what it made."""
    demo = JOB_SCRIPT.parent.parent / "scripts" / "demo"
    env = {**os.environ, "PUBLISHD_DEMO_VENV": sys.prefix, "TMPDIR": str(tmp_path), "HOME": ""}
    shown = subprocess.run([demo], env=env, cwd="/", capture_output=True, text=True, timeout=100, check=False)
    assert shown.returncode == 0, shown
    assert shown.stderr == ""
    for text in ("checkpoint-70: not complete", "pruned", "resuming from", "README.md", "    RESUME=$(publish resolve"):
        assert text in shown.stdout
    assert list(tmp_path.iterdir()) == []


def test_slurm_s_script_with_a_trap_hands_sigterm_on(tmp_path: Path) -> None:
    """The shell alone is told: the trainer saves once more, the watch publishes it, and the script goes on to its end."""
    root = Root(tmp_path / "root", "4101.0")
    root.path.mkdir()
    script = JOB_SCRIPT.parent.parent / "scripts" / "slurm" / "trap.sh"
    with Job(root, script=script, SLURM_JOB_ID="4101", MAX_STEPS="100000", SAVE_STEPS="100") as job:
        eventually((root.execution / "checkpoint-100" / "trainer_state.json").exists, "the first save", 60)
        eventually(lambda: "watching: " in job.log, "the watch", 60)
        job.process.terminate()
        ended = job.ended().succeeded()
    assert b"told to end by SIGTERM" in ended.out
    assert root.steps == sorted(int(save.name.partition("-")[2]) for save in root.execution.iterdir())


# Stands before publishd: SIGTERM finds a watch before it has begun, as where training is over in no time.
HASTY = """#!/bin/sh
case "$*" in
*-once*) {once} ;;
watch*) kill -TERM $$ ;;
esac
exec {publishd} "$@"
"""


@pytest.mark.parametrize(("once", "status", "steps"), [("", 0, [1]), ("exit 1", 1, [])])
def test_slurm_s_script_with_a_trap_looks_once_more_where_the_watch_was_killed(
    tmp_path: Path, once: str, status: int, steps: list[int]
) -> None:
    """What is complete is published all the same, and if it can't be, the script fails."""
    root = Root(tmp_path / "root", "4101.0")
    root.path.mkdir()
    hasty = tmp_path / "publishd"
    hasty.write_text(HASTY.format(publishd=PUBLISHD, once=once))
    hasty.chmod(0o755)
    script = tmp_path / "trap.sh"
    script.write_text(f"PATH={tmp_path}:$PATH\n{(JOB_SCRIPT.parent.parent / 'scripts' / 'slurm' / 'trap.sh').read_text()}")
    with Job(root, script=script, SLURM_JOB_ID="4101", MAX_STEPS="1", SAVE_STEPS="1") as job:
        assert job.ended().code == status
    assert root.steps == steps
