"""Where in an S3 service a test puts its root, and what it does there behind publishd's back."""

from __future__ import annotations

import http.client
import threading
import uuid
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote_plus, urlsplit
from xml.etree import ElementTree

from services.signatures import encoded, query_string, signed_headers

if TYPE_CHECKING:
    from collections.abc import Mapping

REGION = "us-east-1"
_TRIES = 3


class Keys(NamedTuple):
    """Long-term credentials."""

    access_key: str
    secret_key: str

    @property
    def environ(self) -> dict[str, str]:
        """What `-creds env` reads."""
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}


class Refused(Exception):
    """The service answered with an error: its status and its code."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(status, code)
        self.status, self.code = status, code


class S3Service:
    """An S3 service at a plain http endpoint, and a small client for it of which publishd shares no line.

    The client has one connection and may be used by several threads. It follows the protocol on its own, so that what
    it sees is evidence, and takes a third of the time that botocore does.
    """

    def __init__(self, endpoint: str, keys: Keys) -> None:
        self.endpoint, self.keys = endpoint, keys
        self._host = urlsplit(endpoint).netloc
        self._connection = http.client.HTTPConnection(self._host, timeout=60)
        self._lock = threading.Lock()
        self._shared_bucket = ""

    def place(self, bucket: str = "") -> Place:
        """A fresh prefix, in a bucket that all share or in the given one."""
        if not self._shared_bucket:
            self._shared_bucket = self.new_bucket()
        return Place(self, bucket or self._shared_bucket, f"team/{uuid.uuid4().hex}")

    def new_bucket(self, name: str = "", *, versioned: bool = False) -> str:
        """A bucket that is empty and new."""
        name = name or f"bucket-{uuid.uuid4().hex}"
        self.request("PUT", f"/{name}")
        if versioned:
            content = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
            self.request("PUT", f"/{name}", {"versioning": ""}, content)
        return name

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes = b"",
        keys: Keys | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """The body of the answer to one signed request; raises Refused for any status but 2xx."""
        target = encoded(path, safe="/") + (f"?{query_string(query)}" if query else "")
        signed = signed_headers(method, self._host, target, body, *(keys or self.keys), REGION)
        for _ in range(_TRIES):  # moto's server sometimes stumbles over what another of its threads does
            with self._lock:
                answer = self._exchange(method, target, body, signed | dict(headers or {}))
                content = answer.read()
            if answer.status != HTTPStatus.INTERNAL_SERVER_ERROR:
                break
        if answer.status // 100 != 2:
            raise Refused(answer.status, _code(content))
        return content

    def _exchange(self, method: str, target: str, body: bytes, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        try:
            self._connection.request(method, target, body, headers)
            return self._connection.getresponse()
        except (ConnectionError, http.client.HTTPException):  # an idle connection was closed meanwhile
            self._connection.close()
            self._connection.request(method, target, body, headers)
            return self._connection.getresponse()

    def put(self, bucket: str, key: str, content: bytes) -> None:
        """Make or replace an object."""
        self.request("PUT", f"/{bucket}/{key}", body=content)

    def close(self) -> None:
        self._connection.close()


class Place(NamedTuple):
    """A prefix of a bucket: a root, empty at first. Keys are relative to it."""

    service: S3Service
    bucket: str
    prefix: str

    @property
    def root(self) -> str:
        """What `-checkpoint` takes."""
        return f"s3://{self.bucket}/{self.prefix}"

    @property
    def flags(self) -> list[str]:
        """What every command needs beside `-checkpoint`, with `environ` in its environment."""
        return ["-creds", "env", "-endpoint", self.service.endpoint, "-region", REGION]

    @property
    def environ(self) -> dict[str, str]:
        return self.service.keys.environ

    def put(self, key: str, content: bytes = b"") -> None:
        """Make or replace an object."""
        self.service.put(self.bucket, f"{self.prefix}/{key}", content)

    def get(self, key: str) -> bytes:
        """The content of an object; raises Refused where there is none."""
        return self.service.request("GET", self._path(key))

    def delete(self, key: str) -> None:
        """Delete an object, or make it seem so in a versioned bucket."""
        self.service.request("DELETE", self._path(key))

    def keys(self, below: str = "") -> list[str]:
        """All keys of the place that begin with `below`, sorted by their bytes."""
        start = f"{self.prefix}/"
        query = {"list-type": "2", "encoding-type": "url", "prefix": f"{start}{below}"}
        found: list[str] = []
        while True:
            page = ElementTree.fromstring(self.service.request("GET", f"/{self.bucket}", query))
            found += [unquote_plus(key.text or "") for key in page.iterfind("{*}Contents/{*}Key")]
            if page.findtext("{*}IsTruncated") != "true":
                return sorted((key.removeprefix(start) for key in found), key=str.encode)
            query["continuation-token"] = page.findtext("{*}NextContinuationToken") or ""

    def names(self, folder: str) -> set[str]:
        """The names of a folder's children, judged by the keys below it alone; a folder object is no child."""
        start = f"{folder}/" if folder else ""
        return {key[len(start) :].partition("/")[0] for key in self.keys(start)} - {""}

    @property
    def pub(self) -> list[str]:
        """The names of the entries, oldest first."""
        return sorted(self.names("pub"))

    @property
    def steps(self) -> list[int]:
        """The published steps, oldest first."""
        return [int(name.split("-")[1]) for name in self.pub]

    def hf(self, step: int, stated: object = None, *, attempt: str = "1.4101.0", folder: str = "") -> str:
        """A complete Trainer save: the weights, then trainer_state.json with `stated` (default: the step). Returns its key."""
        save = f"exec/{attempt}/{folder or f'checkpoint-{step}'}"
        self.put(f"{save}/model.safetensors", b"weights of %d" % step)
        self.put(f"{save}/trainer_state.json", b'{"global_step": %s}' % str(step if stated is None else stated).encode())
        return save

    def _path(self, key: str) -> str:
        return f"/{self.bucket}/{self.prefix}/{key}"


def _code(content: bytes) -> str:
    try:
        return ElementTree.fromstring(content).findtext("{*}Code") or ""
    except ElementTree.ParseError:
        return ""
