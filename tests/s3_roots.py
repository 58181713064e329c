"""Checkpoint roots in S3 services as the black-box tests use them, seen behind publishd's back."""

from __future__ import annotations

import subprocess
from email.message import Message
from typing import TYPE_CHECKING, Any, Self

import pytest

from commands import ATTEMPT, EPOCH, PUBLISHD, Ran, environment, run
from publishd.publications import Publication
from services.exchanges import Request
from services.places import Place, Refused, S3Service
from services.signatures import encoded, query_string
from services.small_s3 import SmallS3

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.moto import Moto
    from services.places import Keys
    from services.scripted import ScriptedS3
    from services.seaweed import SeaweedFS


class S3Root:
    """A root in an S3 service. publishd uses the keys of `identity`, what is done behind its back those of the service."""

    def __init__(
        self, place: Place, *, identity: Keys | None = None, flags: list[str] | None = None, attempt: str = ATTEMPT
    ) -> None:
        self.place, self.attempt = place, attempt
        self.path = place.root
        self.flags = place.flags if flags is None else flags
        self.environ = (identity or place.service.keys).environ

    @property
    def execution(self) -> str:
        """The key of the execution's folder."""
        return f"exec/{self.attempt}"

    def hf(self, step: int, stated: object = None, *, folder: str = "") -> str:
        """A complete Trainer save; returns its key."""
        return self.place.hf(step, stated, attempt=self.attempt, folder=folder)

    def dcp(self, step: int) -> str:
        """A complete torch DCP save; returns its key."""
        save = f"{self.execution}/step-{step}"
        self.place.put(f"{save}/__0_0.distcp", b"shard of %d" % step)
        self.place.put(f"{save}/.metadata")
        return save

    def publish(self, save: str, step: int, epoch: int = EPOCH) -> str:
        """Make an entry by hand, without publishd; returns its name."""
        name = Publication(epoch, step, save).name
        self.place.put(f"pub/{name}")
        return name

    def published(self, *steps: int) -> Self:
        """Complete Trainer saves of these steps, with their entries."""
        for step in steps:
            self.publish(self.hf(step), step)
        return self

    @property
    def pub(self) -> list[str]:
        """Names in pub/, oldest first."""
        return self.place.pub

    @property
    def records(self) -> list[str]:
        return sorted(self.place.names("prune"))

    @property
    def steps(self) -> list[int]:
        """The published steps, oldest first."""
        return self.place.steps

    @property
    def saves(self) -> set[str]:
        """What has objects in the execution's folder."""
        return self.place.names(self.execution)

    def env(self, **changes: str | None) -> dict[str, str]:
        """The environment of a command: the execution's, and the keys."""
        return environment(**{**self.environ, **changes})

    def run(self, command: str, *arguments: str, env: Mapping[str, str] | None = None, **options: Any) -> Ran:
        """`publishd COMMAND -checkpoint ROOT -creds env … ARGUMENTS…`"""
        env = self.env() if env is None else env
        return run(command, "-checkpoint", self.path, *self.flags, *arguments, env=env, **options)

    def unchanged_by(self, command: str, *arguments: str, **options: Any) -> Ran:
        """Run a command that must leave the root as it was."""
        before = self.place.keys()
        ran = self.run(command, *arguments, **options)
        assert self.place.keys() == before
        return ran

    def resolved(self) -> str:
        """What resolve prints, without the newline and the root; it must succeed."""
        return self.run("resolve").succeeded().out.decode().removesuffix("\n").removeprefix(f"{self.path}/")


class BackDoor(S3Service):
    """A way into a small S3 that passes no rights, no script and no record of requests."""

    def __init__(self, server: ScriptedS3) -> None:
        super().__init__(server.endpoint, server.keys)
        self._s3 = SmallS3()
        self._s3.objects = server.s3.objects

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes = b"",
        keys: Keys | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        target = encoded(path, safe="/") + (f"?{query_string(query)}" if query else "")
        message = Message()
        for name, value in (headers or {}).items():
            message[name] = value
        answer = self._s3(Request(method, target, message, body, 0, 0))
        if answer.status // 100 != 2:
            raise Refused(answer.status, "")
        return answer.body

    def put(self, bucket: str, key: str, content: bytes) -> None:
        self._s3.objects[bucket, key] = content


class SmallRoot(S3Root):
    """A root in a small S3; `server` records publishd's requests alone."""

    def __init__(self, server: ScriptedS3, bucket: str = "bucket", prefix: str = "team/p", **options: Any) -> None:
        super().__init__(Place(BackDoor(server), bucket, prefix), **options)
        self.server = server

    def ordered(self, *, since: int = 0) -> list[str]:
        """The requests from that number on, each as its method and its key below the root; a listing is a LIST."""
        return [self._said(request) for request in self.server.requests[since:]]

    def _said(self, request: Request) -> str:
        start = f"{self.place.prefix}/" if self.place.prefix else ""
        method = "LIST" if "list-type" in request.query else request.method
        return f"{method} {request.key.removeprefix(start)}"


def started(root: S3Root, command: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a command in the background."""
    return subprocess.Popen(
        [PUBLISHD, command, "-checkpoint", root.path, *root.flags, *arguments],
        env=root.env(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def ended(process: subprocess.Popen[bytes], seconds: float = 100) -> Ran:
    """Wait for the end of a command."""
    out, err = process.communicate(timeout=seconds)
    return Ran(process.returncode, out, err)


def at_once(processes: list[subprocess.Popen[bytes]]) -> list[Ran]:
    return [ended(process) for process in processes]


# Fixtures


@pytest.fixture
def s3(seaweed: SeaweedFS) -> S3Root:
    """An empty root on a real server that checks signatures."""
    return S3Root(seaweed.place())


@pytest.fixture
def mass(moto: Moto) -> S3Root:
    """An empty root on a server that takes thousands of objects in no time."""
    return S3Root(moto.place())


@pytest.fixture
def small(scripted: ScriptedS3) -> SmallRoot:
    """An empty root on a server that counts requests."""
    return SmallRoot(scripted)
