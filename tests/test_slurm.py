"""The job scripts under a real SLURM, ended in every way that it has; all jobs run side by side, and each test waits for its own.

The trainer is the stand-in of the examples: told by SIGTERM or SIGUSR1 it saves once more and ends with status 0.
"""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from commands import BIN, JOB_SCRIPT, PUBLISHD, STAND_IN, Root, eventually
from faulty_calls import faulty
from services.slurm import Cluster, JobState, cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

# A test waits for its own job only, but the first for its cluster and for two dozen jobs at once.
pytestmark = pytest.mark.timeout(500)

SCRIPTS = Path(__file__).parent.parent / "scripts" / "slurm"
PATH = f"{BIN}:/usr/local/bin:/usr/bin:/bin"
KILL_WAIT = 15
# SLURM looks at time limits every half minute: this job is told after about half a minute, and would be killed after two.
LIMIT = "--time=2"
TOLD_EARLY = "60"

TRAINER = f"""
import os, runpy, signal, sys
from pathlib import Path

sys.argv[0] = {str(STAND_IN)!r}
done = Path(f"done-{{os.environ['DISPATCH_ATTEMPT']}}")
told = {{signal.SIGTERM, signal.SIGUSR1}}
if os.environ.get("SLURM_PROCID", "0") == "0":
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        done.touch()
else:  # a rank that writes nothing, and ends with the first
    signal.pthread_sigmask(signal.SIG_BLOCK, told)
    while not signal.sigtimedwait(told, 0.2) and not done.exists():
        pass
"""


@dataclass(frozen=True)
class Scenario:
    """One job: its script, how it ends, and the state in which SLURM then has it."""

    script: str
    ending: str
    state: str
    options: tuple[str, ...] = ()
    nodes: int = 1
    variables: dict[str, str] = field(default_factory=dict, hash=False, compare=False)

    @property
    def name(self) -> str:
        return f"{self.script}-{self.ending}"

    @property
    def resumes_itself(self) -> bool:
        return self.state == "RUNNING"


def _scenarios() -> Iterator[Scenario]:
    lingering = {"LINGER": "4s", "DRAIN": "6s"}
    for script, nodes, signal_, variables in (
        ("run", 1, "B:TERM@", {}),
        ("trap", 1, "B:TERM@", {}),
        ("requeue", 1, "B:TERM@", {}),
        ("srun", 2, "TERM@", {}),
        ("srun-usr1", 2, "B:TERM@", {}),
        ("sidecar", 2, "TERM@", lingering),
    ):
        at_limit = "RUNNING" if script == "requeue" else "COMPLETED"
        yield Scenario(script, "scancel", "CANCELLED", nodes=nodes, variables=variables)
        yield Scenario(script, "limit", at_limit, (LIMIT, f"--signal={signal_}{TOLD_EARLY}"), nodes, variables)
        yield Scenario(script, "requeue", "RUNNING", nodes=nodes, variables=variables)
        yield Scenario(script, "preemption", "RUNNING", nodes=nodes, variables=variables)


SCENARIOS = {scenario.name: scenario for scenario in _scenarios()}
CONTESTED = sum(scenario.nodes for scenario in SCENARIOS.values() if scenario.ending == "preemption")


