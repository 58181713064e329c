"""moto's server in a thread: an S3 service that does as AWS does, save that it asks for no credentials."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from services.places import Keys, S3Service

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Service]:
    """One server per test process; a test that needs an empty place asks for a fresh one."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    service = S3Service(f"http://{host}:{port}", Keys("AKIDMOTO", "moto-asks-for-none"))
    yield service
    service.close()
    server.stop()
