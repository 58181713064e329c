"""Sources that AWS runs: STS (web identity), instance metadata, and the container endpoints of ECS and EKS.

Each is one or a few plain HTTP calls, made here rather than by botocore: its fetchers take proxies from the environment,
follow redirects, hide why they failed, and write tokens to their debug logs. Formats:
https://docs.aws.amazon.com/STS/latest/APIReference/API_AssumeRoleWithWebIdentity.html,
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instance-metadata-security-credentials.html,
https://docs.aws.amazon.com/sdkref/latest/guide/feature-container-credentials.html
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import ssl
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import aiohttp

from publishd.credentials.base import SLOW_TIMER, Credentials, NotNow, field, renewal, repeats, until
from publishd.credentials.local import read_file, variable
from publishd.credentials.threads import in_daemon
from publishd.credentials.urls import host_and_port, parse_endpoint, split
from publishd.errors import NoCredentials, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

_ROLE, _TOKEN_FILE, _SESSION_NAME = "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_SESSION_NAME"
_STS_ENDPOINT, _METADATA_ENDPOINT = "AWS_ENDPOINT_URL_STS", "AWS_EC2_METADATA_SERVICE_ENDPOINT"
_RELATIVE, _FULL = "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"
_AUTHORIZATION, _AUTHORIZATION_FILE = "AWS_CONTAINER_AUTHORIZATION_TOKEN", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"

_LARGEST_ANSWER = 1 << 20
_LARGEST_TOKEN = 1 << 16
_STS_SECONDS = 10.0
_NEARBY_SECONDS = 2.0
"""For a service on the node itself: it answers in milliseconds, or never."""

_CONTAINER_HOSTS = ("169.254.170.2", "169.254.170.23", "fd00:ec2::23", "localhost")
_BUSY = frozenset({408, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back, whole."""

    status: int
    text: str
    date: str | None


