"""The job script of examples/ for S3: a real SeaweedFS, keys out of a real OpenBao, each behind a real forward proxy."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import uuid
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from commands import EPOCH, JOB_SCRIPT, Job, eventually, require_program
from s3_roots import S3Root
from services.places import REGION, Place
from services.seaweed import SCOPED_BUCKET, SCOPED_PREFIX
from test_s3_proxies import Recorded, port, proxies

if TYPE_CHECKING:
    from commands import Root
    from services.certificates import Authority
    from services.proxies import ForwardProxy, Listener
    from services.seaweed import SeaweedFS
    from services.vault import Logins, OpenBao

S3_SCRIPT = JOB_SCRIPT.with_name("job-s3.sh")
S3_TRAINER = Path(__file__).parent / "trainers" / "train_s3.py"


def lines_of(script: Path) -> list[str]:
    return [line for line in script.read_text().splitlines() if not line.startswith("#")]


def test_the_example_is_the_job_script_with_creds_on_every_line() -> None:
    """It differs from examples/job.sh in what the commands are given, and in the lines that say what that is."""
    access = ' -creds "$CREDS" "${STORE[@]}"'
    promised, lines = lines_of(JOB_SCRIPT), lines_of(S3_SCRIPT)
    assert [re.match("[A-Z]+=", line) and line.partition("=")[0] for line in lines[:3]] == ["CKPT", "CREDS", "STORE"]
    assert [line.replace(access, "") for line in lines[3:]] == promised[1:]
    assert all((access in line) is ("publish " in line) for line in lines)


@pytest.mark.parametrize("script", [JOB_SCRIPT, S3_SCRIPT], ids=lambda script: script.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    """Neither in this example nor in the other."""
    subprocess.run([require_program("shellcheck", "shellcheck"), script], check=True, timeout=60)


class Site:
    """Where a job runs: its root, and the environment that its script goes by."""

    def __init__(self, root: S3Root, environ: dict[str, str]) -> None:
        admin = root.place.service
        access_key, secret_key = admin.keys
        trainers = {"STORE_ENDPOINT": admin.endpoint, "STORE_ACCESS_KEY": access_key, "STORE_SECRET_KEY": secret_key}
        self._root, self._environ = root, {**environ, **trainers}

    def execution(self, number: int, *, steps: int, seconds: float) -> Job:
        """The job's execution of that number, which trains up to this step, and takes so long for each save."""
        self._root.attempt = f"1.{number}.0"
        settings = {"MAX_STEPS": str(steps), "SAVE_SECONDS": str(seconds)}
        root = cast("Root", self._root)  # for its path and its attempt
        return Job(root, S3_TRAINER, script=S3_SCRIPT, epoch=number * EPOCH, **self._environ, **settings)


def published(root: S3Root) -> list[str]:
    """The published saves, oldest first."""
    return [line["path"] for line in root.run("list", "-json").succeeded().json]


def saves(number: int, *steps: int) -> list[str]:
    return [f"exec/1.{number}.0/checkpoint-{step}" for step in steps]


def secret_of(bao: OpenBao, seaweed: SeaweedFS, *, tls: bool) -> str:
    """The path of a secret that has all there is to know about the store, with keys that may do little."""
    endpoint = seaweed.https_endpoint if tls else seaweed.endpoint
    keys = {"access_key": seaweed.scoped.access_key, "secret_key": seaweed.scoped.secret_key}
    mount = bao.mount(2)
    bao.call("POST", f"{mount}/data/team/s3", {"data": {**keys, "endpoint": endpoint, "region": REGION}})
    return f"{mount}/team/s3"


def passed(proxy: ForwardProxy, service: str, times: int) -> bool:
    return proxy.passed(f":{port(service)}") >= times


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_the_job_script_on_s3_with_vault_and_proxies(
    tls: bool,
    seaweed: SeaweedFS,
    bao: OpenBao,
    logins: Logins,
    forward_proxy: ForwardProxy,
    https_forward_proxy: ForwardProxy,
    authority: Authority,
    tmp_path: Path,
    trap: Listener,
) -> None:
    """Three executions, the second killed in the middle of a save: nothing is lost but what came after the last whole save.

    The keys may do nothing outside the prefix. Every request goes through the proxy that is named for it, none to the
    proxies of the environment.
    """
    root = S3Root(Place(seaweed, SCOPED_BUCKET, f"{SCOPED_PREFIX}/{uuid.uuid4().hex}"))
    (tmp_path / "secret_id").write_text(logins.secret_id)
    (tmp_path / "jwt").write_text(logins.kubernetes_jwt)
    login = f"kubernetes&role=trainer&jwt_file={tmp_path}/jwt"
    if tls:
        login = f"approle&role_id={logins.role_id}&secret_id_file={tmp_path}/secret_id&ca={authority.ca}"
    proxy, vaults_proxy = (forward_proxy, https_forward_proxy) if tls else (https_forward_proxy, forward_proxy)
    creds = bao.spec(secret_of(bao, seaweed, tls=tls), f"auth={login}&proxy={vaults_proxy.url}", tls=tls)
    recorded = Recorded(tmp_path / "recorder")
    settings = {"CREDS": creds, "PROXY": proxy.url, "CA": str(authority.ca)}
    site = Site(root, {**settings, **proxies(trap.url), **recorded.environ})

    with site.execution(1, steps=40, seconds=0.1) as job:
        removed = job.ended().succeeded().out.decode().splitlines()[-1]
    assert removed == f"{root.path}/exec/1.1.0/checkpoint-10"
    assert published(root) == saves(1, 20, 30, 40)
    assert root.saves == {"checkpoint-20", "checkpoint-30", "checkpoint-40"}

    half = "exec/1.2.0/checkpoint-70"
    with site.execution(2, steps=80, seconds=2) as job:
        training = job.child("train.py")
        eventually(
            lambda: f"{saves(2, 70)[0]}/model.safetensors" in root.place.keys("exec/1.2.0/checkpoint-70"), "half a save", 60
        )
        os.kill(training, signal.SIGKILL)
        ended = job.ended()
    assert ended.code == 128 + signal.SIGKILL
    assert f"resuming from {root.path}/exec/1.1.0/checkpoint-40 at step 40" in ended.out.decode()
    left = root.place.keys(half)
    assert published(root) == saves(1, 40) + saves(2, 50, 60)

    with site.execution(3, steps=80, seconds=0.1) as job:
        assert f"resuming from {root.path}/exec/1.2.0/checkpoint-60 at step 60" in job.ended().succeeded().out.decode()
    assert published(root) == saves(2, 60) + saves(3, 70, 80)
    assert root.place.keys(half) == left

    assert recorded.ports == {port(proxy.url), port(vaults_proxy.url)}
    endpoint, address = (seaweed.https_endpoint, bao.https_address) if tls else (seaweed.endpoint, bao.address)
    for each, service in ((proxy, endpoint), (vaults_proxy, address)):
        eventually(partial(passed, each, service, 9), "three commands of three executions")
    assert trap.heads == []
