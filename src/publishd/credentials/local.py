"""Sources on this node: the environment, and an AWS shared-credentials file.

The file's format is that of the AWS CLI: INI sections named by profile, keys as in the environment, in lower case
(https://docs.aws.amazon.com/sdkref/latest/guide/file-format.html).
"""

from __future__ import annotations

import configparser
import os
import stat
from functools import partial
from typing import TYPE_CHECKING

from publishd.credentials.base import Credentials, field
from publishd.credentials.threads import in_daemon
from publishd.errors import NoCredentials, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

_ACCESS, _SECRET, _TOKEN = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
_LARGEST_FILE = 1 << 20
_LOOK_AFTER = 5.0
_READ_SECONDS = 10.0


class EnvironmentSource:
    """The variables publishd was started with; they never change."""

    which = "env"

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    async def fetch(self) -> Credentials:
        """The set of the environment."""
        return self._credentials

    async def aclose(self) -> None:
        """Nothing is held."""


def from_environment(environ: Mapping[str, str]) -> EnvironmentSource:
    """The source `env`. Raises UsageError naming the variable that is missing, empty or can't be a key."""
    for name in (_ACCESS, _SECRET):
        if not environ.get(name):
            raise UsageError("missing variable", name, "it is not set, and -creds is env", "set it, or use another source")
    access, secret, token = (variable(environ, name) for name in (_ACCESS, _SECRET, _TOKEN))
    return EnvironmentSource(Credentials(access, secret, token))


def variable(environ: Mapping[str, str], name: str) -> str:
    """The value of a variable that is sent to somebody, '' if unset. Raises UsageError for what can't be sent."""
    try:
        return field({name: environ.get(name, "")}, name, required=False)
    except ValueError as error:
        raise UsageError("bad variable", name, str(error).replace(name, "it", 1)) from None


class FileSource:
    """One profile of a shared-credentials file, read anew at each fetch, so that a rotation is noticed in seconds."""

    def __init__(self, which: str, path: str, profile: str) -> None:
        self.which = which
        self._path, self._profile = path, profile

    async def fetch(self) -> Credentials:
        """The set as the file has it now. Raises NoCredentials, also for a file that is just being written."""
        try:
            text = await in_daemon(partial(read_file, self._path, _LARGEST_FILE), _READ_SECONDS)
        except OSError as error:
            raise self._failed(error.strerror or "it did not answer in time") from None
        except ValueError as error:
            raise self._failed(str(error)) from None
        return self._parse(text)

    def _parse(self, text: str) -> Credentials:
        parser = configparser.RawConfigParser(default_section="\0", strict=False)
        try:
            parser.read_string(text)
        except configparser.Error:  # its text would quote the line, which may be a secret
            raise self._failed("it is not an INI file") from None
        if self._profile not in parser:
            raise self._failed(f"it has no profile {self._profile!r}")
        section = dict(parser[self._profile])
        try:
            access, secret = field(section, _ACCESS.lower()), field(section, _SECRET.lower())
            token = field(section, _TOKEN.lower(), "aws_security_token", required=False)
        except ValueError as error:
            raise self._failed(f"profile {self._profile!r}: {error}") from None
        return Credentials(access, secret, token, renew_after=_LOOK_AFTER)

    def _failed(self, cause: str) -> NoCredentials:
        return NoCredentials("no credentials", self.which, cause, "an AWS shared-credentials file is wanted; see ?profile=NAME")

    async def aclose(self) -> None:
        """Nothing is held."""


def read_file(path: str, limit: int) -> str:
    """The text of a regular file of at most `limit` bytes; a FIFO or device can't hang it. Raises OSError, ValueError."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it is larger than {limit} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