class _Service:
    """One service by HTTP: no proxy but a given one, no redirect, a bounded time and a bounded answer."""

    def __init__(self, which: str, *, seconds: float, proxy: str = "", ca: str = "") -> None:
        self.which = which
        self._seconds, self._proxy, self._ca = seconds, proxy, ca

    async def aclose(self) -> None:
        """Nothing is held between two fetches."""

    async def _ask(self, method: str, url: str, *, what: str = "", hint: str = "", **options: Any) -> Answer:
        """Any answer but a redirect. Raises NotNow, naming `what` was asked for, for none, and for one that may change."""
        try:
            answer = await self._send(method, url, **options)
        except (aiohttp.ClientError, OSError) as error:
            kind = NoCredentials if isinstance(error, aiohttp.ClientSSLError) else NotNow
            raise self._failed(f"{what}: {_origin(url)}: {_reason(error, self._seconds)}", hint, kind) from None
        except ValueError as error:
            raise self._failed(f"{what}: {_origin(url)}: {error}", hint) from None
        if 300 <= answer.status < 400:
            raise self._failed(f"{what}: {_origin(url)}: {answer.status}, a redirect, which is not followed", hint)
        if answer.status in _BUSY:
            raise self._failed(f"{what}: {_origin(url)}: {answer.status}{_complaint(answer.text)}", hint, NotNow)
        return answer

    async def _send(self, method: str, url: str, **options: Any) -> Answer:
        timeout = aiohttp.ClientTimeout(total=self._seconds)
        secure = _trust(self._ca) if url.startswith("https:") or self._proxy.startswith("https:") else True
        async with (
            aiohttp.ClientSession(trust_env=False, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as session,
            session.request(
                method, url, proxy=self._proxy or None, ssl=secure, allow_redirects=False, auto_decompress=False, **options
            ) as response,
        ):
            content = b""
            async for piece in response.content.iter_any():
                content += piece
                if len(content) > _LARGEST_ANSWER:
                    raise ValueError("the answer is far too long")
            return Answer(response.status, content.decode("utf-8", "replace"), response.headers.get("Date"))

    def _failed(self, cause: str, remedy: str = "", kind: type[NoCredentials] = NoCredentials) -> NoCredentials:
        return kind("no credentials", self.which, cause.removeprefix(": "), remedy)

    async def _token(self, path: str, name: str) -> str:
        """The token in a file, read again each time. Raises NoCredentials naming the variable that names the file."""
        try:
            token = (await in_daemon(partial(read_file, path, _LARGEST_TOKEN), _NEARBY_SECONDS)).strip()
        except (OSError, ValueError) as error:
            kind = NotNow if isinstance(error, TimeoutError) else NoCredentials
            cause = getattr(error, "strerror", None) or str(error) or "it could not be read in time"
            raise self._failed(f"{path}: {cause}", f"{name} names it", kind) from None
        if not re.fullmatch("[!-~]+", token):
            raise self._failed(f"{path}: it holds no token: empty, or not one line of ASCII", f"{name} names it")
        return token

    def _credentials(self, answer: Answer, fields: dict[str, Any]) -> Credentials:
        access, secret = field(fields, "AccessKeyId"), field(fields, "SecretAccessKey")
        token = field(fields, "Token", "SessionToken", required=False)
        if not fields.get("Expiration"):
            return Credentials(access, secret, token, SLOW_TIMER)
        lifetime = until(fields["Expiration"], answer.date)
        return Credentials(access, secret, token, renewal(lifetime), lifetime)


class WebIdentitySource(_Service):
    """A role assumed through STS with the token of a file, which is read again each time."""

    def __init__(self, endpoint: str, role: str, token_file: str, session_name: str, *, proxy: str, ca: str) -> None:
        super().__init__("web-identity", seconds=_STS_SECONDS, proxy=proxy, ca=ca)
        self._endpoint, self._role, self._token_file, self._session_name = endpoint, role, token_file, session_name

    async def fetch(self) -> Credentials:
        """A fresh set, just minted."""
        token = await self._token(self._token_file, _TOKEN_FILE)
        form = {
            "Action": "AssumeRoleWithWebIdentity",
            "Version": "2011-06-15",
            "RoleArn": self._role,
            "RoleSessionName": self._session_name,
            "WebIdentityToken": token,
        }
        hint = f"check -region, -proxy, -ca and {_STS_ENDPOINT}"
        answer = await self._ask("POST", f"{self._endpoint}/", what="STS", hint=hint, data=form)
        if answer.status != 200:
            said = _complaint(answer.text, token)
            kind = NotNow if re.search("IDPCommunicationError|Throttling", said) else NoCredentials
            remedy = f"check {_ROLE}, its trust policy, the token's age and audience, and the clock"
            raise self._failed(f"STS refuses: {answer.status}{said}", remedy, kind)
        try:
            fields = {_local(element.tag): element.text for element in _parsed(answer.text).iter()}
            if not fields.get("Expiration"):
                raise ValueError("it has no Expiration")
            found = self._credentials(answer, fields)
        except ValueError as error:
            raise self._failed(f"what answers at {self._endpoint} is not STS: {error}", hint) from None
        return Credentials(*found.keys, found.renew_after, found.valid_for, minted=True)


class InstanceSource(_Service):
    """The role of this virtual machine, from its metadata service; version 2 first, version 1 only where 2 is unknown."""

    _HINT = "is this an EC2 instance, with a role? in a container, its metadata hop limit must be 2 or more"

    def __init__(self, endpoint: str) -> None:
        super().__init__("instance", seconds=_NEARBY_SECONDS)
        self._endpoint = endpoint

    async def fetch(self) -> Credentials:
        """The set that the metadata service gives, of any age."""
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": "300"}
        answer = await self._ask("PUT", f"{self._endpoint}/latest/api/token", what="token", hint=self._HINT, headers=headers)
        if answer.status == 200:
            if not re.fullmatch("[!-~]+", answer.text):
                raise self._failed(f"what answers at {self._endpoint} is not instance metadata: no token", self._HINT)
            known = {"X-aws-ec2-metadata-token": answer.text}
        elif answer.status in (403, 404, 405):
            known = {}
        else:
            raise self._failed(f"token: {self._endpoint}: {answer.status}", self._HINT)
        folder = f"{self._endpoint}/latest/meta-data/iam/security-credentials/"
        role = (await self._get(folder, "role", known)).text.strip()
        if not re.fullmatch(r"[\w+=,.@-]+", role, re.ASCII):
            raise self._failed(f"what answers at {self._endpoint} names no role", self._HINT)
        answer = await self._get(folder + quote(role), f"credentials of role {role}", known)
        return _parse_json(self, answer, self._HINT)

    async def _get(self, url: str, what: str, headers: Mapping[str, str]) -> Answer:
        answer = await self._ask("GET", url, what=what, hint=self._HINT, headers=headers)
        if answer.status != 200:
            raise self._failed(f"{what}: {self._endpoint}: {answer.status}", self._HINT)
        return answer


class ContainerSource(_Service):
    """The role of this container, from the endpoint that its environment names."""

    _HINT = f"check {_FULL} or {_RELATIVE}, and that the task or pod has a role"

    def __init__(self, url: str, token: str, token_file: str) -> None:
        super().__init__("container", seconds=_NEARBY_SECONDS)
        self._url, self._given_token, self._token_file = url, token, token_file

    async def fetch(self) -> Credentials:
        """The set that the endpoint gives, of any age; a token file is read again each time."""
        token = await self._token(self._token_file, _AUTHORIZATION_FILE) if self._token_file else self._given_token
        headers = {"Accept": "application/json", **({"Authorization": token} if token else {})}
        answer = await self._ask("GET", self._url, what="credentials", hint=self._HINT, headers=headers)
        if answer.status != 200:
            raise self._failed(f"credentials: {_origin(self._url)}: {answer.status}{_complaint(answer.text, token)}", self._HINT)
        return _parse_json(self, answer, self._HINT)


def open_web_identity(environ: Mapping[str, str], *, proxy: str, ca: str, region: str) -> WebIdentitySource:
    """The source `web-identity`. Raises UsageError for a variable that is missing or malformed."""
    role, token_file = _needed(environ, _ROLE), environ.get(_TOKEN_FILE, "")
    if not token_file:
        raise UsageError("missing variable", _TOKEN_FILE, "it is not set, and -creds is web-identity")
    name = variable(environ, _SESSION_NAME) or "publishd"
    region = region or variable(environ, "AWS_REGION") or variable(environ, "AWS_DEFAULT_REGION")
    endpoint = _endpoint(environ, _STS_ENDPOINT) or _sts_endpoint(region)
    return WebIdentitySource(endpoint, role, token_file, name, proxy=proxy, ca=ca)


def _sts_endpoint(region: str) -> str:
    if not region:
        return "https://sts.amazonaws.com"
    if not re.fullmatch("[a-z0-9-]+", region):
        raise UsageError("bad region", "", "STS has none of that form", f"give -region, or {_STS_ENDPOINT}")
    suffix = ".cn" if region.startswith("cn-") else ""
    return f"https://sts.{region}.amazonaws.com{suffix}"


def open_instance(environ: Mapping[str, str]) -> InstanceSource:
    """The source `instance`. Raises UsageError for a malformed variable."""
    ipv6 = environ.get(f"{_METADATA_ENDPOINT}_MODE", "").lower() == "ipv6"
    default = "http://[fd00:ec2::254]" if ipv6 else "http://169.254.169.254"
    return InstanceSource(_endpoint(environ, _METADATA_ENDPOINT) or default)


def open_container(environ: Mapping[str, str]) -> ContainerSource:
    """The source `container`. Raises UsageError for missing or malformed variables, and for a host not allowed."""
    token, token_file = variable(environ, _AUTHORIZATION), environ.get(_AUTHORIZATION_FILE, "")
    relative, full = environ.get(_RELATIVE, ""), environ.get(_FULL, "")
    if relative:
        if not re.fullmatch("/[!-~]*", relative):
            raise UsageError("bad variable", _RELATIVE, "it must be a path that begins with /")
        return ContainerSource(f"http://{_CONTAINER_HOSTS[0]}{relative}", token, token_file)
    if not full:
        raise UsageError("missing variable", _FULL, f"neither it nor {_RELATIVE} is set, and -creds is container")
    _check_container(full)
    return ContainerSource(full, token, token_file)


def _check_container(url: str) -> None:
    try:
        parts = split(url)
        if "@" in parts.netloc or "#" in url:
            raise ValueError("must not have a user name, a password or a '#'")
    except ValueError as error:
        raise UsageError("bad variable", _FULL, f"it {error}") from None
    if parts.scheme != "https" and parts.hostname not in _CONTAINER_HOSTS and not _loopback(parts.hostname or ""):
        allowed = f"https://, loopback, or {', '.join(_CONTAINER_HOSTS[:3])}"
        raise UsageError("bad variable", _FULL, "its host may not be sent the token", f"allowed: {allowed}")


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _needed(environ: Mapping[str, str], name: str) -> str:
    if value := variable(environ, name):
        return value
    raise UsageError("missing variable", name, "it is not set, and -creds is web-identity")


def _endpoint(environ: Mapping[str, str], name: str) -> str:
    text = environ.get(name, "")
    try:
        return parse_endpoint(text) if text else ""
    except ValueError as error:
        raise UsageError("bad variable", name, f"it {error}") from None


def _parse_json(source: _Service, answer: Answer, hint: str) -> Credentials:
    try:
        fields = json.loads(answer.text)
        if not isinstance(fields, dict):
            raise ValueError("it is no object")
        if fields.get("Code", "Success") != "Success":
            raise ValueError(f"it says{_complaint(answer.text)}")
        return source._credentials(answer, fields)
    except (ValueError, RecursionError) as error:
        cause = "it is not JSON" if isinstance(error, json.JSONDecodeError | RecursionError) else error
        raise source._failed(f"the answer has no credentials: {cause}", hint) from None


def _parsed(text: str) -> ET.Element:
    if "<!" in text:
        raise ValueError("it has a document type")
    try:
        return ET.fromstring(text)  # noqa: S314 - without a document type there are no entities to expand
    except ET.ParseError:
        raise ValueError("it is not XML") from None


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]


