"""What AWS runs beside S3, as small behaviours of a scripted server: STS, instance metadata, and container credentials."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from services.exchanges import Answer, xml

if TYPE_CHECKING:
    from services.exchanges import Request


def _expiration(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


class SmallSts:
    """STS for whoever presents the token; each call gives other keys, which live for `lifetime` seconds."""

    def __init__(self, token: str, lifetime: float = 3600) -> None:
        self.token, self.lifetime, self.calls = token, lifetime, 0

    def __call__(self, request: Request) -> Answer:
        """Answer AssumeRoleWithWebIdentity as STS does."""
        form = {name: values[0] for name, values in parse_qs(request.body.decode()).items()}
        assert request.method == "POST"
        assert (form["Action"], form["Version"]) == ("AssumeRoleWithWebIdentity", "2011-06-15")
        assert "Authorization" not in request.headers
        if form["WebIdentityToken"] != self.token:
            return sts_error(400, "InvalidIdentityToken", "Couldn't retrieve verification key")
        self.calls += 1
        fields = {
            "AccessKeyId": f"ASIASTS{self.calls:09d}",
            "SecretAccessKey": f"sts-secret-{self.calls}",
            "SessionToken": f"sts-session-{self.calls}",
            "Expiration": _expiration(self.lifetime),
        }
        credentials = "".join(f"<{name}>{value}</{name}>" for name, value in fields.items())
        result = f"<AssumeRoleWithWebIdentityResult><Credentials>{credentials}</Credentials></AssumeRoleWithWebIdentityResult>"
        root = 'AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"'
        answer = xml("X", result)
        body = answer.body.replace(b"<X>", f"<{root}>".encode()).replace(b"</X>", b"</AssumeRoleWithWebIdentityResponse>")
        return Answer(200, body, answer.headers)


def sts_error(status: int, code: str, message: str) -> Answer:
    """An error as STS says it."""
    return xml("ErrorResponse", f"<Error><Type>Sender</Type><Code>{code}</Code><Message>{message}</Message></Error>", status)


def role_credentials(number: int = 1, lifetime: float = 3600) -> dict[str, Any]:
    """What metadata and container endpoints answer."""
    return {
        "Code": "Success",
        "AccessKeyId": f"ASIAROLE{number:08d}",
        "SecretAccessKey": f"role-secret-{number}",
        "Token": f"role-session-{number}",
        "Expiration": _expiration(lifetime),
    }


class SmallMetadata:
    """Instance metadata of a machine with the role `trainer`; `version` 1 knows no tokens, 2 demands one."""

    token = "metadata-token-of-this-hour"

    def __init__(self, version: int = 2, lifetime: float = 3600) -> None:
        self.version, self.lifetime = version, lifetime

    def __call__(self, request: Request) -> Answer:
        """Answer as http://169.254.169.254 does."""
        if request.path == "/latest/api/token":
            allowed = self.version == 2 and request.method == "PUT" and "X-aws-ec2-metadata-token-ttl-seconds" in request.headers
            return Answer(200, self.token.encode()) if allowed else Answer(404)
        if self.version == 2 and request.headers.get("X-aws-ec2-metadata-token") != self.token:
            return Answer(401)
        folder, _, role = request.path.rpartition("/")
        if folder != "/latest/meta-data/iam/security-credentials":
            return Answer(404)
        return Answer(200, json.dumps(role_credentials(lifetime=self.lifetime)).encode() if role else b"trainer")


class SmallContainer:
    """The credentials endpoint of a task or pod, for whoever presents the token."""

    def __init__(self, token: str = "") -> None:
        self.token, self.calls = token, 0

    def __call__(self, request: Request) -> Answer:
        """Answer as http://169.254.170.2 does."""
        if self.token and request.headers.get("Authorization") != self.token:
            return Answer(401, json.dumps({"code": "AccessDenied", "message": "no such token"}).encode())
        self.calls += 1
        return Answer(200, json.dumps(role_credentials(self.calls)).encode())
