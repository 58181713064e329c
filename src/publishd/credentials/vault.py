"""Credentials out of a Vault or OpenBao secret: log in, find the engine, read, and keep the token while it lives.

API: https://developer.hashicorp.com/vault/api-docs/secret/kv/kv-v2, …/secret/aws, …/auth/kubernetes, …/auth/token.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import time
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from publishd.credentials.base import Credentials, NotNow, renewal
from publishd.credentials.local import read_file
from publishd.credentials.threads import in_daemon
from publishd.credentials.vault_http import Refused, VaultHttp, explained
from publishd.credentials.vault_secrets import Place, credentials, lease, places, was_deleted
from publishd.errors import NoCredentials

if TYPE_CHECKING:
    from collections.abc import Callable

    from publishd.credentials import SourceSpec

log = logging.getLogger(__name__)

_FETCH_SECONDS = 10.0
_CLOSE_SECONDS = 2.0
_LARGEST_TOKEN = 1 << 16
_SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount/token"

_TOKEN, _RENEWAL, _MOUNT, _READ = "vault token", "vault token renewal", "vault mount", "vault read"
_LOGIN_HINTS = {
    "kubernetes": "check role=, auth_mount=, namespace=, and the service account that the role is bound to",
    "jwt": "check role=, auth_mount=, namespace=, the token's audience and age, and the clock",
    "approle": "check role_id=, secret_id_file=, auth_mount= and namespace=",
    "cert": "check cert=, key=, role=, auth_mount= and namespace=",
    "token": "check the token: expired, or of another namespace or server?",
}


class VaultSource:
    """One secret of a Vault. hvac's blocking calls run in a daemon thread; nobody who is cancelled waits for it."""

    def __init__(self, spec: SourceSpec, token: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.which = spec.which
        self._spec, self._token, self._clock = spec, token, clock
        self._idle: _Reader | None = None
        host = urlsplit(spec.address).hostname or ""
        if spec.address.startswith("http:") and not _loopback(host):
            log.warning("%s: http:// shows tokens and keys to everybody on the way: use https://", self.which)

    async def fetch(self) -> Credentials:
        """The secret as it is now, or freshly minted keys; the client token is reused for most of its life."""
        # A call that was given up on still runs and keeps its reader; another one never shares it.
        reader, self._idle = self._idle or _Reader(self._spec, self._token, self._clock), None
        try:
            found = await in_daemon(reader.fetch, _FETCH_SECONDS)
        except NoCredentials:
            self._idle = reader
            raise
        except TimeoutError:
            cause = f"{reader.step}: no answer within {_FETCH_SECONDS:.0f} s"
            raise NotNow("no credentials", self.which, cause, "check host, port, and proxy=") from None
        self._idle = reader
        return found

    async def aclose(self) -> None:
        """A token that a login gave is revoked, with all that was made with it, if that takes no longer than 2 s."""
        reader, self._idle = self._idle, None
        if not reader:
            return
        try:
            await in_daemon(reader.close, _CLOSE_SECONDS)
        except (NoCredentials, TimeoutError):
            log.debug("the token of %s is left to expire", self.which)


@dataclass(slots=True)
class _Token:
    text: str
    since: float
    lease: float = inf
    renewable: bool = False
    ours: bool = False
    """Given to us by a login, and so ours to revoke."""


class _Reader:
    """Logs in, reads, and remembers the token and the secret's place. One thread at a time."""

    def __init__(self, spec: SourceSpec, given: str, clock: Callable[[], float]) -> None:
        self._spec, self._given, self._clock = spec, given, clock
        self._method = spec.options["auth"]
        self._login_step = f"vault login ({self._method})"
        self._http = VaultHttp(spec.which, spec.address, spec.options)
        self._token: _Token | None = None
        self._place: Place | None = None
        self.step = self._login_step
        """What it is at, for whoever gives up on it."""

    def fetch(self) -> Credentials:
        """Raises NoCredentials, whose text names the step and holds no secret."""
        try:
            return self._fetch()
        except Refused as refused:
            raise self._explain(refused) from None
        finally:
            self._http.close()

    def _fetch(self) -> Credentials:
        reused = self._ready()
        try:
            return self._read()
        except Refused as refused:
            if refused.status != 403 or not reused or (self._method == "token" and not self._token_changed()):
                raise
        self._log_in()
        return self._read()

    def close(self) -> None:
        """Revoke the token that a login gave."""
        try:
            if self._token and self._token.ours:
                self._ask("post", "auth/token/revoke-self", "vault revoke")
        except Refused:
            pass  # it may have expired, or may not do that: it ends by itself
        finally:
            self._http.close()

    def _ask(self, method: str, path: str, step: str, body: dict[str, str] | None = None) -> dict[str, Any]:
        self.step = step
        return self._http.ask(method, path, step, body)

    # The token

    def _ready(self) -> bool:
        """See to a token that lives; True if it is one that was used before."""
        token = self._token
        if token is None or (self._method == "token" and not self._given and self._token_changed()):
            self._log_in()
            return False
        age = self._clock() - token.since
        if age < renewal(token.lease) and not (token.renewable and not token.ours):
            return True
        if age < token.lease and token.renewable and self._renewed(token):
            return True
        if token.ours:
            self._log_in()
            return False
        return True

    def _renewed(self, token: _Token) -> bool:
        """Whether the token was given a longer life; it is not near its greatest age, and where the policy forbids it."""
        began = self._clock()
        try:
            auth = self._ask("post", "auth/token/renew-self", _RENEWAL, {}).get("auth")
        except Refused:
            token.renewable = False
            return False
        granted = lease(auth.get("lease_duration")) if isinstance(auth, dict) else 0.0
        if token.ours and granted < (token.lease + token.since - began) + token.lease / 5:
            return False
        token.since, token.lease = began, granted or inf
        return True

    def _log_in(self) -> None:
        self._token = None
        self._http.use("")
        self.step = self._login_step
        if self._method == "token":
            text = self._given or self._file("token_file", _TOKEN)
            # A given token is renewed as long as that works; one in a file is renewed by whoever writes the file.
            self._token = _Token(text, self._clock(), renewable=bool(self._given))
        else:
            self._token = self._obtained()
        self._http.use(self._token.text)

    def _obtained(self) -> _Token:
        began = self._clock()
        mount = self._spec.options.get("auth_mount", self._method)
        auth = self._ask("post", f"auth/{mount}/login", self._login_step, self._proof()).get("auth")
        text = auth.get("client_token") if isinstance(auth, dict) else None
        if not isinstance(auth, dict) or not isinstance(text, str) or not re.fullmatch("[!-~]+", text):
            raise self._http.failed(self._login_step, "the answer has no token", _LOGIN_HINTS[self._method])
        return _Token(text, began, lease(auth.get("lease_duration")) or inf, auth.get("renewable") is True, ours=True)

    def _proof(self) -> dict[str, str]:
        options = self._spec.options
        role = {"role": options["role"]} if "role" in options else {}
        if self._method == "approle":
            return {"role_id": self._kept(options["role_id"]), "secret_id": self._file("secret_id_file")}
        if self._method == "cert":
            return {"name": options["role"]} if role else {}
        return {**role, "jwt": self._file("jwt_file")}

    def _file(self, option: str, step: str = "") -> str:
        """The secret in a file, read again at each login."""
        path = self._spec.options.get(option, _SERVICE_ACCOUNT)
        try:
            text = read_file(path, _LARGEST_TOKEN).strip()
        except (OSError, ValueError) as error:
            cause = getattr(error, "strerror", None) or str(error)
            raise self._http.failed(step or self._login_step, f"{path}: {cause}", f"check {option}=") from None
        if not re.fullmatch("[!-~]+", text):
            cause = f"{path}: it holds no token: empty, or not one line of ASCII"
            raise self._http.failed(step or self._login_step, cause, f"check {option}=")
        return self._kept(text)

    def _kept(self, secret: str) -> str:
        self._http.secrets.add(secret)
        return secret

    def _token_changed(self) -> bool:
        return not self._given and (self._token is None or self._file("token_file", _TOKEN) != self._token.text)

    # The secret

    def _read(self) -> Credentials:
        if self._place:
            try:
                return self._read_at(self._place)
            except Refused as refused:
                if refused.status != 404:
                    raise
            self._place = None
        return self._find()

    def _find(self) -> Credentials:
        worst: Refused | None = None
        for place in self._places():
            try:
                found = self._read_at(place)
            except Refused as refused:
                if worst is None or refused.status == 403:
                    worst = refused
            else:
                self._place = place
                return found
        assert worst
        raise worst

    def _places(self) -> list[Place]:
        try:
            mount = self._ask("get", f"sys/internal/ui/mounts/{self._spec.path}", _MOUNT).get("data")
        except Refused:
            mount = None  # may not be asked, by this token or on this server
        try:
            return places(self._spec.path, mount)
        except ValueError as error:
            raise self._http.failed(_READ, str(error), "the path is that of `vault kv get`") from None

    def _read_at(self, place: Place) -> Credentials:
        began = self._clock()
        try:
            answer = self._ask("get", place.path, _READ)
        except Refused as refused:
            if refused.status == 404 and was_deleted(refused.content):
                raise self._deleted(place) from None
            raise
        if was_deleted(answer):
            raise self._deleted(place)
        try:
            return credentials(answer, place, self._token_left(began))
        except ValueError as error:
            remedy = "wanted: access_key and secret_key, or their AWS names"
            raise self._http.failed(_READ, f"the secret at {place.path} can't be used: {error}", remedy) from None

    def _token_left(self, now: float) -> float:
        """For how long the token lives: what was made with it ends with it."""
        return self._token.since + self._token.lease - now if self._token else inf

    def _deleted(self, place: Place) -> NoCredentials:
        remedy = "write a new version, or `vault kv undelete` it"
        return self._http.failed(_READ, f"the latest version of the secret at {place.path} is deleted", remedy)

    def _explain(self, refused: Refused) -> NoCredentials:
        if refused.step == self._login_step:
            hint = _LOGIN_HINTS[self._method]
        elif refused.status == 404:
            hint = "check the secret's path, its mount, and namespace="
        elif refused.status == 403:
            hint = f"check that the policy lets it read, namespace=, and {_LOGIN_HINTS[self._method].removeprefix('check ')}"
        else:
            hint = "check the path, the mount and namespace="
        where = "" if refused.step == self._login_step else f" {self._spec.path}"
        return self._http.failed(f"{refused.step}{where}", explained(refused.status, refused.said), hint)


def _loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
