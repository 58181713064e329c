"""An S3 in a dictionary, good enough to run publishd against: conditional PUT, GET, HEAD, DELETE and listings by page.

It is strict where a client may be wrong: what it can check, it checks (signature, clock, digest of the body, scope).
"""

from __future__ import annotations

import base64
import hashlib
import threading
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import TYPE_CHECKING
from urllib.parse import quote_plus, urlsplit
from xml.sax.saxutils import escape

from services.exchanges import Answer, error, xml
from services.signatures import claims, signature

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.exchanges import Request

_SKEW = timedelta(minutes=15)


class SmallS3:
    """The behaviour of a scripted server. `objects` maps (bucket, key) to content, and a test may change it at will.

    - `page`: the most items of one page of a listing, whatever the client asks for
    - `secrets`: access key to secret key; with it every request must be signed rightly, and by a clock within 15 minutes
    - `clock`: what is added to the time of this machine to get the server's
    - `scope`: a prefix outside which everything is denied, as by a policy with a condition on `s3:prefix`
    - `domain`: with it `BUCKET.domain` is understood as a host, whatever the port
    - `region`: the only region whose signatures are taken
    """

    def __init__(
        self,
        *,
        page: int = 1000,
        secrets: Mapping[str, str] | None = None,
        clock: timedelta = timedelta(),
        scope: str = "",
        domain: str = "",
        region: str = "us-east-1",
    ) -> None:
        self.objects: dict[tuple[str, str], bytes] = {}
        self.page, self.secrets, self.clock, self.scope, self.domain, self.region = page, secrets, clock, scope, domain, region
        self._lock = threading.Lock()

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """All keys of a bucket that begin with the prefix, in the order of their bytes."""
        found = [key for of, key in list(self.objects) if of == bucket and key.startswith(prefix)]
        return sorted(found, key=lambda key: key.encode("utf-8", "surrogateescape"))

    def __call__(self, request: Request) -> Answer:
        """Answer the request as S3 does."""
        bucket, key = self.addressed(request)
        refusal = self._unauthorised(request) or self._out_of_scope(request, key)
        if refusal:
            return refusal
        if not key:
            return self._list(bucket, request.query) if request.query.get("list-type") == "2" else error(501, "NotImplemented")
        with self._lock:
            return self._object(request, (bucket, key))

    def addressed(self, request: Request) -> tuple[str, str]:
        """The bucket and the key that a request means, by its host or by its path."""
        host = str(request.headers["Host"] or "").partition(":")[0]
        if self.domain and host.endswith(f".{self.domain}"):
            return host.removesuffix(f".{self.domain}"), request.path[1:]
        bucket, _, key = request.path[1:].partition("/")
        return bucket, key

    # Objects

    def _object(self, request: Request, name: tuple[str, str]) -> Answer:
        if request.method == "PUT":
            return self._put(request, name)
        if request.method == "DELETE":
            self.objects.pop(name, None)
            return Answer(204)
        if request.method not in ("GET", "HEAD"):
            return error(405, "MethodNotAllowed")
        if name not in self.objects:
            return error(404, "NoSuchKey")
        return Answer(200, self.objects[name], {"ETag": _etag(self.objects[name])})

    def _put(self, request: Request, name: tuple[str, str]) -> Answer:
        if request.headers.get("If-None-Match") == "*" and name in self.objects:
            return error(412, "PreconditionFailed")
        self.objects[name] = request.body
        return Answer(200, headers={"ETag": _etag(request.body)})

    # Listings

    def _list(self, bucket: str, query: Mapping[str, str]) -> Answer:
        marker = base64.b64decode(query.get("continuation-token", "")).decode() or query.get("start-after", "")
        items = [item for item in self._items(bucket, query) if not marker or item.encode() > marker.encode()]
        size = min(self.page, int(query.get("max-keys", "1000")))
        shown, truncated = items[:size], len(items) > size
        parts = [f"<Name>{escape(bucket)}</Name><Prefix>{_text(query.get('prefix', ''), query)}</Prefix>"]
        parts += [
            f"<KeyCount>{len(shown)}</KeyCount><MaxKeys>{size}</MaxKeys><IsTruncated>{str(truncated).lower()}</IsTruncated>"
        ]
        if truncated:
            token = base64.b64encode(shown[-1].encode()).decode()
            parts.append(f"<NextContinuationToken>{token}</NextContinuationToken>")
        parts += [self._item(bucket, item, query) for item in shown]
        if query.get("encoding-type") == "url":
            parts.append("<EncodingType>url</EncodingType>")
        return xml("ListBucketResult", "".join(parts))

    def _items(self, bucket: str, query: Mapping[str, str]) -> list[str]:
        """Keys and common prefixes (which end in the delimiter), in order."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        if not delimiter:
            return self.keys(bucket, prefix)
        items = dict.fromkeys(_rolled_up(key, prefix, delimiter) for key in self.keys(bucket, prefix))
        return sorted(items, key=str.encode)

    def _item(self, bucket: str, item: str, query: Mapping[str, str]) -> str:
        delimiter, prefix = query.get("delimiter", ""), query.get("prefix", "")
        if delimiter and item != prefix and item.endswith(delimiter):
            return f"<CommonPrefixes><Prefix>{_text(item, query)}</Prefix></CommonPrefixes>"
        content = self.objects.get((bucket, item), b"")
        return (
            f"<Contents><Key>{_text(item, query)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(_etag(content))}</ETag><Size>{len(content)}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        )

    # Rights

    def _out_of_scope(self, request: Request, key: str) -> Answer | None:
        wanted = key or request.query.get("prefix", "")
        return None if wanted.startswith(self.scope) else error(403, "AccessDenied")

    def _unauthorised(self, request: Request) -> Answer | None:
        if self.secrets is None:
            return None
        said = claims(request.headers.get("Authorization", ""))
        access_key, _, scope = said.get("Credential", "").partition("/")
        if not said:
            return error(403, "AccessDenied")
        if access_key not in self.secrets:
            return error(403, "InvalidAccessKeyId")
        if scope.split("/")[1:2] != [self.region]:
            return error(400, "AuthorizationHeaderMalformed", Region=self.region)
        return self._skewed(request) or self._forged(request, said, self.secrets[access_key], scope)

    def _skewed(self, request: Request) -> Answer | None:
        now = datetime.now(UTC) + self.clock
        stated = request.headers.get("X-Amz-Date", "19700101T000000Z")
        if abs(datetime.strptime(f"{stated}+0000", "%Y%m%dT%H%M%SZ%z") - now) <= _SKEW:
            return None
        headers = {"Date": format_datetime(now, usegmt=True)}
        return error(403, "RequestTimeTooSkewed", headers, RequestTime=escape(stated), ServerTime=f"{now:%Y-%m-%dT%H:%M:%SZ}")

    def _forged(self, request: Request, said: Mapping[str, str], secret_key: str, scope: str) -> Answer | None:
        headers = {name: str(request.headers[name]) for name in said.get("SignedHeaders", "").split(";")}
        digest = headers.get("x-amz-content-sha256", "")
        if digest not in (hashlib.sha256(request.body).hexdigest(), "UNSIGNED-PAYLOAD"):
            return error(400, "XAmzContentSHA256Mismatch")
        target = urlsplit(request.target)._replace(scheme="", netloc="").geturl()
        if signature(request.method, target, headers, secret_key, scope) != said.get("Signature"):
            return error(403, "SignatureDoesNotMatch")
        return None


def _rolled_up(key: str, prefix: str, delimiter: str) -> str:
    head, found, _ = key[len(prefix) :].partition(delimiter)
    return prefix + head + found


def _text(text: str, query: Mapping[str, str]) -> str:
    """A name as a listing has it; without encoding-type=url a control character makes it XML that nobody can read."""
    return quote_plus(text.encode("utf-8", "surrogateescape"), safe="/") if query.get("encoding-type") == "url" else escape(text)


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'
