"""The manifests for Kubernetes: what their containers run is run here as processes, in the order in which a kubelet does it.

No cluster is asked. Paths of mounts become folders of the test, fields of the pod are made up, and `$(NAME)` is expanded as
Kubernetes does it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import pytest
import yaml  # type: ignore[import-untyped]

from commands import BIN, STAND_IN, Root, environment, eventually
from publishd.cli import COMMANDS
from publishd.options import parse_options
from publishd.publications import parse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from publishd.options import Options

REPOSITORY = Path(__file__).parent.parent
DOC = REPOSITORY / "docs" / "kubernetes.md"
MANIFESTS = {path.name: path.read_text() for path in sorted((REPOSITORY / "examples" / "kubernetes").glob("*.yaml"))}
PODS = [name for name in MANIFESTS if name != "claim.yaml"]
MOUNTED = Path("checkpoints", "finetune")
TO_SPARE = 10
RESTART = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
NONE: Mapping[str, str] = MappingProxyType({})
SLOW = {"MAX_STEPS": "100000", "SAVE_STEPS": "20", "SAVE_SECONDS": "0.8"}


def spec_of(manifest: str) -> dict[str, Any]:
    """The spec of the pods that a manifest makes."""
    spec: dict[str, Any] = yaml.safe_load(manifest)["spec"]
    if "replicatedJobs" in spec:
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    return spec["template"]["spec"] if "template" in spec else spec


def expanded(text: str, variables: dict[str, str]) -> str:
    """What Kubernetes makes of a command: `$(NAME)` of a known name replaced, `$$` a dollar, everything else as it is."""

    def replace(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, text)


class Pod:
    """The containers of a pod as processes, with the stand-in as train.py. Leaving the `with` block kills what still runs."""

    def __init__(
        self, folder: Path, manifest: str, name: str = "finetune-a", restart: int = 0, variables: Mapping[str, str] = NONE
    ) -> None:
        self._folder, self._stack, self._variables = folder, ExitStack(), variables
        self._fields = {"metadata.name": name, RESTART: str(restart)}
        self.root = Root(folder / MOUNTED, "")
        self._execution = folder / f"execution-{name}"
        spec = spec_of(manifest)
        self.containers = {found["name"]: found for found in spec.get("initContainers", []) + spec["containers"]}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.root.path.mkdir(parents=True, exist_ok=True)
        self._execution.mkdir(exist_ok=True)
        work = folder / "image"
        work.mkdir(exist_ok=True)
        if not (work / "train.py").exists():
            (work / "train.py").symlink_to(STAND_IN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # nothing of it runs any more
            process.wait()
        self._stack.close()

    def start(self, name: str, path: str = f"{BIN}:{os.environ['PATH']}") -> None:
        container = self.containers[name]
        given = {
            variable["name"]: variable.get("value") or self._fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
            for variable in container.get("env", [])
        }
        command = [expanded(word, given) for word in container["command"] + container.get("args", [])]
        mounts = {"/checkpoints": self._folder / MOUNTED.parent, "/execution": self._execution}
        for mounted, here in mounts.items():
            command = [word.replace(f"{mounted}/", f"{here}/") for word in command]
        env: dict[str, str | None] = {"DISPATCH_ATTEMPT": None, "DISPATCH_EPOCH": None, "PATH": path, **self._variables, **given}
        self.processes[name] = subprocess.Popen(
            command,
            env=environment(**env),
            cwd=self._folder / "image",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._stack.enter_context((self._folder / f"{self._fields['metadata.name']}-{name}.log").open("ab")),
            start_new_session=True,
        )

    def log(self, name: str) -> str:
        return (self._folder / f"{self._fields['metadata.name']}-{name}.log").read_text("utf-8", "backslashreplace")

    def resolved(self) -> Self:
        """Run the first container to its end, which must be a good one."""
        self.start("resolve")
        assert self.ended("resolve") == 0, self.log("resolve")
        return self

    def ended(self, name: str, seconds: float = 40) -> int:
        """The status of a container that ends by itself."""
        return self.processes[name].wait(seconds)

    def told(self, *names: str) -> None:
        for name in names:
            self.processes[name].send_signal(signal.SIGTERM)

    def saves(self) -> list[int]:
        """The steps of the complete saves on disk."""
        markers = self.root.path.glob("exec/*/checkpoint-*/trainer_state.json")
        return sorted(int(marker.parent.name.removeprefix("checkpoint-")) for marker in markers)


def asked(folder: Path, manifest: str, container: str, *fields: Any) -> tuple[str, Options]:
    """The command of publishd that a container runs, and its options; what stands in for publishd notes its arguments."""
    stand_in = folder / "bin" / "publishd"
    stand_in.parent.mkdir(exist_ok=True)
    stand_in.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" >'{folder}/arguments'\n")
    stand_in.chmod(0o755)
    with Pod(folder, manifest, *fields) as pod:
        path = f"{stand_in.parent}:{os.environ['PATH']}"
        if "resolve" in pod.containers and container != "resolve":
            pod.resolved()
        pod.start(container, path)
        assert pod.ended(container) == 0, pod.log(container)
    name, *argv = (folder / "arguments").read_text().split("\0")[:-1]
    command = COMMANDS[name]
    options = parse_options(
        argv, {}, flags=command.flags, arguments=command.arguments, publishes=command.publishes, runs=command.runs
    )
    return name, options


def uses(manifest: str) -> list[str]:
    """The containers that run publishd."""
    spec = spec_of(manifest)
    return [found["name"] for found in spec.get("initContainers", []) + spec["containers"] if "publishd" in found["command"][-1]]


def next_second() -> None:
    """Wait, so that the next execution's epoch, which is the clock's, is another; pods take longer than that to begin."""
    now = int(time.time())
    eventually(lambda: int(time.time()) > now, "the next second")


def test_quoted() -> None:
    """The document quotes and links every manifest, as it is, and no other YAML."""
    quoted = re.findall("```yaml\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert sorted(quoted) == sorted(MANIFESTS.values())
    for name in PODS:
        assert f"](../examples/kubernetes/{name})" in DOC.read_text()
    assert "**Not run on a cluster.**" in DOC.read_text()


@pytest.mark.parametrize("name", PODS)
def test_manifest(name: str) -> None:
    """What must hold of every manifest: one execution at a time, each in a pod of its own, and volumes that are there."""
    spec = spec_of(MANIFESTS[name])
    containers = spec.get("initContainers", []) + spec["containers"]
    volumes = {volume["name"] for volume in spec["volumes"]}
    assert {mount["name"] for container in containers for mount in container["volumeMounts"]} == volumes
    assert {container["image"] for container in containers} == {"finetune:1"}
    assert spec["restartPolicy"] == "Never"
    document = yaml.safe_load(MANIFESTS[name])
    if document["kind"] == "Job":
        assert document["spec"]["podReplacementPolicy"] == "Failed"
    if document["kind"] == "JobSet":
        assert document["spec"]["failurePolicy"]["restartStrategy"] == "BlockingRecreate"
        assert document["spec"]["replicatedJobs"][0]["template"]["spec"]["backoffLimit"] == 0


@pytest.mark.parametrize(("name", "container"), [(name, container) for name in PODS for container in uses(MANIFESTS[name])])
def test_flags(name: str, container: str, tmp_path: Path) -> None:
    """Every flag in the manifests is known, and the grace period is the sum beside it: -drain, -linger, some to spare."""
    command, options = asked(tmp_path, MANIFESTS[name], container)
    if command == "resolve":
        return
    grace = spec_of(MANIFESTS[name])["terminationGracePeriodSeconds"]
    [sum_beside] = re.findall("terminationGracePeriodSeconds: [0-9]+ # (.*)", MANIFESTS[name])
    parts = {
        what: int(seconds)
        for seconds, what in re.findall("([0-9]+) (-drain|-linger|to spare|the trainer's last save)", sum_beside)
    }
    assert sum(parts.values()) == grace
    assert parts.pop("-drain") == options.drain
    assert parts.pop("to spare") >= TO_SPARE
    assert parts == ({"-linger": options.linger} if options.linger else {"the trainer's last save": sum(parts.values())})


def test_epoch_of_the_clock(tmp_path: Path) -> None:
    """A pod's epoch is the second of its start and its attempt is new, even under a name that was there before."""
    executions = []
    for _ in range(2):
        before = int(time.time())
        _, options = asked(tmp_path, MANIFESTS["run.yaml"], "trainer")
        assert before * 10**6 <= options.epoch <= int(time.time()) * 10**6
        executions.append((options.epoch, options.attempt))
        next_second()
    (first, attempt), (second, other) = executions
    assert first < second
    assert attempt != other