class Execution:
    """A job with a folder and a checkpoint root of its own."""

    def __init__(self, slurm: Cluster, folder: Path, trainer: str = TRAINER) -> None:
        self.slurm, self.folder = slurm, folder
        self.root = Root(folder / "root")
        self.root.path.mkdir(parents=True)
        (folder / "train.py").write_text(trainer)
        self.job, self.attempt = 0, ""

    @property
    def log(self) -> str:
        """What all executions wrote so far, in their order."""
        try:
            return (self.folder / "log").read_text("utf-8", "backslashreplace")
        except FileNotFoundError:
            return ""

    def submit(self, script: Path, *options: str, **variables: str) -> int:
        defaults = {"MAX_STEPS": "100000", "SAVE_STEPS": "20", "STEP_SECONDS": "0.05", "SAVE_SECONDS": "0.4"}
        given = {"CKPT": str(self.root.path), "PATH": PATH, **defaults, **variables}
        self.job = self.slurm.submit(script, self.folder / "log", "--open-mode=append", *options, folder=self.folder, **given)
        self.attempt = self.attempt or variables.get("DISPATCH_ATTEMPT") or f"{self.job}.0"
        return self.job

    def says(self, text: str, *, times: int = 1, seconds: float = 120) -> None:
        def said() -> bool:
            return self.log.count(text) >= times

        try:
            eventually(said, text, seconds)
        except AssertionError:
            raise AssertionError(f"{text!r} not said by job {self.job} ({self.slurm.show(self.job)}):\n{self.log}") from None

    @property
    def whole(self) -> set[str]:
        """Every complete save of the first execution: its path below the root."""
        found = set()
        for marker in self.first.glob("checkpoint-*/trainer_state.json"):
            try:
                step = json.loads(marker.read_bytes())["global_step"]
            except ValueError:
                continue
            if marker.parent.name == f"checkpoint-{step}":
                found.add(str(marker.parent.relative_to(self.root.path)))
        return found

    @property
    def published(self) -> list[str]:
        """The paths of the first execution's publications, latest last."""
        paths = [line.split(b"\t")[2].decode() for line in self.root.run("list").succeeded().out.splitlines()]
        return [path for path in paths if path.startswith(f"exec/{self.first.name}/")]

    @property
    def last_saved(self) -> str:
        """The save that the first execution's trainer was writing last."""
        return max((path.name for path in self.first.iterdir()), key=lambda name: int(name.rpartition("-")[2]))

    @property
    def first(self) -> Path:
        """The folder of the first execution."""
        return self.root.path / "exec" / self.attempt


@dataclass
class Outcome:
    """How the first execution of a scenario ended, and how the next one began."""

    execution: Execution
    state: JobState
    whole: set[str]
    published: list[str]
    told: str
    """The name of the save that the trainer wrote when it was told."""
    resumed: str


def carry_out(slurm: Cluster, scenario: Scenario, folder: Path, contested: list[str]) -> Outcome:
    """Submit the job, end it once it has a complete save, and see the next execution begin."""
    execution = Execution(slurm, folder)
    script, options = SCRIPTS / f"{scenario.script}.sh", scenario.options
    if scenario.ending == "preemption":
        options = ("--partition=low", "--exclusive", f"--nodelist={','.join(contested)}")
    job = execution.submit(script, *options, **scenario.variables)
    eventually(lambda: execution.whole, f"a save of {scenario.name}", 120)
    if scenario.ending == "scancel":
        slurm.call("scancel", str(job))
    elif scenario.ending == "requeue":
        slurm.call("scontrol", "requeue", str(job))
    elif scenario.ending == "preemption":
        preempting = folder / "preempting.sh"
        preempting.write_text("#!/bin/sh\n")
        place = ("--partition=high", "--exclusive", f"--nodes={len(contested)}", f"--nodelist={','.join(contested)}")
        slurm.submit(preempting, folder / "preempting.log", *place)
    if scenario.resumes_itself:
        execution.says("resuming from /", times=1, seconds=150)
        state = slurm.show(job)
        whole, published, told = execution.whole, execution.published, execution.last_saved
        slurm.call("scancel", str(job))
        slurm.over(job)
    else:
        state = slurm.over(job, 150)
        eventually(lambda: not slurm.call("squeue", "--noheader", f"--jobs={job}"), "the end of all of it")
        whole, published, told = execution.whole, execution.published, execution.last_saved
        execution.submit(script, **scenario.variables, MAX_STEPS="1")
        assert slurm.over(execution.job, 150).state == "COMPLETED", execution.log
    return Outcome(execution, state, whole, published, told, _resumed(execution))


def _resumed(execution: Execution) -> str:
    """The save from which a trainer resumed last, below the root."""
    line = [line for line in execution.log.splitlines() if line.startswith("train.py: resuming from ")][-1]
    return str(Path(line.split()[3]).relative_to(execution.root.path))


