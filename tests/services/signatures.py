"""AWS Signature Version 4, as its specification describes it and without the library under test.

The format is that of "Signature Calculations for the Authorization Header" in the Amazon S3 API reference.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, unquote

if TYPE_CHECKING:
    from collections.abc import Mapping

_ALGORITHM = "AWS4-HMAC-SHA256"


def encoded(text: str, safe: str = "") -> str:
    """Percent-encoded as the specification wants it: only unreserved characters stay."""
    return quote(text.encode("utf-8", "surrogateescape"), safe=f"-._~{safe}")


def query_string(query: Mapping[str, str]) -> str:
    """The canonical query string, which is also one to send."""
    return "&".join(f"{encoded(name)}={encoded(value)}" for name, value in sorted(query.items()))


def signature(method: str, target: str, headers: Mapping[str, str], secret_key: str, scope: str) -> str:
    """The signature of a request whose signed headers are `headers`, names in lower case.

    `scope` is `<day>/<region>/s3/aws4_request`. The path of `target` is decoded and encoded again, as a server does it.
    """
    path, _, query = target.partition("?")
    names = sorted(headers)
    canonical = "\n".join(
        [
            method,
            encoded(unquote(path, errors="surrogateescape"), safe="/"),
            query_string(dict(parse_qsl(query, keep_blank_values=True))),
            *(f"{name}:{headers[name].strip()}" for name in names),
            "",
            ";".join(names),
            headers["x-amz-content-sha256"],
        ]
    )
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    key = f"AWS4{secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.new(key, "\n".join([_ALGORITHM, headers["x-amz-date"], scope, digest]).encode(), "sha256").hexdigest()


def signed_headers(
    method: str, host: str, target: str, body: bytes, access_key: str, secret_key: str, region: str
) -> dict[str, str]:
    """The headers of a request signed now."""
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    scope = f"{now[:8]}/{region}/s3/aws4_request"
    headers = {"host": host, "x-amz-content-sha256": hashlib.sha256(body).hexdigest(), "x-amz-date": now}
    value = signature(method, target, headers, secret_key, scope)
    names = ";".join(sorted(headers))
    return headers | {"authorization": f"{_ALGORITHM} Credential={access_key}/{scope}, SignedHeaders={names}, Signature={value}"}


def claims(authorization: str) -> dict[str, str]:
    """The parts of an Authorization header, by name: Credential, SignedHeaders, Signature; none if it is another kind."""
    kind, _, rest = authorization.partition(" ")
    if kind != _ALGORITHM:
        return {}
    return dict(part.strip().partition("=")[::2] for part in rest.split(","))
