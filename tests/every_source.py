"""Every source of credentials as a loopback server or a file, and a small S3 that knows what each of them gives out."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.aws import SmallContainer, SmallMetadata, SmallSts
from services.exchanges import error
from services.places import Keys
from services.scripted import Scripted, ScriptedS3
from services.signatures import claims
from services.small_s3 import SmallS3
from services.vault import SmallVault

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from services.certificates import Authority, Certificate
    from services.exchanges import Answer, Behaviour, Request

SOURCES = ("env", "file", "web-identity", "instance", "container", "vault")

JWT = "eyJ.a-jwt-S3CRET.of-this-pod"
CONTAINER_TOKEN = "Bearer-of-this-task-S3CRET"

# The fakes number what they give out: ASIASTS000000007 goes with sts-secret-7 and sts-session-7.
_GIVEN = re.compile(rb"\b(ASIASTS|ASIAROLE|AKIAMINTED)0*(\d+)\b")
_SECRET = {"ASIASTS": "sts-secret", "ASIAROLE": "role-secret", "AKIAMINTED": "minted-secret-key"}
_SESSION = {"ASIASTS": "sts-session", "ASIAROLE": "role-session", "AKIAMINTED": "minted-session"}


class KeyedS3(SmallS3):
    """A small S3 that takes only sets of keys that were given out, with their session token, and only while they live."""

    def __init__(self, lifetime: float = 3600) -> None:
        self.known: dict[str, str] = {}
        super().__init__(secrets=self.known)
        self.lifetime = lifetime
        """Seconds, from when a source gave out the set."""
        self.refusals = 0
        self._sessions: dict[str, tuple[str, float]] = {}

    def add(self, access_key: str, secret_key: str, session_token: str = "") -> None:
        """Take this set, too."""
        self.known[access_key] = secret_key
        self._sessions[access_key] = session_token, time.monotonic() + self.lifetime

    def forget(self, access_key: str) -> None:
        """Never heard of it."""
        del self.known[access_key], self._sessions[access_key]

    def expire(self) -> None:
        """No set that was given out until now lives any more."""
        for access_key, (token, _) in self._sessions.items():
            self._sessions[access_key] = token, 0

    def beside(self, source: Behaviour) -> Behaviour:
        """The behaviour of a source whose sets are known here as soon as it gives them out."""

        def behave(request: Request) -> Answer:
            answer = source(request)
            for found in _GIVEN.finditer(answer.body):
                kind, number = found[1].decode(), found[2].decode()
                if found[0].decode() not in self.known:
                    self.add(found[0].decode(), f"{_SECRET[kind]}-{number}", f"{_SESSION[kind]}-{number}")
            return answer

        return behave

    def __call__(self, request: Request) -> Answer:
        """Answer as S3 does; what is refused for its keys is counted."""
        answer = self._stale(request) or super().__call__(request)
        self.refusals += answer.status in (400, 403)
        return answer

    def _stale(self, request: Request) -> Answer | None:
        access_key = claims(request.headers.get("Authorization", "")).get("Credential", "").partition("/")[0]
        if access_key not in self._sessions:
            return None  # which is seen by whoever checks the signature
        token, end = self._sessions[access_key]
        if time.monotonic() > end:
            return error(400, "ExpiredToken")
        return None if request.headers.get("X-Amz-Security-Token", "") == token else error(400, "InvalidToken")


class KeyedServer(ScriptedS3):
    """A scripted server with a `KeyedS3` behind it."""

    s3: KeyedS3

    def __init__(self, certificate: Certificate | None = None, *, lifetime: float = 3600) -> None:
        self.s3 = KeyedS3(lifetime)
        Scripted.__init__(self, self.s3, certificate)
        self.keys = Keys("AKIDSMALL", "secret-of-the-small-one")
        self.s3.add(*self.keys)


@dataclass
class OpenSource:
    """A source that is ready: what goes on the command line and into the environment, and what may be shown nowhere."""

    creds: str
    environ: dict[str, str] = field(default_factory=dict)
    secrets: list[str] = field(default_factory=list)
    server: Scripted | None = None


@contextmanager
def open_source(
    kind: str, s3: KeyedS3, folder: Path, authority: Authority, certificate: Certificate | None = None, *, lifetime: float = 3600
) -> Iterator[OpenSource]:
    """A source of this kind, whose sets `s3` takes. With a certificate, which is `authority`'s, Vault and STS speak TLS.

    What it gives out lives for `lifetime` seconds, a Vault token, too.
    """
    with ExitStack() as stack:
        yield _OPEN[kind](_Bench(s3, folder, authority, certificate, lifetime, stack))


@dataclass
class _Bench:
    s3: KeyedS3
    folder: Path
    authority: Authority
    certificate: Certificate | None
    lifetime: float
    stack: ExitStack

    def serve(self, behaviour: Behaviour, certificate: Certificate | None = None) -> Scripted:
        return self.stack.enter_context(Scripted(self.s3.beside(behaviour), certificate))

    def file(self, name: str, content: str) -> Path:
        (self.folder / name).write_text(content)
        return self.folder / name


def _env(bench: _Bench) -> OpenSource:
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    values = ("AKIDENVIRONMENT", "env-secret-S3CRET", "env-session-S3CRET")
    bench.s3.add(*values)
    return OpenSource("env", dict(zip(names, values, strict=True)), list(values[1:]))


def _file(bench: _Bench) -> OpenSource:
    bench.s3.add("AKIDFILE", "file-secret-S3CRET", "file-session-S3CRET")
    lines = "aws_access_key_id=AKIDFILE\naws_secret_access_key=file-secret-S3CRET\naws_session_token=file-session-S3CRET\n"
    path = bench.file("keys", f"[team]\n{lines}")
    return OpenSource(f"file:{path}?profile=team", {}, ["file-secret-S3CRET", "file-session-S3CRET"])


def _web_identity(bench: _Bench) -> OpenSource:
    server = bench.serve(SmallSts(JWT, bench.lifetime), bench.certificate)
    token = str(bench.file("jwt", JWT))
    environ = {
        "AWS_ROLE_ARN": "arn:aws:iam::1:role/r",
        "AWS_WEB_IDENTITY_TOKEN_FILE": token,
        "AWS_ENDPOINT_URL_STS": server.endpoint,
    }
    return OpenSource("web-identity", environ, [JWT, "sts-secret-", "sts-session-"], server)


def _instance(bench: _Bench) -> OpenSource:
    server = bench.serve(SmallMetadata(lifetime=bench.lifetime))
    secrets = [SmallMetadata.token, "role-secret-", "role-session-"]
    return OpenSource("instance", {"AWS_EC2_METADATA_SERVICE_ENDPOINT": server.endpoint}, secrets, server)


def _container(bench: _Bench) -> OpenSource:
    server = bench.serve(SmallContainer(CONTAINER_TOKEN))
    environ = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": server.endpoint, "AWS_CONTAINER_AUTHORIZATION_TOKEN": CONTAINER_TOKEN}
    return OpenSource("container", environ, [CONTAINER_TOKEN, "role-secret-", "role-session-"], server)


def _vault(bench: _Bench) -> OpenSource:
    server = bench.serve(SmallVault(token_lease=bench.lifetime, lease=bench.lifetime), bench.certificate)
    query = f"auth=kubernetes&role=trainer&jwt_file={bench.file('jwt', JWT)}&ca={bench.authority.ca}"
    secrets = [JWT, "client-token-", "minted-secret-", "minted-session-"]
    return OpenSource(f"vault:{server.endpoint}/aws/creds/trainer?{query}", {}, secrets, server)


_OPEN = {
    "env": _env,
    "file": _file,
    "web-identity": _web_identity,
    "instance": _instance,
    "container": _container,
    "vault": _vault,
}