def test_epoch_of_a_jobset(tmp_path: Path) -> None:
    """The epoch grows with every restart and every submission, and all pods of one restart have the same."""
    told: list[Options] = []
    for submission, restart in ((1790000000, 0), (1790000000, 9), (1790000000, 10), (1790000000, 999999), (1790000001, 0)):
        manifest = MANIFESTS["jobset.yaml"].replace("1790000000", str(submission))
        told += (asked(tmp_path, manifest, "trainer", name, restart)[1] for name in ("pod-0", "pod-1"))
    first, second = told[::2], told[1::2]
    assert [options.epoch for options in first] == [options.epoch for options in second]
    assert [options.attempt for options in first] == [options.attempt for options in second]
    assert sorted({options.epoch for options in first}) == [options.epoch for options in first]
    assert len({options.attempt for options in first}) == len(first)


def test_run(tmp_path: Path) -> None:
    """run.yaml: a pod that is deleted publishes the trainer's last save; the next one resumes from it, ends well, and prunes."""
    with Pod(tmp_path, MANIFESTS["run.yaml"], variables=SLOW) as pod:
        pod.start("trainer")
        eventually(pod.saves, "a save")
        pod.told("trainer")
        assert pod.ended("trainer") == 0, pod.log("trainer")
        last = pod.saves()[-1]
        assert pod.root.steps[-1] == last
        assert "SIGTERM: forwarded to" in pod.log("trainer")
    next_second()
    with Pod(tmp_path, MANIFESTS["run.yaml"], "finetune-b", variables={"MAX_STEPS": str(last + 20)}) as pod:
        pod.start("trainer")
        assert pod.ended("trainer") == 0, pod.log("trainer")
        assert f"checkpoint-{last}\n" in pod.log("trainer")
        assert pod.root.steps[-1] == last + 20
        assert len(pod.root.steps) <= 3


