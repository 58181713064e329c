"""A real SLURM on this host: munge, a controller and a few emulated nodes, all on loopback, jobs tracked by cgroups.

Cgroup tracking is what real clusters use, and it decides who gets which signal: with it SLURM tells the batch process and
the tasks of job steps, and nobody else; once the batch process is gone it kills all that is left within milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from commands import eventually, require
from services.programs import Program, free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

FREEZER = Path("/sys/fs/cgroup/freezer")
_DAEMONS = ("munged", "slurmctld", "slurmd")
# What a node starts is in a session of its own, and outlives it; a job's end that nobody hears of is reported for ever.
_JOBS_DIE_WITH_IT = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
_CPUS = 64
"""Of each node, as SLURM believes: so many jobs may run side by side."""
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY")


@dataclass(frozen=True)
class JobState:
    """A job as SLURM tells it."""

    state: str
    exit_code: str
    """Status and signal, as `0:15`."""
    restarts: int
    reason: str


class Cluster:
    """A controller and its nodes; `sbatch` and the like are called with the cluster's configuration."""

    def __init__(self, folder: Path, configuration: Path, programs: list[Program], nodes: Sequence[str]) -> None:
        self.folder, self.nodes = folder, nodes
        self._configuration, self._programs = configuration, programs

    def call(self, *command: str, **variables: str) -> str:
        """What a command of SLURM's prints; it must succeed."""
        environ = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "SLURM_CONF": str(self._configuration), **variables}
        ran = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )
        assert ran.returncode == 0, f"{command}: {ran.stdout}{ran.stderr}"
        return ran.stdout.strip()

    def submit(self, script: Path, output: Path, *options: str, folder: Path | None = None, **variables: str) -> int:
        """Submit a job script, which gets these variables; returns the job's number."""
        place = (f"--chdir={folder or self.folder}", f"--output={output}")
        return int(self.call("sbatch", "--parsable", *place, *options, str(script), **variables))

    def show(self, job: int) -> JobState:
        shown = self.call("scontrol", "--oneliner", "show", "job", str(job))
        fields = dict(word.split("=", 1) for word in shown.split() if "=" in word)
        return JobState(fields["JobState"], fields["ExitCode"], int(fields["Restarts"]), fields["Reason"])

    def over(self, job: int, seconds: float = 60) -> JobState:
        """Wait for the end of a job, and of all that it started."""

        def ended() -> JobState | None:
            shown = self.show(job)
            return shown if shown.state in _OVER else None

        found = eventually(ended, f"the end of job {job}", seconds)
        assert isinstance(found, JobState)
        return found

    def stop(self) -> None:
        with contextlib.suppress(AssertionError):
            jobs = self.call("squeue", "--noheader", "--format", "%A").split()
            if jobs:
                self.call("scancel", "--signal=KILL", "--full", *jobs)
                self.call("scancel", *jobs)
                eventually(lambda: not self.call("squeue", "--noheader"), "the end of all jobs", 20)
        for program in reversed(self._programs):
            program.stop(0)
        # Its cgroups are SLURM's to make and nobody's to remove.
        with contextlib.suppress(AssertionError):
            eventually(self._cgroups_removed, "the end of all that ran in cgroups", 10)

    def _cgroups_removed(self) -> bool:
        trees = [tree for tree in (FREEZER / f"slurm_{node}" for node in self.nodes) if tree.exists()]
        for tree in trees:
            for path, _, _ in os.walk(tree, topdown=False):
                with contextlib.suppress(OSError):  # something in it has not quite ended
                    os.rmdir(path)
        return not trees


