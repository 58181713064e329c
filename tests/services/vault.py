"""A real OpenBao with every engine and method that publishd reads from, and a small scripted Vault for what OpenBao lacks.

OpenBao has no AWS engine, and does not fail when a test wants it to.
"""

from __future__ import annotations

import base64
import http.client
import itertools
import json
import secrets
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from urllib.parse import quote, urlsplit

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from services.exchanges import Answer
from services.programs import Program, free_ports, installed
from services.scripted import Scripted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.certificates import Authority, Certificate
    from services.exchanges import Request

NAMESPACE = "ml"
"""A namespace of the server, with a KV v2 at `kv` and an approle of its own."""

ROLE = "trainer"
"""The role of every login method; it may read what the policy `publishd` allows."""

_POLICY = """
path "*" { capabilities = ["read"] }
path "auth/token/*" { capabilities = ["read", "update"] }
path "narrow/*" { capabilities = ["deny"] }
path "narrow/data/s3" { capabilities = ["read"] }
path "sys/internal/ui/mounts/narrow/*" { capabilities = ["deny"] }
"""


class Failed(Exception):
    """Vault answered with an error."""


class OpenBao:
    """A development server: unsealed, in memory, at an http address and an https one with a certificate of the private CA."""

    def __init__(self, address: str, https_address: str, root_token: str) -> None:
        self.address, self.https_address, self.root_token = address, https_address, root_token

    def call(self, method: str, path: str, body: Any = None, *, token: str = "", namespace: str = "") -> dict[str, Any]:
        """Ask the server, as root unless a token is given; a client of which publishd shares no line."""
        connection = http.client.HTTPConnection(urlsplit(self.address).netloc, timeout=30)
        headers = {"X-Vault-Token": token or self.root_token, **({"X-Vault-Namespace": namespace} if namespace else {})}
        try:
            connection.request(method, f"/v1/{quote(path)}", json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        if response.status >= 400:
            raise Failed(response.status, method, path, content)
        return dict(json.loads(content)) if content else {}

    def mount(self, version: int, path: str = "") -> str:
        """A fresh KV engine; its path."""
        path = path or f"kv{secrets.token_hex(4)}"
        self.call("POST", f"sys/mounts/{path}", {"type": "kv", "options": {"version": str(version)}})
        if version == 2:  # its storage is made ready behind our back
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                try:
                    self.call("POST", f"{path}/data/ready", {"data": {"a": "b"}})
                    break
                except Failed:
                    time.sleep(0.02)
        return path

    def spec(self, path: str, auth: str, *, tls: bool = False) -> str:
        """A `-creds` for a secret of this server."""
        return f"vault:{self.https_address if tls else self.address}/{path}?{auth}"

    def token(self, **options: Any) -> str:
        """A fresh token with the policy of all roles."""
        answer = self.call("POST", "auth/token/create", {"policies": ["publishd"], "ttl": "1h", **options})
        return str(answer["auth"]["client_token"])

    def alive(self, token: str) -> bool:
        """Whether the server still knows a token."""
        try:
            self.call("GET", "auth/token/lookup-self", token=token)
        except Failed:
            return False
        return True


class Signer:
    """Makes JSON Web Tokens, RS256, as an identity provider or Kubernetes does."""

    def __init__(self) -> None:
        self._key = rsa.generate_private_key(65537, 2048)
        public = self._key.public_key()
        self.public = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo).decode()

    def token(self, **claims: Any) -> str:
        """A token valid for an hour."""
        claims = {"iss": "kubernetes/serviceaccount", "iat": int(time.time()), "exp": int(time.time()) + 3600, **claims}
        head = ".".join(_base64(json.dumps(part).encode()) for part in ({"alg": "RS256", "typ": "JWT"}, claims))
        return f"{head}.{_base64(self._key.sign(head.encode(), padding.PKCS1v15(), hashes.SHA256()))}"


def _base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


class TokenReview:
    """The behaviour of a Kubernetes API that knows one service account, `ml/trainer`, by whatever token."""

    uid = "3f0b5cbe-2f0a-4a8b-9d11-7c0d6e3a9b10"
    claims: ClassVar[dict[str, Any]] = {
        "sub": "system:serviceaccount:ml:trainer",
        "kubernetes.io": {"namespace": "ml", "serviceaccount": {"name": "trainer", "uid": uid}},
    }

    def __call__(self, request: Request) -> Answer:
        user = {"username": self.claims["sub"], "uid": self.uid, "groups": ["system:serviceaccounts"]}
        status = {"authenticated": True, "user": user}
        return _json(201, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "status": status})


