"""Credentials for S3 roots: the grammar of `-creds`, and the one source that it names.

    env | file:PATH[?profile=NAME] | web-identity | instance | container | vault:https://HOST:PORT/PATH?auth=METHOD&…

What one source needs is imported when that source is opened.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from publishd.credentials.base import Credentials, NotNow, Source
from publishd.credentials.live import LiveCredentials
from publishd.credentials.urls import host_and_port, parse_proxy, split
from publishd.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Credentials", "LiveCredentials", "NotNow", "Source", "SourceSpec", "open_source", "parse_source"]

_PLAIN = ("env", "web-identity", "instance", "container")
_FORMS = "env, file:PATH, web-identity, instance, container or vault:https://HOST:PORT/PATH?auth=METHOD&…"

_COMMON = frozenset({"auth", "namespace", "ca", "proxy"})
METHODS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "token": (frozenset(), frozenset({"token_file"})),
    "kubernetes": (frozenset({"role"}), frozenset({"auth_mount", "jwt_file"})),
    "jwt": (frozenset({"jwt_file"}), frozenset({"auth_mount", "role"})),
    "approle": (frozenset({"role_id", "secret_id_file"}), frozenset({"auth_mount"})),
    "cert": (frozenset({"cert"}), frozenset({"auth_mount", "key", "role"})),
}
"""For each auth= of Vault the keys that it needs, and those it may have."""

_KEYS = _COMMON.union(*(needed | allowed for needed, allowed in METHODS.values()))


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """A valid `-creds`. `address` is a file's path or `https://host:port` of a Vault, `path` the secret's path in it."""

    kind: str
    address: str = ""
    path: str = ""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def which(self) -> str:
        """What messages call the source; never a query, never a secret."""
        return f"{self.kind}:{self.address}{self.path and f'/{self.path}'}" if self.address else self.kind


def parse_source(text: str) -> SourceSpec:
    """The source that a `-creds` names.

    Raises ValueError saying what it must be; it never repeats any of the value, which may hold a mistyped secret.
    """
    kind, colon, rest = text.partition(":")
    if kind == "file" and colon:
        return _parse_file(rest)
    if kind == "vault" and colon:
        return _parse_vault(rest)
    if text not in _PLAIN:
        raise ValueError(f"must be {_FORMS}")
    return SourceSpec(text)


def _parse_file(text: str) -> SourceSpec:
    path, question, query = text.partition("?")
    if not path or re.search("[\x00-\x1f\x7f-\x9f]", path):
        raise ValueError("must have the path of an AWS shared-credentials file after file:, without control characters")
    name, _, profile = query.partition("=")
    if question and (name != "profile" or not profile or "&" in profile):
        raise ValueError("must be file:PATH or file:PATH?profile=NAME")
    return SourceSpec("file", path, options={"profile": _decoded(profile)} if question else {})


def _parse_vault(text: str) -> SourceSpec:
    url, question, query = text.partition("?")
    parts = split(url)
    if "@" in parts.netloc or "#" in text:
        raise ValueError("the Vault URL must not have a user name, a password or a '#'")
    path = "/".join(_decoded(part) for part in parts.path.strip("/").split("/"))
    if re.search(r"(^|/)\.{0,2}(/|$)", path):
        raise ValueError("the Vault URL must have the secret's path, as for `vault kv get`: https://HOST:PORT/team/s3")
    if path.startswith("v1/"):
        raise ValueError("the secret's path must be as for `vault kv get`, without v1/")
    options = _parse_options(query) if question else {}
    _check_method(options)
    return SourceSpec("vault", f"{parts.scheme}://{host_and_port(parts)}", path, options)


def _parse_options(query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for pair in query.split("&"):
        name, _, value = pair.partition("=")
        if name not in _KEYS:
            raise ValueError(f"has an unknown key after '?' (known: {', '.join(sorted(_KEYS))})")
        if name in options:
            raise ValueError(f"has {name}= twice")
        if not value:
            raise ValueError(f"has an empty {name}= (is the variable it comes from set?)")
        options[name] = _decoded(value)
    for name, check in _CHECKS.items():
        if name in options:
            options[name] = check(options[name])
    return options


def _check_method(options: Mapping[str, str]) -> None:
    method = options.get("auth", "")
    if method not in METHODS:
        raise ValueError(f"must have auth={'|'.join(METHODS)} after '?'")
    needed, allowed = METHODS[method]
    if missing := sorted(needed - options.keys()):
        raise ValueError(f"auth={method} needs {' and '.join(f'{name}=' for name in missing)}")
    if spare := sorted(options.keys() - needed - allowed - _COMMON):
        raise ValueError(f"auth={method} has no {' or '.join(f'{name}=' for name in spare)}")


def _proxy(text: str) -> str:
    try:
        return parse_proxy(text)
    except ValueError as error:
        raise ValueError(f"its proxy= {error}") from None


def _mount(text: str) -> str:
    mount = text.strip("/")
    if not re.fullmatch(r"(?!.*(^|/)\.{0,2}(/|$))[!-~]+", mount) or re.search(r"[%?#\\]", mount):
        raise ValueError("its auth_mount= must be the path of an auth method, such as kubernetes")
    return mount.removeprefix("auth/")


def _namespace(text: str) -> str:
    if not re.fullmatch("[!-~]+", text):
        raise ValueError("its namespace= must not have blanks or letters outside ASCII")
    return text


_CHECKS: dict[str, Callable[[str], str]] = {"proxy": _proxy, "auth_mount": _mount, "namespace": _namespace}


def _decoded(text: str) -> str:
    """Percent-encoding undone. Raises ValueError where that gives control characters, or bytes that are not UTF-8."""
    if re.search("%(?![0-9A-Fa-f]{2})", text):
        raise ValueError("has a '%' that begins no percent-encoding")
    try:
        decoded = unquote_to_bytes(text).decode("utf-8")
    except UnicodeError:
        raise ValueError("must be UTF-8") from None
    if re.search("[\x00-\x1f\x7f-\x9f]", decoded):
        raise ValueError("must not have control characters")
    return decoded


def open_source(spec: SourceSpec, environ: Mapping[str, str], *, proxy: str = "", ca: str = "", region: str = "") -> Source:
    """The source of a `-creds`; nothing is connected to yet, and `environ` is all of the environment that it sees.

    `proxy`, `ca` and `region` are the flags of the same names; only STS uses them. Raises UsageError for what can be
    known to be missing or malformed.
    """
    if spec.kind == "env":
        from publishd.credentials.local import from_environment

        return from_environment(environ)
    if spec.kind == "file":
        from publishd.credentials.local import FileSource

        return FileSource(spec.which, _expanded(spec.address, environ), spec.options.get("profile", "default"))
    if spec.kind == "vault":
        return _open_vault(spec, environ)
    from publishd.credentials import aws

    if spec.kind == "instance":
        return aws.open_instance(environ)
    if spec.kind == "container":
        return aws.open_container(environ)
    check_ca(ca, "-ca")
    return aws.open_web_identity(environ, proxy=proxy, ca=ca, region=region)


def _open_vault(spec: SourceSpec, environ: Mapping[str, str]) -> Source:
    from publishd.credentials.vault import VaultSource

    check_ca(spec.options.get("ca", ""), "-creds")
    token = environ.get("VAULT_TOKEN", "")
    if spec.options["auth"] != "token" or "token_file" in spec.options:
        return VaultSource(spec)
    if not token:
        raise UsageError("missing variable", "VAULT_TOKEN", "it is not set", "set it, or give token_file= in -creds")
    if not re.fullmatch("[!-~]+", token):
        raise UsageError("bad variable", "VAULT_TOKEN", "it has a blank, a line break or a character outside ASCII")
    return VaultSource(spec, token)


def _expanded(path: str, environ: Mapping[str, str]) -> str:
    """A leading `~/` as a shell expands it, which it does not do after `file:`."""
    return f"{environ['HOME']}/{path[2:]}" if path.startswith("~/") and environ.get("HOME") else path


def check_ca(path: str, flag: str) -> None:
    """Raise UsageError naming the flag unless the path is '' or a PEM file of certificates that can be loaded."""
    if not path:
        return
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError:
        raise UsageError("bad flag", flag, "its ca file has no certificate in PEM form") from None
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or "not a path"
        raise UsageError("bad flag", flag, f"its ca file cannot be read: {cause}") from None
