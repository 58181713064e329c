"""Every store keeps the contract, the fakes that other tests rely on included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from contract import StoreContract
from fakes import FaultyStore, MemoryStore
from publishd.stores.posix import PosixStore

if TYPE_CHECKING:
    from pathlib import Path

    from publishd.stores import Store


class TestPosixStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        self.path = tmp_path / "root"
        self.path.mkdir()
        return PosixStore(str(self.path))

    async def raw_write(self, key: str, content: bytes) -> None:
        file = self.path / key
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)

    async def raw_read(self, key: str) -> bytes:
        return (self.path / key).read_bytes()

    async def raw_names(self, folder: str) -> set[str]:
        path = self.path / folder
        return {child.name for child in path.iterdir()} if path.is_dir() else set()

    async def raw_link(self, key: str, target: str) -> None:
        link = self.path / key
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.path / target)


class TestPosixStoreWithoutSync(TestPosixStore):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        self.path = tmp_path / "root"
        self.path.mkdir()
        return PosixStore(str(self.path), sync=False)


class TestMemoryStore(StoreContract):
    has_folders = has_links = False

    @pytest.fixture
    def store(self) -> Store:
        self.memory = MemoryStore()
        return self.memory

    async def raw_write(self, key: str, content: bytes) -> None:
        self.memory.write(key, content)

    async def raw_read(self, key: str) -> bytes:
        content = self.memory.contents[key]
        assert isinstance(content, bytes)
        return content

    async def raw_names(self, folder: str) -> set[str]:
        return set(self.memory.names(folder))


class TestMemoryStoreMovingInTwoSteps(TestMemoryStore):
    @pytest.fixture
    def store(self) -> Store:
        self.memory = MemoryStore(two_step_move=True)
        return self.memory


class TestFaultyStore(TestMemoryStore):
    @pytest.fixture
    def store(self) -> Store:
        self.memory = MemoryStore()
        return FaultyStore(self.memory)
