"""The S3 store keeps the contract of a store: on a real SeaweedFS, on moto's server, and on a small S3 that pages by seven."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from contract import ODD_NAMES, SAVE, StoreContract, names
from publishd.credentials import Credentials, LiveCredentials
from publishd.stores.s3 import S3Settings, S3Store
from services.places import Place, S3Service
from services.scripted import ScriptedS3

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from publishd.stores import Store
    from services.moto import Moto
    from services.places import Keys
    from services.seaweed import SeaweedFS


class Static:
    """A source whose credentials never change."""

    which = "static"

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def fetch(self) -> Credentials:
        return Credentials(*self._keys)

    async def aclose(self) -> None:
        pass


class S3Contract(StoreContract):
    """The contract on the place that a subclass gives; what is raw goes by another client, which shares no line with ours."""

    has_folders = has_links = names_are_bytes = False

    @pytest.fixture
    def place(self) -> Place:
        raise NotImplementedError

    @pytest.fixture
    async def store(self, place: Place) -> AsyncIterator[Store]:
        self.place_ = place
        live = LiveCredentials(Static(place.service.keys))
        settings = S3Settings(endpoint=place.service.endpoint, region="us-east-1")
        store = S3Store(place.bucket, place.prefix, live, settings)
        assert store.root == place.root
        yield store
        await store.aclose()

    async def test_a_deleted_folder_is_seen_nowhere(self, store: Store) -> None:
        """What delete_tree removed is in no listing of its parent either, and does not stand there any more."""
        await self.raw_save()
        await self.raw_save(f"{SAVE}0")
        await store.delete_tree(SAVE)
        assert names(await store.list("exec/1.4101.0")) == ["checkpoint-50"]
        assert not await store.exists(SAVE)

    async def raw_write(self, key: str, content: bytes) -> None:
        self.place_.put(key, content)

    async def raw_read(self, key: str) -> bytes:
        return self.place_.get(key)

    async def raw_names(self, folder: str) -> set[str]:
        return self.place_.names(folder)


class TestS3StoreOnSeaweedFS(S3Contract):
    odd_names = tuple(name for name in ODD_NAMES if "\\" not in name)  # it takes `\` for `/`
    crowd = 5  # losers of a larger one wait in whole seconds, up to 17 were seen

    @pytest.fixture
    def place(self, seaweed: SeaweedFS) -> Place:
        return seaweed.place()


class TestS3StoreOnMoto(S3Contract):
    odd_names = tuple(name for name in ODD_NAMES if "\n" not in name)  # its router answers 404 to a path with a line break

    @pytest.fixture
    def place(self, moto: Moto) -> Place:
        return moto.place()


class TestS3StoreByPagesOfSeven(S3Contract):
    @pytest.fixture
    def place(self) -> Iterator[Place]:
        with ScriptedS3(page=7) as server:
            service = S3Service(server.endpoint, server.keys)
            yield Place(service, "bucket", "team/p")
            service.close()
