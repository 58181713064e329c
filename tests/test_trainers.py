"""Real trainers, killed in the middle of their saves: transformers.Trainer in the job script, torch DCP beside a watch."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import ATTEMPT, BIN, EPOCH, JOB_SCRIPT, STAND_IN, Job, Root, Watch, environment, eventually, require

NEXT_ATTEMPT, NEXT_EPOCH = "1.4102.0", 2 * EPOCH
TRAIN_HF = Path(__file__).parent / "trainers" / "train_hf.py"
TRAIN_DCP = TRAIN_HF.with_name("train_dcp.py")
# The machine's other cores belong to the other tests, and nothing is to be looked for elsewhere.
CALM: dict[str, Any] = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",
}

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def frameworks() -> None:
    """Skip where torch or transformers are not installed."""
    missing = [name for name in ("torch", "transformers", "accelerate") if importlib.util.find_spec(name) is None]
    require("frameworks", f"{' and '.join(missing)} not installed" if missing else None)


@pytest.fixture
def empty(tmp_path: Path) -> Root:
    """A checkpoint root in which nothing was ever done."""
    root = Root(tmp_path / "root")
    root.path.mkdir()
    return root


def published(root: Root) -> list[Path]:
    """The published saves, oldest first."""
    return [Path(line["save"]) for line in root.run("list", "-json").succeeded().json]


def ends(arguments: list[str | Path], status: int = 0) -> str:
    """Run a trainer to its end, which must have this exit status; return its stdout."""
    trainer = subprocess.Popen(
        arguments, env=environment(**CALM), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = trainer.communicate(timeout=200)
    finally:
        if trainer.poll() is None:
            os.killpg(trainer.pid, signal.SIGKILL)
            trainer.communicate()
    assert trainer.returncode == status, err
    return out


def check(trainer: Path, saves: list[Path]) -> None:
    """Load each save as the trainer does; each must hold the step that its name says."""
    out = ends([sys.executable, trainer, "--check", *saves])
    assert out.splitlines()[-1].startswith("checked ")
    checked = [line for line in out.splitlines() if line.startswith("checked ")]
    assert checked == [f"checked {save} {save.name.rpartition('-')[2]}" for save in saves]


@pytest.mark.parametrize("killed", ["by itself", "from outside"])
def test_a_trainer_killed_in_the_middle_of_a_save(empty: Root, tmp_path: Path, killed: str) -> None:
    """The next execution resumes from the last whole save and ends at the right step; nothing torn was ever published."""
    half, settings = empty.execution / "checkpoint-8", {**CALM, "SAVE_STEPS": "2"}
    fate: dict[str, Any] = {"DIE_IN_SAVE" if killed == "by itself" else "HANG_IN_SAVE": "8"}
    with Job(empty, TRAIN_HF, MAX_STEPS="20", **settings, **fate) as job:
        if killed == "from outside":
            eventually((half / "rng_state.pth").exists, "a half-written save", 100)
            os.kill(job.child("train.py"), signal.SIGKILL)
        assert job.ended(150).code == 128 + signal.SIGKILL
        assert job.log.count(" published: ") == 3
    assert (half / "optimizer.pt").stat().st_size > 0
    assert not (half / "trainer_state.json").exists()
    assert [save.name for save in published(empty)] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    seen = [Path(shutil.copytree(save, tmp_path / "seen" / save.name)) for save in published(empty)]

    last = empty.execution / "checkpoint-6"
    following = Root(empty.path, NEXT_ATTEMPT)
    with Job(following, TRAIN_HF, epoch=NEXT_EPOCH, MAX_STEPS="12", **settings) as job:
        out = job.ended(150).succeeded().out.decode()
    assert f"resuming from {last}\n" in out
    assert "ended at 12\n" in out
    assert published(empty) == [following.execution / f"checkpoint-{step}" for step in (8, 10, 12)]
    assert not last.exists()
    assert (half / "optimizer.pt").exists()
    check(TRAIN_HF, seen + published(empty))


@pytest.mark.parametrize("jit", ["0", "1"], ids=["by a callback", "by Trainer itself"])
def test_what_is_saved_on_sigterm_is_published(empty: Root, tmp_path: Path, jit: str) -> None:
    """The save that a trainer makes when it is told to stop is found by the watch's final scan."""
    script = tmp_path / "job.sh"
    # No scan but the first and the final one.
    script.write_text(JOB_SCRIPT.read_text().replace("-framework hf", "-framework hf -interval 1h"))
    settings = {**CALM, "MAX_STEPS": "5000", "SAVE_STEPS": "5000", "STEP_SECONDS": "0.1"}
    with Job(empty, TRAIN_HF, script=script, JIT=jit, **settings) as job:
        trainer = job.child("train.py")
        eventually(lambda: takes_sigterm(trainer), "a trainer that listens", 100)
        os.kill(trainer, signal.SIGTERM)
        job.ended(150).succeeded()
    (save,) = published(empty)
    assert empty.resolved() == f"exec/{ATTEMPT}/{save.name}"
    check(TRAIN_HF, [save])


def takes_sigterm(pid: int) -> bool:
    """Whether the process has a handler for SIGTERM."""
    (caught,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:")]
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_a_trainer_that_deletes_its_older_saves(empty: Root) -> None:
    """Saves that vanish beside the watch end nothing: it stays alive, and resolve -verify answers a whole one."""
    env = environment(MAX_STEPS="24", SAVE_STEPS="2", STEP_SECONDS="0.05", SAVE_TOTAL_LIMIT="2", **CALM)
    with Watch(empty, "hf", interval="20ms") as watch:
        subprocess.run([sys.executable, TRAIN_HF, "--output_dir", empty.execution], env=env, timeout=150, check=True)
        eventually(lambda: 24 in empty.steps, "the publication of the last save")
        assert watch.process.poll() is None
        watch.stop().succeeded(b"")
    last, before = empty.execution / "checkpoint-24", empty.execution / "checkpoint-22"
    empty.run("resolve", "-verify").succeeded(b"%s\n" % os.fsencode(last))
    assert sorted(os.listdir(empty.execution)) == [before.name, last.name]
    assert len(empty.pub) > 2
    like = empty.path / "like"
    ends([sys.executable, STAND_IN, "--output_dir", like, "--max_steps", "1"])
    assert sorted(os.listdir(last)) == sorted(os.listdir(like / "checkpoint-1"))

    shutil.rmtree(last)
    assert f"passed over: {last}: " in empty.run("resolve", "-verify").succeeded(b"%s\n" % os.fsencode(before)).err


@pytest.mark.parametrize(("ranks", "mode"), [(1, "sync"), (2, "sync"), (2, "async")])
def test_dcp_killed_in_the_middle_of_a_save(empty: Root, ranks: int, mode: str) -> None:
    """Each save that every rank finished is published and loads; the one in which a rank was killed never is."""
    # --standalone makes torchrun pick a free port itself.
    launch = [BIN / "torchrun", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else [sys.executable]
    arguments = ["--output_dir", str(empty.execution), "--mode", mode, "--max_steps", "40", "--die-in-save", "40"]
    with Watch(empty, "dcp") as watch:
        ends([*launch, TRAIN_DCP, *arguments], status=1 if ranks > 1 else -signal.SIGKILL)
        watch.stop().succeeded(b"")
        assert "step-40: not complete: no .metadata yet" in watch.log
    assert sorted(os.listdir(empty.execution)) == ["step-10", "step-20", "step-30", "step-40"]
    assert [save.name for save in published(empty)] == ["step-10", "step-20", "step-30"]
    check(TRAIN_DCP, published(empty))