def _complaint(text: str, *secrets: str) -> str:
    """Code and message of an AWS error, in XML or JSON, for a line of ours; '' for anything else."""
    try:
        if text.lstrip().startswith("{"):
            fields = {str(name).lower(): value for name, value in json.loads(text).items()}
        else:
            fields = {_local(element.tag).lower(): element.text for element in _parsed(text).iter()}
    except (ValueError, RecursionError):
        return ""
    said = " ".join(str(fields[name]) for name in ("code", "message") if fields.get(name))[:300].strip()
    return f": {said}" if said and not repeats(said, secrets) else ""


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{host_and_port(parts)}"


def _reason(error: Exception, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {seconds:.0f} s"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"TLS: {getattr(error.certificate_error, 'verify_message', '') or 'its certificate is not trusted'}"
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return f"the proxy refuses: {error.status}"
    if isinstance(error, aiohttp.ClientProxyConnectionError):
        return f"the proxy can't be reached: {_system_error(error.os_error)}"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "its name is not known"
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return f"TLS: {getattr(error.os_error, 'reason', '') or 'it failed'}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return _system_error(error.os_error)
    return f"the answer broke off, or is not HTTP ({type(error).__name__})"


def _system_error(error: OSError) -> str:
    """In the system's own words; asyncio's have the address in them once more."""
    return os.strerror(error.errno) if error.errno else "no connection"


def _trust(ca: str) -> ssl.SSLContext:
    """The given CA and no other; by default those of certifi, which the S3 client and the Vault client use as well."""
    if not ca:
        import certifi

        ca = certifi.where()
    return ssl.create_default_context(cafile=ca)