class Logins(NamedTuple):
    """What the login methods of the server ask for."""

    jwt: str
    kubernetes_jwt: str
    role_id: str
    secret_id: str
    namespaced_role_id: str
    namespaced_secret_id: str
    certificate: Certificate


def _configured(bao: OpenBao, signer: Signer, review: str, authority: Authority) -> Logins:
    bao.call("PUT", "sys/policies/acl/publishd", {"policy": _POLICY})
    for method in ("jwt", "kubernetes", "approle", "cert"):
        bao.call("POST", f"sys/auth/{method}", {"type": method})
    bao.call("POST", "auth/jwt/config", {"jwt_validation_pubkeys": [signer.public]})
    policies = {"token_policies": ["publishd"], "token_ttl": 3600}
    jwt = {"role_type": "jwt", "user_claim": "sub", "bound_audiences": ["vault"], **policies}
    bao.call("POST", f"auth/jwt/role/{ROLE}", jwt)
    kubernetes = {
        "kubernetes_host": review,
        "token_reviewer_jwt": signer.token(**TokenReview.claims),
        "disable_local_ca_jwt": True,
        "kubernetes_ca_cert": authority.ca.read_text(),
    }
    bao.call("POST", "auth/kubernetes/config", kubernetes)
    bound = {"bound_service_account_names": ["trainer"], "bound_service_account_namespaces": ["ml"]}
    bao.call("POST", f"auth/kubernetes/role/{ROLE}", {**bound, **policies})
    bao.call("POST", f"auth/cert/certs/{ROLE}", {"certificate": authority.ca.read_text(), **policies})
    bao.call("POST", f"sys/namespaces/{NAMESPACE}")
    bao.call("POST", "sys/auth/approle", {"type": "approle"}, namespace=NAMESPACE)
    bao.call("PUT", "sys/policies/acl/publishd", {"policy": _POLICY}, namespace=NAMESPACE)
    bao.call("POST", "sys/mounts/kv", {"type": "kv", "options": {"version": "1"}}, namespace=NAMESPACE)
    return Logins(
        signer.token(sub="trainer", aud="vault"),
        signer.token(**TokenReview.claims),
        *_approle(bao, policies),
        *_approle(bao, policies, NAMESPACE),
        authority.certificate("trainer"),
    )


def _approle(bao: OpenBao, policies: dict[str, Any], namespace: str = "") -> tuple[str, str]:
    role = f"auth/approle/role/{ROLE}"
    bao.call("POST", role, policies, namespace=namespace)
    role_id = bao.call("GET", f"{role}/role-id", namespace=namespace)["data"]["role_id"]
    return role_id, bao.call("POST", f"{role}/secret-id", {}, namespace=namespace)["data"]["secret_id"]


class _Attempt:
    """One start of the server, which fails where somebody else took a port in the meantime."""

    def __init__(self, folder: Path, certificate: Certificate) -> None:
        ports = free_ports(4)
        settings = {"address": f"127.0.0.1:{ports[2]}", "cluster_address": f"127.0.0.1:{ports[3]}"}
        files = {"tls_cert_file": str(certificate.chain), "tls_key_file": str(certificate.key)}
        configuration = folder / "tls.json"
        configuration.write_text(json.dumps({"listener": [{"tcp": {**settings, **files}}]}))
        token = secrets.token_hex(12)
        arguments = [f"-dev-root-token-id={token}", f"-dev-listen-address=127.0.0.1:{ports[0]}", f"-config={configuration}"]
        self.program = Program([installed("bao"), "server", "-dev", "-dev-no-store-token", *arguments], folder)
        self.bao = OpenBao(f"http://127.0.0.1:{ports[0]}", f"https://localhost:{ports[2]}", token)

    def succeeds(self, seconds: float = 30) -> bool:
        """Wait until it knows its root token, which is its own, so no other server can answer in its place."""
        deadline = time.monotonic() + seconds
        while not self.program.ended and time.monotonic() < deadline:
            try:
                self.bao.call("GET", "auth/token/lookup-self")
            except (OSError, http.client.HTTPException, Failed):
                time.sleep(0.05)
            else:
                return True
        return False


