"""URLs that a user gives: of a proxy, and of a service. What is wrong with one is said without repeating it."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit


def parse_proxy(text: str) -> str:
    """The URL of a proxy, scheme and host in lower case: http(s)://[user@]host[:port].

    Raises ValueError for anything else, above all for a password, which would end in logs and process lists.
    """
    parts = split(text)
    if parts.password is not None:
        raise ValueError("must not have a password (let the proxy know this node by other means)")
    if parts.path not in ("", "/") or "?" in text or "#" in text:
        raise ValueError("must end after the host and port: http://HOST:PORT")
    user = f"{parts.username}@" if parts.username else ""
    return f"{parts.scheme}://{user}{host_and_port(parts)}"


def parse_endpoint(text: str) -> str:
    """The URL of a service, scheme and host in lower case, without a trailing slash: http(s)://host[:port][/path].

    Raises ValueError for anything else.
    """
    parts = split(text)
    if "@" in parts.netloc:
        raise ValueError("must not have a user name or password")
    if "?" in text or "#" in text:
        raise ValueError("must not have a '?' or '#'")
    return f"{parts.scheme}://{host_and_port(parts)}{parts.path.rstrip('/')}"


def split(text: str) -> SplitResult:
    """The parts of an http(s) URL with a host; scheme lower case. Raises ValueError, which does not repeat it."""
    if not re.fullmatch("[!-~]+", text):
        raise ValueError("must be an http:// or https:// URL without blanks, control characters and letters outside ASCII")
    if not re.match("https?://", text, re.IGNORECASE):
        raise ValueError("must begin with http:// or https://")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError("must have a valid host and port") from None
    if port == 0 or parts.netloc.endswith(":") or not re.fullmatch(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+", parts.hostname or ""):
        raise ValueError("must have a valid host and port")
    return parts


def host_and_port(parts: SplitResult) -> str:
    """The host, in brackets where it is an IPv6 address, and the port if one is given."""
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{parts.port}" if parts.port else host