@pytest.mark.parametrize("deleted", [True, False])
def test_sidecar(deleted: bool, tmp_path: Path) -> None:
    """sidecar.yaml: told only when the trainer has ended, the watch publishes its last save; the next pod resumes from it."""
    with Pod(tmp_path, MANIFESTS["sidecar.yaml"], variables=SLOW if deleted else NONE) as pod:
        pod.resolved()
        pod.start("watch")
        pod.start("trainer")
        if deleted:
            eventually(pod.saves, "a save")
            pod.told("trainer")
        assert pod.ended("trainer") == 0, pod.log("trainer")
        pod.told("watch")
        assert pod.ended("watch") == 0, pod.log("watch")
        last = pod.saves()[-1]
        assert pod.root.steps[-1] == last
    next_second()
    with Pod(tmp_path, MANIFESTS["sidecar.yaml"], "finetune-b", variables={"MAX_STEPS": str(last + 1)}) as pod:
        pod.resolved()
        pod.start("watch")
        pod.start("trainer")
        assert pod.ended("trainer") == 0, pod.log("trainer")
        pod.told("watch")
        assert pod.ended("watch") == 0, pod.log("watch")
        earlier, latest = (parse(name) for name in pod.root.pub[-2:])
        assert (earlier.step, latest.step) == (last, last + 1)
        assert earlier.epoch < latest.epoch


def test_sidecar_without_an_answer(tmp_path: Path) -> None:
    """sidecar.yaml: where the root can't be read the first container fails, and with it the pod: nothing begins anew."""
    with Pod(tmp_path, MANIFESTS["sidecar.yaml"]) as pod:
        pod.root.path.rmdir()
        pod.start("resolve")
        assert pod.ended("resolve") == 1, pod.log("resolve")


def test_sidecar_restarted(tmp_path: Path) -> None:
    """sidecar.yaml: a watch that was killed and is restarted goes on under the same attempt and epoch."""
    with Pod(tmp_path, MANIFESTS["sidecar.yaml"]) as pod:
        pod.resolved()
        pod.start("watch")
        eventually(lambda: "watching: " in pod.log("watch"), "the watch")
        pod.processes["watch"].kill()
        assert pod.ended("watch") == -signal.SIGKILL
        pod.start("trainer")
        assert pod.ended("trainer") == 0, pod.log("trainer")
        next_second()
        pod.start("watch")
        eventually(lambda: pod.log("watch").count("watching: ") == 2, "the watch")
        pod.told("watch")
        assert pod.ended("watch") == 0, pod.log("watch")
        assert pod.root.steps[-1] == pod.saves()[-1]
        given = (tmp_path / "execution-finetune-a" / "epoch").read_text()
        assert {parse(name).epoch for name in pod.root.pub} == {int(given)}


@pytest.mark.parametrize("deleted", [True, False])
def test_two_containers(deleted: bool, tmp_path: Path) -> None:
    """two-containers.yaml: told with the trainer the watch lingers for its last save; told by nobody it ends after it."""
    manifest = MANIFESTS["two-containers.yaml"].replace("-linger 60s", "-linger 4s")
    with Pod(tmp_path, manifest, variables=SLOW if deleted else NONE) as pod:
        pod.resolved()
        pod.start("watch")
        pod.start("trainer")
        if deleted:
            eventually(lambda: pod.saves() and "watching: " in pod.log("watch"), "a save")
            pod.told("watch", "trainer")
        assert pod.ended("trainer") == 0, pod.log("trainer")
        assert pod.ended("watch") == 0, pod.log("watch")
        assert pod.root.steps[-1] == pod.saves()[-1]


def test_jobset(tmp_path: Path) -> None:
    """jobset.yaml: the execution after a restart of the set resumes from the latest save of the one before."""
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text('#!/bin/sh\nwhile [ "$1" != train.py ]; do shift; done\nexec python "$@"\n')
    torchrun.chmod(0o755)
    for restart, steps in ((0, 40), (1, 50)):
        variables = {"MAX_STEPS": str(steps), "JOB_COMPLETION_INDEX": "0"}
        with Pod(tmp_path, MANIFESTS["jobset.yaml"], f"pod-{restart}", restart, variables) as pod:
            pod.start("trainer", f"{torchrun.parent}:{BIN}:{os.environ['PATH']}")
            assert pod.ended("trainer") == 0, pod.log("trainer")
            assert (f"{pod.root.path}/exec/1790000000.0/checkpoint-40\n" in pod.log("trainer")) == bool(restart)
    assert [(entry.epoch, entry.step) for entry in map(parse, pod.root.pub[-2:])] == [
        (1790000000000000, 40),
        (1790000000000001, 50),
    ]
