"""What a Vault secret says: where to read it for each kind of engine, and the credentials in the answer."""

from __future__ import annotations

import re
from math import inf
from typing import Any, NamedTuple

from publishd.credentials.base import SLOW_TIMER, Credentials, field, renewal
from publishd.credentials.urls import parse_endpoint

_ACCESS = ("access_key", "aws_access_key_id", "AWS_ACCESS_KEY_ID")
_SECRET = ("secret_key", "aws_secret_access_key", "AWS_SECRET_ACCESS_KEY")
_TOKEN = ("session_token", "security_token", "aws_session_token", "AWS_SESSION_TOKEN")


class Place(NamedTuple):
    """A path of the API, below /v1/, and the engine behind it: `kv1`, `kv2`, the name of another, or '' for unknown."""

    path: str
    engine: str = ""


def places(path: str, mount: Any) -> list[Place]:
    """Where the secret that `vault kv get` calls `path` may be read, the likeliest first.

    `mount` is what Vault says about the mount, None if it says nothing. Then KV v2 is tried with every part of the path as
    its mount, and KV v1 and the AWS engine, which are read alike, last. With KV v2, `data/x` may be a secret of that name,
    or the API's path of a secret `x`. Raises ValueError for a path that names a mount and nothing in it.
    """
    if not isinstance(mount, dict) or not isinstance(mount.get("path"), str):
        parts = path.split("/")
        splits = ("/".join([*parts[:at], "data", *parts[at:]]) for at in range(1, len(parts)))
        return [*(Place(split, "kv2") for split in splits), Place(path)]
    name = mount["path"].strip("/")
    rest = path.removeprefix(name).strip("/")
    if not rest:
        raise ValueError(f"{name} is a mount; the name of the secret in it is missing")
    options = mount.get("options")
    if mount.get("type") not in ("kv", "generic"):
        return [Place(path, str(mount.get("type")))]
    if not isinstance(options, dict) or str(options.get("version")) != "2":
        return [Place(path, "kv1")]
    written = [Place(f"{name}/{rest}", "kv2")] if re.match("data/.", rest) else []
    return [Place(f"{name}/data/{rest}", "kv2"), *written]


def was_deleted(answer: Any) -> bool:
    """Whether an answer of KV v2 says that the version asked for was deleted or destroyed."""
    content = answer.get("data") if isinstance(answer, dict) else None
    return isinstance(content, dict) and content.get("data", "") is None and isinstance(content.get("metadata"), dict)


def credentials(answer: dict[str, Any], place: Place, token_left: float) -> Credentials:
    """The credentials of an answer. What was minted lives no longer than the token, whose seconds left are `token_left`.

    Raises ValueError, which names fields and never their values.
    """
    fields = answer.get("data")
    if place.engine == "kv2" or (not place.engine and _is_version_2(fields)):
        fields = fields.get("data") if isinstance(fields, dict) else None
    if not isinstance(fields, dict):
        raise ValueError("it has no fields")
    access, secret = field(fields, *_ACCESS), field(fields, *_SECRET)
    token = field(fields, *_TOKEN, required=False)
    minted = bool(answer.get("lease_id")) or place.engine == "aws"
    lifetime = min(_lifetime(answer, fields, minted=minted), token_left if minted else inf)
    return Credentials(
        access,
        secret,
        token,
        renew_after=renewal(lifetime) if lifetime < inf else SLOW_TIMER,
        valid_for=lifetime,
        minted=minted,
        endpoint=_endpoint(fields),
        region=_region(fields),
    )


def _is_version_2(fields: Any) -> bool:
    return isinstance(fields, dict) and fields.keys() == {"data", "metadata"} and isinstance(fields["metadata"], dict)


def _lifetime(answer: dict[str, Any], fields: dict[str, Any], *, minted: bool) -> float:
    """Seconds; inf for KV, whose v1 answers with a lease that means nothing."""
    if not minted:
        return inf
    # A role of the AWS engine without leases tells the lifetime as a field.
    return lease(answer.get("lease_duration")) or lease(fields.get("ttl")) or inf


def lease(value: Any) -> float:
    """Seconds of a lease; 0 where none is told."""
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0


def _endpoint(fields: dict[str, Any]) -> str:
    try:
        text = field(fields, "endpoint", required=False)
        return parse_endpoint(text) if text else ""
    except ValueError as error:
        raise ValueError(f"its endpoint {str(error).removeprefix('endpoint ')}") from None


def _region(fields: dict[str, Any]) -> str:
    region = field(fields, "region", required=False)
    if not re.fullmatch("[A-Za-z0-9_-]{0,64}", region):
        raise ValueError("its region is not the name of one")
    return region
