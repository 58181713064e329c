"""The contract of a store, as the docstrings in `publishd.stores` promise it: every store's tests subclass `StoreContract`.

A subclass has a fixture `store` and the raw_* methods, which reach the same place without the store, so that everything
is checked behind its back. What not every store can have is a class attribute. That is all a subclass has to say.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar

import pytest

from publishd.errors import (
    AlreadyExists,
    Linked,
    NotAFile,
    NotAFolder,
    NotFound,
    NotPublished,
    StoreError,
    TooLarge,
)
from publishd.stores import PRUNE, PUB, Kind, list_fresh

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from publishd.stores import Entry, Store

SAVE = "exec/1.4101.0/checkpoint-5"
NAME = "00000000000001000000-00000000000000000005-MV4GKYY"
ENTRY, RECORD = f"{PUB}/{NAME}", f"{PRUNE}/{NAME}"
MIB = 1 << 20

ODD_NAMES = (
    "line\nbreak",
    "ends in newline\n",
    "tab\tand\x01control\x7f",
    " spaces around ",
    "-rf",
    "--",
    "...",
    "~",
    "*?[a]{b}",
    "back\\slash",
    "quote'\"`$HOME",
    "percent%2F+&=@;#",
    "lau\u0308f",
    "läuf",
    "日本\u2028語",
    "x" * 255,
)
NAMES_NOT_UTF8 = ("caf\udce9", "\udc80\udcff")

MUTATIONS: dict[str, Callable[[Store], Awaitable[None]]] = {
    "create": lambda store: store.create(ENTRY),
    "move": lambda store: store.move(f"{PUB}/old", RECORD),
    "delete": lambda store: store.delete(f"{PUB}/old"),
    "delete_tree": lambda store: store.delete_tree(SAVE),
    "sync": lambda store: store.sync(SAVE, recursive=True),
}


def names(entries: list[Entry]) -> list[str]:
    """The names of a listing, sorted; doubled ones stay doubled."""
    return sorted(entry.name for entry in entries)


class StoreContract:
    """What every store must do. The names of the tests are the clauses."""

    has_folders: ClassVar[bool] = True
    """Folders stand for themselves, also empty ones; without, they exist only through the keys below them."""
    has_links: ClassVar[bool] = True
    """There are symbolic links; `raw_link` makes one."""
    names_are_bytes: ClassVar[bool] = True
    """A name need not be UTF-8."""
    odd_names: ClassVar[tuple[str, ...]] = ODD_NAMES
    """Names that the server itself can hold; one that it can't is no matter of the adapter."""
    crowd: ClassVar[int] = 12
    """How many may create one key at once without the server making them wait for many seconds."""

    # What a subclass gives, besides the fixture `store`

    async def raw_write(self, key: str, content: bytes) -> None:
        """Put a file there, parents included."""
        raise NotImplementedError

    async def raw_read(self, key: str) -> bytes:
        """The content of the file that stands there."""
        raise NotImplementedError

    async def raw_names(self, folder: str) -> set[str]:
        """The names of all children; none where there is no such folder."""
        raise NotImplementedError

    async def raw_link(self, key: str, target: str) -> None:
        """Put a symbolic link to another key there, parents included."""
        raise NotImplementedError

    async def raw_exists(self, key: str) -> bool:
        """Whether anything stands there."""
        folder, _, name = key.rpartition("/")
        return name in await self.raw_names(folder)

    async def raw_save(self, key: str = SAVE) -> None:
        """A save of three files in two folders."""
        for file in ("model", "trainer_state.json", "rank/0/shard"):
            await self.raw_write(f"{key}/{file}", b"content")

    async def raw_is_whole(self, key: str = SAVE) -> bool:
        """Whether that save is as it was made."""
        return (
            await self.raw_names(key) == {"model", "trainer_state.json", "rank"}
            and await self.raw_names(f"{key}/rank/0") == {"shard"}
            and await self.raw_read(f"{key}/rank/0/shard") == b"content"
        )

    # list

    async def test_list_has_children_and_no_deeper_ones(self, store: Store) -> None:
        """A listing has each immediate child once, with its kind, for the root and for a folder below it."""
        await self.raw_write("a/file", b"x")
        await self.raw_write("a/folder/deep/file", b"x")
        assert [(name, kind) for name, kind, _ in sorted(await store.list("a"))] == [
            ("file", Kind.FILE),
            ("folder", Kind.FOLDER),
        ]
        assert names(await store.list("")) == ["a"]

    async def test_list_shows_a_link_as_a_link(self, store: Store) -> None:
        """A link is a link, whether it leads to a file, a folder or nowhere."""
        self._need(self.has_links)
        await self.raw_write("a/real/file", b"x")
        for name, target in (("to-file", "a/real/file"), ("to-folder", "a/real"), ("to-nothing", "a/none")):
            await self.raw_link(f"b/{name}", target)
        assert {kind for _, kind, _ in await store.list("b")} == {Kind.LINK}

    async def test_list_never_drops_an_odd_name(self, store: Store) -> None:
        """Every name is returned as it is, whatever characters it has."""
        wanted = self.odd_names + (NAMES_NOT_UTF8 if self.names_are_bytes else ())
        for name in wanted:
            await self.raw_write(f"odd/{name}", b"")
        assert names(await store.list("odd")) == sorted(wanted)

    async def test_list_goes_into_a_folder_of_an_odd_name(self, store: Store) -> None:
        """A folder's key may have any characters, and its siblings are not confused with it."""
        for name in self.odd_names:
            await self.raw_write(f"{name}/inside", b"")
        for name in self.odd_names:
            assert names(await store.list(name)) == ["inside"]

    async def test_list_has_more_than_a_thousand_names(self, store: Store) -> None:
        """A folder of any size is returned whole: a page is not the listing."""
        wanted = [f"{number:06}" for number in range(2_001)]
        for name in wanted:
            await self.raw_write(f"{PUB}/{name}", b"")
        assert names(await store.list(PUB)) == wanted

    async def test_list_of_a_missing_folder_is_not_found(self, store: Store) -> None:
        """A folder that is not there is NotFound, at any depth, and beside one whose name it begins."""
        await self.raw_write("exec-old/file", b"")
        for folder in ("exec", "exec/1", "exec/1/checkpoint-5"):
            with pytest.raises(NotFound):
                await store.list(folder)

    async def test_list_of_a_file_is_not_a_folder(self, store: Store) -> None:
        """Where a file stands there is no folder to list."""
        await self.raw_write("a/file", b"")
        with pytest.raises(NotAFolder if self.has_folders else (NotAFolder, NotFound)):
            await store.list("a/file")

    async def test_list_of_an_empty_folder_is_empty(self, store: Store) -> None:
        """An empty folder has no children, which is not the same as missing."""
        self._need(self.has_folders)
        await store.create(ENTRY)
        await store.delete(ENTRY)
        assert await store.list(PUB) == []

    async def test_list_sees_what_came_and_went_since_the_last_listing(self, store: Store) -> None:
        """Each listing is made afresh."""
        await self.raw_write("a/stays", b"")
        assert names(await store.list("a")) == ["stays"]
        await self.raw_write("a/new", b"")
        assert names(await store.list("a")) == ["new", "stays"]
        await store.delete("a/new")
        assert names(await store.list("a")) == ["stays"]

    async def test_list_gives_a_folder_the_same_inode_each_time(self, store: Store) -> None:
        """A folder's inode stays, also when something is written into it."""
        await self.raw_save()
        first = await store.list("exec/1.4101.0")
        await self.raw_write(f"{SAVE}/more", b"")
        assert await store.list("exec/1.4101.0") == first

    async def test_list_fresh_is_the_listing_or_none(self, store: Store) -> None:
        """`list_fresh` is the listing where there is a folder, and None where its parent, at any depth, lacks it."""
        await self.raw_save()
        assert await list_fresh(store, SAVE) is not None
        for missing in (PUB, "exec/2", "exec/2/checkpoint-5/rank", f"{SAVE}/none"):
            assert await list_fresh(store, missing) is None

    async def test_list_fresh_of_a_new_root_is_none_below_it(self, store: Store) -> None:
        """A root that holds nothing has no `pub/`, and says so without an error."""
        assert await list_fresh(store, PUB) is None
        assert await list_fresh(store, "") == []

    async def test_list_with_a_prefix_has_the_names_that_begin_so(self, store: Store) -> None:
        """Of the children those whose names begin with the prefix, the file or folder of just that name included."""
        for name in ("file", "file2", "file-folder/inside", "other", "File"):
            await self.raw_write(f"a/{name}", b"")
        assert names(await store.list("a", "file")) == ["file", "file-folder", "file2"]
        assert names(await store.list("a", "file2")) == ["file2"]
        assert await store.list("a", "none") == []

    # exists

    async def test_exists_knows_files_and_folders(self, store: Store) -> None:
        """A file and a folder are there; what only begins or goes on like one is not."""
        await self.raw_save()
        await self.raw_write(ENTRY, b"")
        for key in (SAVE, f"{SAVE}/rank", f"{SAVE}/model", "exec", ENTRY):
            assert await store.exists(key)
        for key in (f"{SAVE}0", SAVE[:-1], f"{SAVE}/mode", f"{SAVE}/model/x", "none/none", f"{ENTRY}A", RECORD):
            assert not await store.exists(key)

    async def test_what_was_deleted_does_not_exist(self, store: Store) -> None:
        """A deleted save is gone at once, whatever a listing of its folder shows."""
        await self.raw_save()
        await store.delete_tree(SAVE)
        assert not await store.exists(SAVE)

    # read and stream

    @pytest.mark.parametrize("size", [0, 1, MIB, MIB + 1, 3 * MIB + 5])
    async def test_read_and_stream_give_the_whole_content(self, store: Store, size: int) -> None:
        """Content of any size comes back whole; no piece is larger than 1 MiB."""
        content = (b"0123456789abcde" * (size // 15 + 1))[:size]
        await self.raw_write("a/file", content)
        assert await store.read("a/file", 4 * MIB) == content
        pieces = [piece async for piece in store.stream("a/file")]
        assert b"".join(pieces) == content
        assert all(len(piece) <= MIB for piece in pieces)

    async def test_read_goes_up_to_the_limit(self, store: Store) -> None:
        """Content of exactly the limit is read, one byte more is TooLarge."""
        await self.raw_write("a/file", b"12345")
        await self.raw_write("a/empty", b"")
        assert await store.read("a/file", 5) == b"12345"
        assert await store.read("a/empty", 0) == b""
        for limit in (0, 4):
            with pytest.raises(TooLarge):
                await store.read("a/file", limit)

    async def test_read_and_stream_of_what_is_missing_is_not_found(self, store: Store) -> None:
        """A missing file, in a folder or without one, is NotFound."""
        await self.raw_write("a/file", b"")
        for key in ("a/fil", "a/none", "none/file"):
            with pytest.raises(NotFound):
                await store.read(key, 10)
            with pytest.raises(NotFound):
                await anext(store.stream(key))

    async def test_read_and_stream_of_a_folder_is_not_a_file(self, store: Store) -> None:
        """A folder has no content."""
        await self._is_no_file(store, "a", "a/file")

    async def test_read_and_stream_of_a_link_is_not_a_file(self, store: Store) -> None:
        """A link is not followed, wherever it leads; a loop of links neither."""
        self._need(self.has_links)
        await self.raw_link("b/link", "a/file")
        await self._is_no_file(store, "b/link", "a/file")
        await self.raw_link("b/loop", "b/loop")
        await self._is_no_file(store, "b/loop", "a/file")

    async def _is_no_file(self, store: Store, key: str, file: str) -> None:
        expected = NotAFile if self.has_folders else (NotAFile, NotFound)
        await self.raw_write(file, b"content")
        with pytest.raises(expected):
            await store.read(key, 10)
        with pytest.raises(expected):
            await anext(store.stream(key))

    # create

    async def test_create_makes_an_empty_file_and_its_parents(self, store: Store) -> None:
        """What stands there afterwards is one empty file, and nothing else beside it."""
        for key in (ENTRY, "probe/a/b/c"):
            await store.create(key)
            folder, _, name = key.rpartition("/")
            assert await self.raw_names(folder) == {name}
            assert await self.raw_read(key) == b""

    async def test_create_of_pub_makes_prune_too(self, store: Store) -> None:
        """Whoever makes `pub/` makes `prune/`, so that a prune on a full disk finds it."""
        self._need(self.has_folders)
        await store.create(ENTRY)
        assert await self.raw_names("") == {PUB, PRUNE}

    async def test_create_leaves_what_stands_there(self, store: Store) -> None:
        """What is there already is not touched: AlreadyExists."""
        await self.raw_write(ENTRY, b"somebody's")
        with pytest.raises(AlreadyExists):
            await store.create(ENTRY)
        assert await self.raw_read(ENTRY) == b"somebody's"
        assert await self.raw_names(PUB) == {NAME}

    async def test_create_leaves_a_folder_that_stands_there(self, store: Store) -> None:
        """A folder under the key is no entry, and stays."""
        self._need(self.has_folders)
        await self.raw_write(f"{ENTRY}/inside", b"")
        with pytest.raises(NotAFile):
            await store.create(ENTRY)
        assert await self.raw_names(ENTRY) == {"inside"}

    async def test_create_leaves_a_link_that_stands_there(self, store: Store) -> None:
        """A link under the key is no entry, even one that leads nowhere: nothing is made at its end."""
        self._need(self.has_links)
        await self.raw_link(ENTRY, "elsewhere")
        with pytest.raises(NotAFile):
            await store.create(ENTRY)
        assert not await self.raw_exists("elsewhere")

    async def test_create_has_one_winner(self, store: Store) -> None:
        """Of all who create a key at once, `pub/` missing, exactly one succeeds and all others are told that it exists."""
        for step in range(10):
            key = f"{PUB}/{step}"
            results = await asyncio.gather(*(store.create(key) for _ in range(self.crowd)), return_exceptions=True)
            assert sum(result is None for result in results) == 1
            assert sum(isinstance(result, AlreadyExists) for result in results) == self.crowd - 1
        assert len(await self.raw_names(PUB)) == 10

    async def test_create_fails_where_a_parent_is_a_file(self, store: Store) -> None:
        """A parent that is a file stays one, and nothing of ours is there."""
        self._need(self.has_folders)
        await self.raw_write(PUB, b"a file")
        with pytest.raises(StoreError):
            await store.create(ENTRY)
        assert await self.raw_read(PUB) == b"a file"

    async def test_create_fails_where_a_parent_is_a_link(self, store: Store) -> None:
        """A link in the way is not followed."""
        self._need(self.has_links)
        await self.raw_write("elsewhere/file", b"")
        await self.raw_link(PUB, "elsewhere")
        with pytest.raises(Linked):
            await store.create(ENTRY)
        assert await self.raw_names("elsewhere") == {"file"}

    async def test_a_name_of_the_limit_fits_and_no_longer_one(self, store: Store) -> None:
        """`name_limit` is what `pub/` can hold; a longer name is an error that leaves nothing behind."""
        limit = await store.name_limit()
        await store.create(f"{PUB}/{'A' * limit}")
        with pytest.raises(StoreError):
            await store.create(f"{PUB}/{'B' * (limit + 1)}")
        assert await self.raw_names(PUB) == {"A" * limit}
        assert await store.name_limit() == limit

    # make_folder

    async def test_make_folder_stands_with_its_parents(self, store: Store) -> None:
        """Of all who make a folder at once nobody fails, and where there are folders it stands there, empty."""
        await asyncio.gather(*(store.make_folder("exec/1.4101.0") for _ in range(self.crowd)))
        assert await list_fresh(store, "exec/1.4101.0") == ([] if self.has_folders else None)

    async def test_make_folder_leaves_what_stands_there(self, store: Store) -> None:
        """A folder that holds something is left as it is."""
        await self.raw_save()
        await store.make_folder("exec/1.4101.0")
        assert await self.raw_is_whole()

    async def test_make_folder_fails_where_a_file_stands(self, store: Store) -> None:
        """A file is no folder, and stays, whether it stands at the end of the way or on it."""
        self._need(self.has_folders)
        await self.raw_write("exec/1.4101.0", b"a file")
        for folder in ("exec/1.4101.0", "exec/1.4101.0/below"):
            with pytest.raises(NotAFolder):
                await store.make_folder(folder)
        assert await self.raw_read("exec/1.4101.0") == b"a file"

    async def test_make_folder_goes_through_a_link(self, store: Store) -> None:
        """Executions may be kept elsewhere."""
        self._need(self.has_links)
        await self.raw_write("elsewhere/file", b"")
        await self.raw_link("exec", "elsewhere")
        await store.make_folder("exec/1.4101.0")
        assert await self.raw_names("elsewhere") == {"file", "1.4101.0"}

    # move

    async def test_move_withdraws_an_entry(self, store: Store) -> None:
        """The entry is gone and its record stands, also where `prune/` was not there yet."""
        await self.raw_write(ENTRY, b"")
        await store.move(ENTRY, RECORD)
        assert not await self.raw_exists(ENTRY)
        assert await self.raw_names(PRUNE) == {NAME}
        assert await self.raw_read(RECORD) == b""

    async def test_move_replaces_an_older_file(self, store: Store) -> None:
        """Where a killed prune left a record, the move succeeds all the same."""
        await self.raw_write(ENTRY, b"")
        await self.raw_write(RECORD, b"")
        await store.move(ENTRY, RECORD)
        assert (await self.raw_exists(ENTRY), await self.raw_names(PRUNE)) == (False, {NAME})

    async def test_move_of_what_is_missing_is_not_found(self, store: Store) -> None:
        """Nothing is made where there was nothing to move."""
        await self.raw_write(f"{PUB}/other", b"")
        with pytest.raises(NotFound):
            await store.move(ENTRY, RECORD)
        assert not await self.raw_exists(RECORD)
        assert await self.raw_names(PUB) == {"other"}

    async def test_move_by_many_at_once(self, store: Store) -> None:
        """Of many who move one entry at least one succeeds, the others may find nothing; the record stands."""
        for _ in range(5):
            await self.raw_write(ENTRY, b"")
            results = await asyncio.gather(*(store.move(ENTRY, RECORD) for _ in range(8)), return_exceptions=True)
            assert any(result is None for result in results)
            assert all(result is None or isinstance(result, NotFound) for result in results)
            assert (await self.raw_exists(ENTRY), await self.raw_exists(RECORD)) == (False, True)

    @pytest.mark.parametrize("yields", range(6))
    async def test_move_cut_short_never_leaves_neither(self, store: Store, yields: int) -> None:
        """However early or late the call is cancelled, the entry or else its record stands."""
        await self.raw_write(ENTRY, b"")
        task = asyncio.ensure_future(store.move(ENTRY, RECORD))
        for _ in range(yields):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert await self.raw_exists(ENTRY) or await self.raw_exists(RECORD)

    async def test_move_is_never_seen_as_neither(self, store: Store) -> None:
        """Who looks while entries move, at the records last, finds each of them in one place at least."""
        for number in range(20):
            await self.raw_write(f"{PUB}/{number}", b"")
        moves = asyncio.gather(*(store.move(f"{PUB}/{number}", f"{PRUNE}/{number}") for number in range(20)))
        while not moves.done():
            seen = await self.raw_names(PUB)
            assert len(seen | await self.raw_names(PRUNE)) == 20
            await asyncio.sleep(0)
        await moves

    # delete

    async def test_delete_removes_the_file_and_nothing_else(self, store: Store) -> None:
        """The file is gone; its siblings, those with a longer name included, stay."""
        for name in ("file", "file2", "file-3", "other"):
            await self.raw_write(f"a/{name}", b"x")
        await store.delete("a/file")
        assert await self.raw_names("a") == {"file2", "file-3", "other"}

    async def test_delete_of_what_is_missing_succeeds(self, store: Store) -> None:
        """What is not there is gone already, with or without its folder, or with a file in its place."""
        await self.raw_write("a/file", b"x")
        for key in ("a/none", "none/file", "none/none/file", "a/file/below"):
            await store.delete(key)
        assert await self.raw_read("a/file") == b"x"

    async def test_delete_leaves_a_folder(self, store: Store) -> None:
        """A folder is no file to delete, not even an empty one."""
        self._need(self.has_folders)
        await self.raw_write("a/folder/file", b"x")
        with pytest.raises(NotAFile):
            await store.delete("a/folder")
        await store.delete("a/folder/file")
        with pytest.raises(NotAFile):
            await store.delete("a/folder")
        assert await self.raw_names("a") == {"folder"}

    async def test_delete_removes_a_link_and_not_its_target(self, store: Store) -> None:
        """A link is deleted as a link."""
        self._need(self.has_links)
        await self.raw_write("a/file", b"x")
        await self.raw_link("b/link", "a/file")
        await store.delete("b/link")
        assert await self.raw_names("b") == set()
        assert await self.raw_read("a/file") == b"x"

    async def test_delete_follows_no_link_on_the_way(self, store: Store) -> None:
        """A key that leads through a link is refused: Linked, and what is behind it stays."""
        self._need(self.has_links)
        await self.raw_write("a/file", b"x")
        await self.raw_link("link", "a")
        with pytest.raises(Linked):
            await store.delete("link/file")
        assert await self.raw_read("a/file") == b"x"

    # delete_tree

    async def test_delete_tree_removes_all_of_a_save_and_nothing_else(self, store: Store) -> None:
        """The save is gone with all it holds; one whose name begins like it stays whole."""
        others = (f"{SAVE}0", f"{SAVE}-bak", f"{SAVE} (copy)", "exec/1.4101.1/checkpoint-5", "checkpoint-5")
        for key in (SAVE, *others):
            await self.raw_save(key)
        await store.delete_tree(SAVE)
        assert not await self.raw_exists(SAVE)
        for key in others:
            assert await self.raw_is_whole(key)

    async def test_delete_tree_of_what_is_missing_succeeds(self, store: Store) -> None:
        """What is not there is gone already, also where a file stands for its folder."""
        await self.raw_save(f"{SAVE}0")
        for key in (SAVE, "exec/none", "none/none", f"{SAVE}0/model/below"):
            await store.delete_tree(key)
        assert await self.raw_is_whole(f"{SAVE}0")

    async def test_delete_tree_removes_a_file(self, store: Store) -> None:
        """A save may be a single file; one beside it stays."""
        await self.raw_write("exec/1/model.ckpt", b"x")
        await self.raw_write("exec/1/model.ckpt2", b"x")
        await store.delete_tree("exec/1/model.ckpt")
        assert await self.raw_names("exec/1") == {"model.ckpt2"}

    async def test_delete_tree_removes_odd_names_and_more_than_a_thousand(self, store: Store) -> None:
        """Neither the characters of a name nor the number of files saves anything."""
        wanted = self.odd_names + (NAMES_NOT_UTF8 if self.names_are_bytes else ())
        for name in (*wanted, *map(str, range(1_100))):
            await self.raw_write(f"{SAVE}/{name}", b"")
        await store.delete_tree(SAVE)
        assert not await self.raw_exists(SAVE)

    async def test_delete_tree_removes_empty_folders(self, store: Store) -> None:
        """A folder that holds nothing goes too."""
        self._need(self.has_folders)
        await self.raw_write(f"{SAVE}/a/b/file", b"")
        await store.delete(f"{SAVE}/a/b/file")
        await store.delete_tree(SAVE)
        assert not await self.raw_exists(SAVE)

    async def test_delete_tree_removes_links_inside_as_links(self, store: Store) -> None:
        """What a link inside the save leads to, file or folder, stays."""
        self._need(self.has_links)
        await self.raw_save("kept")
        await self.raw_save()
        for name, target in (("file", "kept/model"), ("folder", "kept"), ("rank/up", "exec"), ("nothing", "none")):
            await self.raw_link(f"{SAVE}/{name}", target)
        await store.delete_tree(SAVE)
        assert not await self.raw_exists(SAVE)
        assert await self.raw_is_whole("kept")

    @pytest.mark.parametrize("link", ["exec", "exec/1.4101.0", SAVE])
    async def test_delete_tree_leaves_a_save_behind_a_link(self, store: Store, link: str) -> None:
        """A save reached through a link, or that is one, is left alone: Linked."""
        self._need(self.has_links)
        await self.raw_save(f"kept{SAVE[len(link) :]}")
        await self.raw_link(link, "kept")
        with pytest.raises(Linked):
            await store.delete_tree(SAVE)
        assert await self.raw_exists(link)
        assert await self.raw_is_whole(f"kept{SAVE[len(link) :]}")

    async def test_delete_tree_by_many_at_once(self, store: Store) -> None:
        """Deleting what somebody else deletes at the same time is no failure."""
        for number in range(60):
            await self.raw_write(f"{SAVE}/{number % 7}/{number}", b"")
        results = await asyncio.gather(*(store.delete_tree(SAVE) for _ in range(6)))
        assert results == [None] * 6
        assert not await self.raw_exists(SAVE)

    # sync, locate, aclose

    @pytest.mark.parametrize("key", [SAVE, f"{SAVE}/model", "exec"])
    @pytest.mark.parametrize("recursive", [True, False])
    async def test_sync_changes_nothing(self, store: Store, key: str, recursive: bool) -> None:
        """Making a save durable leaves it, and everything around it, as it is."""
        await self.raw_save()
        await store.sync(key, recursive=recursive)
        assert await self.raw_is_whole()
        assert await self.raw_names("") == {"exec"}

    async def test_locate_is_the_key_of_a_save(self, store: Store) -> None:
        """A save named in full has the key that was put behind the root."""
        await self.raw_save()
        assert await store.locate(f"{store.root}/{SAVE}") == SAVE

    async def test_locate_refuses_what_is_not_below_the_root(self, store: Store) -> None:
        """Neither the root itself nor a neighbour whose name begins like it has a key."""
        await self.raw_save()
        for save in (store.root, f"{store.root}2/{SAVE}", "/nowhere/checkpoint-5"):
            with pytest.raises(NotPublished):
                await store.locate(save)

    async def test_the_root_has_no_trailing_slash(self, store: Store) -> None:
        """`root/key` is what a person calls a key, so the root ends without a slash."""
        assert not store.root.endswith("/")

    async def test_aclose_ends_without_a_trace(self, store: Store) -> None:
        """Closing changes nothing in the store."""
        await self.raw_save()
        await store.aclose()
        assert await self.raw_is_whole()

    # Cancelling

    @pytest.mark.parametrize("operation", MUTATIONS)
    async def test_cancelled_before_it_began_changes_nothing(self, store: Store, operation: str) -> None:
        """A call that is cancelled before its first step leaves everything as it was."""
        await self.raw_save()
        await self.raw_write(f"{PUB}/old", b"")
        task = asyncio.ensure_future(MUTATIONS[operation](store))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await self.raw_is_whole()
        assert (await self.raw_names(PUB), await self.raw_names(PRUNE)) == ({"old"}, set())

    @staticmethod
    def _need(capability: bool) -> None:
        if not capability:
            pytest.skip("this store has no such thing")