class Campaign:
    """All scenarios that were asked for, under way at once."""

    def __init__(self, slurm: Cluster, folder: Path, names: list[str]) -> None:
        contested = list(slurm.nodes[2:])
        self._threads = ThreadPoolExecutor(len(names) or 1)
        self._outcomes: dict[str, Future[Outcome]] = {}
        for name in names:
            scenario = SCENARIOS[name]
            nodes = [contested.pop() for _ in range(scenario.nodes)] if scenario.ending == "preemption" else []
            self._outcomes[name] = self._threads.submit(carry_out, slurm, scenario, folder / name, nodes)

    def outcome(self, name: str) -> Outcome:
        return self._outcomes[name].result(400)

    def stop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with cluster(nodes=2 + CONTESTED, preemptable=CONTESTED, kill_wait=KILL_WAIT) as running:
        yield running


@pytest.fixture(scope="module")
def campaign(request: pytest.FixtureRequest, slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    wanted = {
        str(item.callspec.params["name"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.fspath == request.node.fspath and "campaign" in item.fixturenames
    }
    running = Campaign(slurm, tmp_path_factory.mktemp("slurm"), sorted(wanted))
    yield running
    running.stop()


@pytest.fixture
def execution(slurm: Cluster, tmp_path: Path) -> Iterator[Execution]:
    made = Execution(slurm, tmp_path / "job")
    yield made
    if made.job and slurm.show(made.job).state in ("RUNNING", "PENDING"):
        slurm.call("scancel", str(made.job))


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_complete_save_is_lost_and_the_next_run_resumes_from_the_last(campaign: Campaign, name: str) -> None:
    """However SLURM ends it, the save that the trainer makes then is published and resumed from; the state is as promised."""
    scenario, outcome = SCENARIOS[name], campaign.outcome(name)
    log = outcome.execution.log
    assert outcome.state.state == scenario.state, (outcome.state, log)
    assert outcome.state.restarts == int(scenario.resumes_itself)
    if scenario.state == "COMPLETED":
        assert outcome.state.exit_code == "0:0"
    if scenario.script != "sidecar":  # what its steps print once bash is dead is lost
        assert "told to end by SIG" in log
    assert set(outcome.published) <= outcome.whole, log
    kept = set(outcome.published) if "pruned: " in log else outcome.whole
    assert set(outcome.published) == kept, log
    assert outcome.published[-1].endswith(f"/{outcome.told}"), log
    assert outcome.resumed == outcome.published[-1], log


@pytest.mark.parametrize("name", ["run-scancel", "run-requeue"])
def test_attempt_and_epoch_grow_with_a_requeue_and_with_a_new_submission(campaign: Campaign, name: str) -> None:
    """`publishd env` gives the number of the job and its restart, or the next job's number."""
    execution = campaign.outcome(name).execution
    attempts = (path.name for path in (execution.root.path / "exec").iterdir())
    first, last = sorted(attempts, key=lambda name: tuple(map(int, name.split("."))))
    job, restart = map(int, first.split("."))
    assert restart == 0
    assert last == (f"{job}.1" if name == "run-requeue" else f"{execution.job}.0")
    names = [int(name.split("-")[0]) for name in execution.root.pub]
    assert names[0] == job * 1_000_000


def test_a_job_that_requeues_itself_does_not_once_training_is_over(execution: Execution) -> None:
    """Nobody told it to end: it is COMPLETED, and pruned."""
    job = execution.submit(SCRIPTS / "requeue.sh", MAX_STEPS="100", STEP_SECONDS="0.005", SAVE_SECONDS="0.05")
    assert execution.slurm.over(job) == JobState("COMPLETED", "0:0", 0, "None"), execution.log
    assert [path.rpartition("-")[2] for path in execution.published] == ["60", "80", "100"]


def test_a_job_that_requeues_itself_has_its_trainer_s_status(execution: Execution) -> None:
    """A trainer that fails is no reason to begin again."""
    (execution.folder / "train.py").write_text("raise SystemExit(3)")
    job = execution.submit(SCRIPTS / "requeue.sh")
    assert execution.slurm.over(job) == JobState("FAILED", "3:0", 0, "NonZeroExitCode"), execution.log


def test_a_cancelled_job_is_not_brought_back_by_its_own_requeue(execution: Execution) -> None:
    """1. The job is told that its limit is near. 2. Its trainer saves. 3. It is cancelled meanwhile, and stays so."""
    job = execution.submit(SCRIPTS / "requeue.sh", SAVE_SECONDS="3")
    execution.says("train.py: saving checkpoint-20")
    execution.slurm.call("scancel", "--signal=TERM", "--batch", str(job))
    execution.says("SIGTERM: forwarded")
    execution.slurm.call("scancel", str(job))
    state = execution.slurm.over(job)
    assert (state.state, state.restarts) == ("CANCELLED", 0), execution.log
    assert "told to end" in execution.log
    assert set(execution.published) == execution.whole


def test_an_srun_that_is_sent_sigterm_loses_the_last_save(execution: Execution) -> None:
    """Why the scripts say -forward: srun ends its tasks in the middle of what they do."""
    script = execution.folder / "job.sh"
    text = (SCRIPTS / "srun.sh").read_text()
    assert " -forward TERM=none" in text
    script.write_text(text.replace(" -forward TERM=none", ""))
    job = execution.submit(script, SAVE_SECONDS="3")
    eventually(lambda: execution.whole, "a save", 120)
    execution.slurm.call("scancel", "--signal=TERM", "--batch", str(job))
    execution.slurm.over(job)
    assert "told to end" not in execution.log
    assert set(execution.published) == execution.whole


def test_a_step_that_begins_after_training_is_over_is_ended_all_the_same(execution: Execution) -> None:
    """A trainer that fails at once must not leave a watch that nobody tells to end, and a job that lasts to its limit."""
    (execution.folder / "train.py").write_text("raise SystemExit(3)")
    late = execution.folder / "srun"
    late.write_text('#!/bin/sh\ncase "$*" in *--job-name=watch*) sleep 5 ;; esac\nexec /usr/bin/srun "$@"\n')
    late.chmod(0o755)
    job = execution.submit(SCRIPTS / "sidecar.sh", PATH=f"{execution.folder}:{PATH}", LINGER="1s", DRAIN="2s")
    state = execution.slurm.over(job)
    assert (state.state, state.exit_code) == ("FAILED", "3:0"), execution.log


def test_a_step_that_is_told_before_it_has_begun_costs_no_save(execution: Execution) -> None:
    """It dies of the signal: the script looks once more itself."""
    hasty = execution.folder / "publishd"
    hasty.write_text(f'#!/bin/sh\ncase "$*" in *-once*) ;; watch*) kill -TERM $$ ;; esac\nexec {PUBLISHD} "$@"\n')
    hasty.chmod(0o755)
    path = f"{execution.folder}:{PATH}"
    job = execution.submit(SCRIPTS / "sidecar.sh", PATH=path, MAX_STEPS="20", LINGER="1s", DRAIN="2s")
    state = execution.slurm.over(job)
    assert (state.state, state.exit_code) == ("COMPLETED", "0:0"), execution.log
    assert set(execution.published) == execution.whole
    assert execution.whole


def told_together(execution: Execution, linger: str) -> None:
    script = execution.folder / "job.sh"
    text = (SCRIPTS / "trap.sh").read_text()
    assert "-framework hf &" in text
    script.write_text(text.replace("-framework hf &", f"-framework hf {linger} &"))
    job = execution.submit(script, SAVE_SECONDS="3")
    eventually(lambda: execution.whole, "a save", 120)
    execution.slurm.call("scancel", "--signal=TERM", "--full", str(job))
    execution.slurm.over(job)
    execution.says("told to end by")


def test_told_together_the_watch_that_lingers_publishes_the_last_save(execution: Execution) -> None:
    """`scancel --full` tells trainer and watch at once; -linger is for that."""
    told_together(execution, "-linger 6s")
    assert execution.published[-1].endswith(f"/{execution.last_saved}"), execution.log
    assert set(execution.published) == execution.whole


def test_told_together_the_watch_that_does_not_linger_is_too_early(execution: Execution) -> None:
    """The last save is complete, and unpublished; `watch -once` publishes it."""
    told_together(execution, "")
    missed = execution.whole - set(execution.published)
    assert [path.rpartition("/")[2] for path in missed] == [execution.last_saved], execution.log
    catch_up(execution)


def catch_up(execution: Execution) -> None:
    """`watch -once` as the execution that was cut off publishes what it left."""
    attempt = f"{execution.job}.0"
    identity = ("-attempt", attempt, "-epoch", str(execution.job * 1_000_000))
    execution.root.run("watch", "-framework", "hf", "-once", "-drain", "2m", *identity, timeout=150).succeeded()
    assert set(execution.published) == execution.whole


def test_a_script_without_a_trap_loses_its_watch_at_once_and_no_publication(execution: Execution) -> None:
    """Why there are scripts with one: neither trainer nor watch hears of the end. What was published stays."""
    job = execution.submit(JOB_SCRIPT, DISPATCH_ATTEMPT="naive.0", DISPATCH_EPOCH="1")
    eventually(lambda: execution.whole, "a save", 120)
    execution.root.run("watch", "-framework", "hf", "-once", "-attempt", "naive.0", "-epoch", "1").succeeded()
    before = execution.published
    eventually(lambda: len(execution.whole) > len(before), "another save", 60)
    execution.slurm.call("scancel", str(job))
    assert execution.slurm.over(job).state == "CANCELLED"
    assert "told to end" not in execution.log
    assert execution.published == before
    assert execution.root.resolved() == before[-1]
    execution.root.run("watch", "-framework", "hf", "-once", "-attempt", "naive.0", "-epoch", "1").succeeded()
    assert set(execution.published) == execution.whole


MANY_SAVES = """
import signal, sys, time
from pathlib import Path

out = Path(sys.argv[sys.argv.index("--output_dir") + 1])
while not Path("go").exists():
    time.sleep(0.05)
for step in range(1, 1001):
    save = out / f"checkpoint-{step}"
    save.mkdir()
    (save / "model").write_bytes(b"weights")
    (save / "trainer_state.json").write_text('{"global_step": %d}' % step)
Path("made").touch()
signal.sigwait({signal.SIGTERM})
"""


def test_killed_in_the_middle_of_a_drain_the_newest_are_published_and_the_rest_later(tmp_path: Path) -> None:
    """1. A job with 1,000 unpublished saves is cancelled; fsync is slow. 2. KillWait runs out. 3. `watch -once` does the rest."""
    with cluster(nodes=1, kill_wait=5) as slurm:
        execution = Execution(slurm, tmp_path / "job", MANY_SAVES)
        script = execution.folder / "job.sh"
        text = (SCRIPTS / "run.sh").read_text()
        script.write_text(text.replace("-framework hf", "-framework hf -interval 1h -drain 1h"))
        slow = faulty(tmp_path, "fsync", "", "wait 5")
        job = execution.submit(
            script, "--hold", **{name: value for name, value in slow.items() if name.startswith(("LD_", "FAULT_"))}
        )
        Root(execution.root.path, execution.attempt).hf(0)
        slurm.call("scontrol", "release", str(job))
        execution.says("published: ")  # the first scan is over
        (execution.folder / "go").touch()
        eventually((execution.folder / "made").exists, "1,000 saves", 60)
        slurm.call("scancel", str(job))
        assert slurm.over(job).state == "CANCELLED"
        eventually(lambda: not slurm.call("squeue", "--noheader"), "the end of all of it")
        assert "ended: sh" in execution.log
        first, *steps = sorted(int(path.rpartition("-")[2]) for path in execution.published)
        assert first == 0
        assert 0 < len(steps) < 1000
        assert steps == list(range(1001 - len(steps), 1001))
        assert len(execution.whole) == 1001
        catch_up(execution)


def test_each_script_says_when_it_is_for_and_is_executable() -> None:
    """Its head comment is its manual."""
    for script in SCRIPTS.iterdir():
        head = script.read_text().partition("#SBATCH")[0]
        assert "scancel" in head, script
        assert "state of the job" in head or "CANCELLED" in head, script
        assert script.stat().st_mode & 0o111, script