@pytest.fixture(scope="session")
def bao(loopback_certificate: Certificate) -> Iterator[OpenBao]:
    """One server per test process; a test that needs an empty engine mounts one."""
    logs = []
    for _ in range(5):
        with tempfile.TemporaryDirectory(prefix="bao-", ignore_cleanup_errors=True) as folder:
            attempt = _Attempt(Path(folder), loopback_certificate)
            try:
                if attempt.succeeds():
                    yield attempt.bao
                    return
                logs.append(attempt.program.log[-1000:])
            finally:
                attempt.program.stop()
    pytest.fail("bao did not start:\n" + "\n".join(logs))


@pytest.fixture(scope="session")
def logins(bao: OpenBao, authority: Authority) -> Iterator[Logins]:
    """Every login method of the server set up, and what it takes to log in."""
    with Scripted(TokenReview()) as review:
        yield _configured(bao, Signer(), review.endpoint, authority)


class SmallVault:
    """The behaviour of a scripted server: one login that gives tokens, and an AWS engine that mints keys, both counted.

    - `namespace`: with it, every request must bear the header, and is otherwise answered as by a Vault without the login
    - `token_lease`, `lease`: seconds that a client token and minted keys live, by `clock`
    - `secrets`: what stands under other paths; `mounts` says what `sys/internal/ui/mounts` answers, by the first component
    """

    def __init__(
        self, *, namespace: str = "", token_lease: float = 3600, lease: float = 3600, clock: Any = time.monotonic
    ) -> None:
        self.namespace, self.token_lease, self.lease, self._clock = namespace, token_lease, lease, clock
        self.secrets: dict[str, dict[str, Any]] = {}
        self.mounts: dict[str, dict[str, Any]] = {"aws": {"path": "aws/", "type": "aws", "options": None}}
        self.tokens: dict[str, float] = {}
        self.logins = self.minted = self.renewals = 0
        self.renewable = False
        self._count = itertools.count(1)

    def __call__(self, request: Request) -> Answer:
        """Answer the request as Vault does."""
        if self.namespace and request.headers.get("X-Vault-Namespace") != self.namespace:
            return refusal(400, "missing client token")
        path = request.path.removeprefix("/v1/")
        if path.startswith("auth/") and path.endswith("/login"):
            return self._login()
        token = request.headers.get("X-Vault-Token", "")
        if self.tokens.get(token, 0) <= self._clock():
            return refusal(403, "permission denied", "invalid token")
        return self._answer(path, token)

    def _login(self) -> Answer:
        self.logins += 1
        token = f"hvs.client-token-{next(self._count)}-{secrets.token_hex(8)}"
        self.tokens[token] = self._clock() + self.token_lease
        return self._auth(token)

    def _auth(self, token: str) -> Answer:
        return answer(auth={"client_token": token, "lease_duration": self.token_lease, "renewable": self.renewable})

    def _answer(self, path: str, token: str) -> Answer:
        if path == "auth/token/revoke-self":
            self.tokens.pop(token)
            return Answer(204)
        if path == "auth/token/renew-self":
            self.renewals += 1
            self.tokens[token] = self._clock() + self.token_lease
            return self._auth(token)
        if path.startswith("sys/internal/ui/mounts/"):
            mount = self.mounts.get(path.split("/")[4])
            return answer(data=mount) if mount else refusal(403, "preflight capability check returned 403")
        if path.startswith(("aws/creds/", "aws/sts/")):
            self.minted += 1
            return answer(data=keys(next(self._count)), lease_id=f"{path}/1", lease_duration=self.lease)
        return answer(**self.secrets[path]) if path in self.secrets else refusal(404)


def keys(number: int = 1) -> dict[str, Any]:
    """The fields that the AWS engine gives."""
    secret = f"minted-secret-key-{number}"
    return {"access_key": f"AKIAMINTED{number:06d}", "secret_key": secret, "security_token": f"minted-session-{number}"}


def answer(**fields: Any) -> Answer:
    """A success as Vault says it."""
    common = {"request_id": "1", "lease_id": "", "renewable": False, "lease_duration": 0, "data": None, "auth": None}
    return _json(200, {**common, **fields})


def refusal(status: int, *errors: str) -> Answer:
    """An error as Vault says it."""
    return _json(status, {"errors": list(errors)})


def _json(status: int, content: Any) -> Answer:
    return Answer(status, json.dumps(content).encode(), {"Content-Type": "application/json"})


@pytest.fixture
def small_vault() -> Iterator[Scripted]:
    """A scripted Vault; `behaviour` is a `SmallVault`."""
    with Scripted(SmallVault()) as server:
        yield server