@contextlib.contextmanager
def cluster(*, nodes: int, kill_wait: int, preemptable: int = 0) -> Iterator[Cluster]:
    """A cluster; its last `preemptable` nodes are in the partitions `low` and `high` only, where high preempts low.

    `kill_wait` is in whole seconds, as SLURM counts them: from SIGTERM to SIGKILL.
    """
    require("slurm", _why_not())
    folder = Path(tempfile.mkdtemp(prefix="publishd-slurm-"))
    folder.chmod(0o755)
    programs: list[Program] = []
    tag = secrets.token_hex(3)
    names = [f"t{tag}n{number}" for number in range(nodes)]
    running = Cluster(folder, folder / "slurm.conf", programs, names)
    try:
        _start(running, programs, kill_wait, preemptable)
        yield running
    finally:
        running.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _why_not() -> str | None:
    missing = [program for program in (*_DAEMONS, "sbatch", "unshare") if not _program(program)]
    if missing:
        return f"{', '.join(missing)} not installed"
    if os.geteuid() != 0:
        return "only root can start it"
    if not (FREEZER / "cgroup.procs").exists():
        return f"{FREEZER} is no cgroup hierarchy, without which jobs are not tracked as on real clusters"
    return None


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _start(running: Cluster, programs: list[Program], kill_wait: int, preemptable: int) -> None:
    folder = running.folder
    munge, socket_ = folder / "munge", folder / "munge" / "socket"
    munge.mkdir(mode=0o755)
    key = munge / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    files = (f"--key-file={key}", f"--socket={socket_}", f"--pid-file={munge}/pid", f"--seed-file={munge}/seed")
    _run(programs, folder / "munged", "munged", "--foreground", "--force", "--num-threads=2", *files)
    eventually(socket_.exists, "munge's socket")

    control, *ports = free_ports(1 + len(running.nodes))
    (folder / "slurm.conf").write_text(_configuration(running, socket_, control, ports, kill_wait, preemptable))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\n")
    configuration = str(folder / "slurm.conf")
    (folder / "state").mkdir()
    _run(programs, folder / "slurmctld", "slurmctld", "-D", "-c", "-f", configuration)
    for node in running.nodes:
        (folder / "spool" / node).mkdir(parents=True)
        _run(programs, folder / node, "slurmd", "-D", "-N", node, "-f", configuration, prefix=_JOBS_DIE_WITH_IT)
    eventually(lambda: _idle(running) == len(running.nodes), "all nodes idle", 60)


def _run(programs: list[Program], folder: Path, name: str, *arguments: str, prefix: Sequence[str] = ()) -> None:
    folder.mkdir()
    program = _program(name)
    assert program
    programs.append(Program([*prefix, program, *arguments], folder))


def _idle(running: Cluster) -> int:
    try:
        nodes = running.call("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").split()
    except AssertionError:
        return 0  # the controller is not up yet
    return len(set(nodes))


def _configuration(running: Cluster, munge: Path, control: int, ports: Sequence[int], kill_wait: int, preemptable: int) -> str:
    folder, host = running.folder, socket.gethostname().partition(".")[0]
    shared = running.nodes[: len(running.nodes) - preemptable]
    contested = running.nodes[len(shared) :]
    settings: Mapping[str, object] = {
        "ClusterName": "tests",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        # A requeued job waits for as long as credentials live: 120 s by default.
        "AuthInfo": f"socket={munge},cred_expire=5",
        "CommunicationParameters": "NoCtldInAddrAny,NoInAddrAny",
        "SlurmctldPort": control,
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd.%n.pid",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool" / "%n",
        "ProctrackType": "proctrack/cgroup",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SlurmdParameters": "config_overrides",
        "SchedulerParameters": "sched_interval=2,bf_interval=2,sched_min_interval=100000",
        "MpiDefault": "none",
        "SwitchType": "switch/none",
        "ReturnToService": 2,
        "JobRequeue": 1,
        "KillWait": kill_wait,
        "MinJobAge": 3600,
        "InactiveLimit": 0,
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
    }
    lines = [f"{name}={value}" for name, value in settings.items()]
    for node, port in zip(running.nodes, ports, strict=True):
        size = f"CPUs={_CPUS} CoresPerSocket={_CPUS} RealMemory=1000 State=UNKNOWN"
        lines.append(f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} {size}")
    partition = "PartitionName={} Nodes={} Default={} MaxTime=INFINITE State=UP PriorityTier={} PreemptMode={}"
    lines.append(partition.format("main", ",".join(shared), "YES", 5, "OFF"))
    if contested:
        lines.append(partition.format("low", ",".join(contested), "NO", 1, "REQUEUE"))
        lines.append(partition.format("high", ",".join(contested), "NO", 10, "OFF"))
    return "\n".join(lines) + "\n"
