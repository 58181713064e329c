"""The commands on s3:// roots as their users run them: on a real SeaweedFS, on moto's server, and on a small S3 that counts."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from commands import ATTEMPT, EPOCH
from publishd.credentials import parse_source
from publishd.publications import Announced, Publication, publish
from publishd.stores.s3 import Access, S3Settings, open_s3
from s3_roots import S3Root, SmallRoot, at_once, started
from services.places import REGION
from services.scripted import Answer, error

if TYPE_CHECKING:
    from pathlib import Path

    from services.moto import Moto
    from services.seaweed import SeaweedFS


# Answers


@pytest.mark.parametrize("creds", ["env", "file:{}", "file:{}?profile=training"])
def test_every_command_in_turn(s3: S3Root, tmp_path: Path, creds: str) -> None:
    """What each command prints, from an empty prefix on, with keys in the environment and with keys in a file."""
    keys, profile = s3.place.service.keys, "training" if "profile" in creds else "default"
    file = tmp_path / "credentials"
    file.write_text(f"[{profile}]\naws_access_key_id = {keys.access_key}\naws_secret_access_key = {keys.secret_key}\n")
    s3.flags[s3.flags.index("env")] = creds.format(file)
    s3.environ = s3.environ if creds == "env" else {}
    saves = [f"{s3.path}/{s3.hf(step)}" for step in (500, 9000, 10000)]

    s3.unchanged_by("resolve").succeeded(b"")
    s3.unchanged_by("list").succeeded(b"")
    for save, step in zip(saves, ("500", "9000", "10000"), strict=True):
        s3.run("publish", save, step).succeeded(b"")
    lines = [f"{EPOCH}\t{step}\texec/{ATTEMPT}/checkpoint-{step}\tpresent\n" for step in (500, 9000, 10000)]
    s3.unchanged_by("list").succeeded("".join(lines).encode())
    s3.unchanged_by("resolve").succeeded(f"{saves[2]}\n".encode())
    s3.unchanged_by("prune", "-keep", "1", "-dry-run").succeeded(f"{saves[0]}\n{saves[1]}\n".encode())
    s3.run("prune", "-keep", "1").succeeded(f"{saves[0]}\n{saves[1]}\n".encode())
    assert (s3.steps, s3.records, s3.saves) == ([10000], [], {"checkpoint-10000"})
    s3.unchanged_by("resolve", "-verify").succeeded(f"{saves[2]}\n".encode())


def test_json_has_one_object_per_publication(s3: S3Root) -> None:
    """resolve, list and prune print the same fields; nothing to answer is no line."""
    for arguments in (["resolve"], ["list"], ["prune", "-keep", "1"]):
        s3.run(*arguments, "-json").succeeded(b"")
    s3.published(500, 600)
    s3.publish("exec/1.4101.0/gone", 550)
    saves = {step: f"exec/{ATTEMPT}/checkpoint-{step}" for step in (500, 600)} | {550: f"exec/{ATTEMPT}/gone"}

    def line(step: int, *, present: bool) -> dict[str, Any]:
        save = f"{s3.path}/{saves[step]}"
        return {"epoch": EPOCH, "step": step, "path": saves[step], "save": save, "present": present}

    assert s3.run("resolve", "-json").json == [line(600, present=True)]
    assert s3.run("list", "-json").json == [line(500, present=True), line(550, present=False), line(600, present=True)]
    assert s3.run("prune", "-keep", "1", "-json", "-dry-run").json == [line(500, present=True), line(550, present=False)]
    assert s3.run("prune", "-keep", "1", "-json").json == [line(500, present=False), line(550, present=False)]


def test_resolve_names_a_save_that_is_gone(s3: S3Root) -> None:
    """Rule 8: the latest publication's save is gone, so there is no answer; -verify goes on to the one before."""
    s3.published(500)
    s3.publish(f"{s3.execution}/checkpoint-600", 600)
    s3.unchanged_by("resolve").failed(f"{s3.path}/exec/1.4101.0/checkpoint-600", "it is gone", "-verify")
    ran = s3.unchanged_by("resolve", "-verify").succeeded(f"{s3.path}/exec/1.4101.0/checkpoint-500\n".encode())
    ran.said_one_line("passed over", "checkpoint-600", "gone")


def test_resolve_names_a_save_that_is_torn(s3: S3Root) -> None:
    """Rule 8: Trainer's sign in the latest save stops resolve; -verify names it and each one whose marker is not right."""
    s3.published(400, 500, 600, 700)
    s3.place.put(f"{s3.execution}/checkpoint-700/checkpoint-is-incomplete.txt")
    s3.place.put(f"{s3.execution}/checkpoint-600/trainer_state.json", b'{"global_step": 60')
    s3.place.delete(f"{s3.execution}/checkpoint-500/trainer_state.json")
    s3.unchanged_by("resolve").failed("checkpoint-700", "checkpoint-is-incomplete.txt", "-verify")
    ran = s3.unchanged_by("resolve", "-verify").succeeded(f"{s3.path}/exec/1.4101.0/checkpoint-400\n".encode())
    assert [line.split(": ")[2].rpartition("-")[2] for line in ran.err.splitlines()] == ["700", "600", "500"]
    s3.place.delete(f"{s3.execution}/checkpoint-400/trainer_state.json")
    assert (ran := s3.unchanged_by("resolve", "-verify")).code == 1
    assert ran.out == b""
    assert "no publication's save is there and complete" in ran.err.splitlines()[-1]


@pytest.mark.parametrize("stray", ["pub/notes.txt", "pub/folder/x", "pub/%0A", "pub/a/"])
def test_a_stray_object_among_the_entries_stops_what_relies_on_them(mass: S3Root, stray: str) -> None:
    """Rule 7: it is named, never skipped, and nothing is deleted."""
    mass.published(500, 600)
    mass.place.put(stray)
    before = mass.place.keys()
    commands = [["resolve"], ["resolve", "-verify"], ["list"], ["prune", "-keep", "1"], ["prune", "-keep", "1", "-dry-run"]]
    for ran in at_once([started(mass, *command) for command in (commands if "notes" in stray else commands[:1])]):
        ran.failed("not a publication", f"{mass.path}/pub/{stray.split('/')[1]}")
    assert mass.place.keys() == before


def test_the_folders_own_objects_are_no_entries(mass: S3Root) -> None:
    """Rule 7: consoles and mounts make the objects `pub/`, `prune/` and `exec/…/`; they are folders and nothing else."""
    mass.published(500, 600)
    for folder in ("", "pub/", "prune/", "exec/", f"exec/{ATTEMPT}/"):
        mass.place.put(folder)
    for arguments in (["resolve"], ["resolve", "-verify"]):
        mass.unchanged_by(*arguments).succeeded(f"{mass.path}/exec/1.4101.0/checkpoint-600\n".encode())
    assert len(mass.unchanged_by("list").succeeded().out.splitlines()) == 2
    mass.run("prune", "-keep", "1").succeeded()
    assert (mass.steps, mass.records, mass.saves) == ([600], [], {"checkpoint-600"})


def test_an_entry_with_content_is_judged_by_its_name(mass: S3Root) -> None:
    """B40: framing that another store kept as content makes an entry no less an entry."""
    name = mass.publish(mass.hf(500), 500)
    mass.place.put(f"pub/{name}", b"0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n")
    assert mass.resolved() == f"exec/{ATTEMPT}/checkpoint-500"


# Empty, missing


def test_b69_an_empty_prefix_is_nothing_yet(s3: S3Root) -> None:
    """A first run has nothing to resume from; looking makes nothing."""
    for arguments in (["resolve"], ["resolve", "-verify"], ["list"], ["prune", "-keep", "3"]):
        s3.unchanged_by(*arguments).succeeded(b"")
    assert s3.place.keys() == []


@pytest.mark.parametrize("service", ["seaweed", "moto"])
def test_b69_a_missing_bucket_is_an_error(request: pytest.FixtureRequest, service: str) -> None:
    """Rule 6: nothing can be read of a bucket that is not there, and no command makes it."""
    root = S3Root(request.getfixturevalue(service).place()._replace(bucket="no-such-bucket"))
    arguments = (["resolve"], ["list"], ["prune", "-keep", "1"], ["publish", "exec/1.4101.0/checkpoint-5", "5"])
    for ran in at_once([started(root, *command) for command in arguments]):
        ran.failed("no such bucket", "no-such-bucket")


def test_b44_the_whole_bucket_may_be_the_root(moto: Moto) -> None:
    """`s3://b` and `s3://b/` are one root, and answers have no doubled slash."""
    bucket = moto.new_bucket()
    root = S3Root(moto.place(bucket))
    moto.put(bucket, "exec/1.4101.0/checkpoint-5/trainer_state.json", b'{"global_step": 5}')
    for written, save in (
        (f"s3://{bucket}", "exec/1.4101.0/checkpoint-5"),
        (f"s3://{bucket}/", f"s3://{bucket}/exec/1.4101.0/x"),
    ):
        root.path = written
        moto.put(bucket, "exec/1.4101.0/x", b"")
        root.run("publish", save, str(5 + len(written) - len(bucket) - 5)).succeeded(b"")
        root.run("resolve").succeeded(f"s3://{bucket}/{save.removeprefix(f's3://{bucket}/')}\n".encode())
    root.run("prune", "-keep", "1").succeeded(f"s3://{bucket}/exec/1.4101.0/checkpoint-5\n".encode())
    assert [
        key for key in moto.request("GET", f"/{bucket}", {"list-type": "2"}).split(b"<Key>")[1:] if b"checkpoint" in key
    ] == []


def test_b44_a_trailing_slash_is_the_same_root(s3: S3Root) -> None:
    """Published with a slash at the end, resolved and pruned with and without."""
    saves = [s3.hf(5), s3.hf(6)]
    plain, s3.path = s3.path, f"{s3.path}/"
    for save, step in zip(saves, "56", strict=True):
        s3.run("publish", f"{s3.path}{save}/", step).succeeded(b"")
    for s3.path in (plain, f"{plain}/"):
        s3.run("resolve").succeeded(f"{plain}/{saves[1]}\n".encode())
    s3.run("prune", "-keep", "1").succeeded(f"{plain}/{saves[0]}\n".encode())
    assert {key.split("/")[0] for key in s3.place.keys("")} == {"exec", "pub"}


# Publishing


def test_publishing_twice_is_success_and_touches_nothing(s3: S3Root) -> None:
    """Rule 1: stderr says which of the two it was."""
    save = s3.hf(500)
    s3.run("publish", save, "500").succeeded(b"").said_one_line("published", f"{s3.path}/{save}", "epoch 1000000, step 500")
    assert s3.pub == [Publication(EPOCH, 500, save).name]
    s3.unchanged_by("publish", save, "500").succeeded(b"").said_one_line("already exists", "nothing to do")


@pytest.mark.parametrize(
    ("save", "said"),
    [
        ("exec/1.4101.0/checkpoint-6", "there is no such save"),
        ("exec/1.4101.0/checkpoint-50", "there is no such save"),
        ("{}2/exec/1.4101.0/checkpoint-5", "does not lie below"),
        ("s3://elsewhere/exec/1.4101.0/checkpoint-5", "does not lie below"),
        ("/exec/1.4101.0/checkpoint-5", "does not lie below"),
        ("s3://KEY:S3CRET@bucket/exec/1.4101.0/checkpoint-5", "cannot publish: SAVE: it does not lie below"),
        ("{}", "does not lie below"),
        ("{}/", "does not lie below"),
        ("{}//exec/1.4101.0/checkpoint-5", "does not lie below"),
        ("exec//1.4101.0/checkpoint-5", "component"),
        ("exec/1.4101.0/./checkpoint-5", "component"),
        ("../exec/1.4101.0/checkpoint-5", "component"),
        ("exec/1.4101.0/checkpoint-5//", "component"),
        ("exec/1.4101.0", "execution's folder"),
        ("pub/x", "publishd's own"),
        ("exec/1.4101.0/a\nb", "a\\x0ab: it has a control character"),
        (b"exec/1.4101.0/caf\xe9", "not UTF-8"),
        ("x" * 134, "134 bytes, and names on this store can carry 133"),
    ],
)
def test_a_save_that_may_not_be_published_is_refused(small: SmallRoot, save: Any, said: str) -> None:
    """SAVE must exist and lie below the root; nothing is written, and a bad name is not even asked for."""
    small.hf(5)
    save = save.format(small.path) if isinstance(save, str) else save
    small.unchanged_by("publish", save, "5").failed(said)
    assert bool(small.server.requests) == ("no such save" in said)


def test_a_save_may_be_named_in_any_way(small: SmallRoot) -> None:
    """Absolute, relative to the root, with a slash at the end: one save, one entry; wherever the command stands."""
    save = small.hf(5)
    for written in (save, f"{save}/", f"{small.path}/{save}", f"{small.path}/{save}/"):
        small.run("publish", written, "5", cwd="/").succeeded(b"")
    assert small.pub == [Publication(EPOCH, 5, save).name]


def test_a_save_may_be_an_object(s3: S3Root) -> None:
    """A save that is one object is published, resolved and pruned, and what only begins with its name stays."""
    s3.place.put("exec/1.4101.0/model.pt", b"all of it")
    s3.place.put("exec/1.4101.0/model.pt.old", b"not this")
    s3.run("publish", "exec/1.4101.0/model.pt", "5").succeeded()
    assert s3.resolved() == "exec/1.4101.0/model.pt"
    s3.published(6)
    s3.run("prune", "-keep", "1").succeeded(f"{s3.path}/exec/1.4101.0/model.pt\n".encode())
    assert s3.saves == {"checkpoint-6", "model.pt.old"}


@pytest.mark.parametrize(
    ("save", "recorded"),
    [("checkpoint-5", "checkpoint-5"), ("checkpoint-5", "checkpoint-5/inner"), ("checkpoint-5/inner", "checkpoint-5")],
)
def test_a_save_that_a_prune_is_removing_is_not_published(small: SmallRoot, save: str, recorded: str) -> None:
    """Rule 12: a record of the save, of something inside it or around it refuses it."""
    small.place.put(f"{small.hf(5)}/inner/x")
    small.place.put(f"prune/{Publication(EPOCH, 4, f'{small.execution}/{recorded}').name}")
    small.unchanged_by("publish", f"{small.execution}/{save}", "5").failed("a prune is removing it", "record")


def test_b40_an_entry_is_put_without_a_body(small: SmallRoot) -> None:
    """Nothing but an empty, conditional PUT: no framing, no checksum trailer, no `Expect`."""
    small.run("publish", small.hf(5), "5").succeeded()
    (put,) = small.server.seen("PUT")
    assert put.body == b""
    assert (put.headers["Content-Length"], put.headers["If-None-Match"]) == ("0", "*")
    odd = {"transfer-encoding", "content-encoding", "expect", "x-amz-trailer", "x-amz-sdk-checksum-algorithm"}
    assert odd.isdisjoint(name.lower() for name in put.headers)


# Pruning


def test_prune_deletes_markers_first_and_everything_below(small: SmallRoot) -> None:
    """Rule 12: record, entry, markers, the rest with all folder objects, record; what only looks alike stays."""
    small.published(5, 6)
    save = f"{small.execution}/checkpoint-5"
    for name in ("", "a/", "a/b/", "a/b/c", "optimizer.pt", "zz"):
        small.place.put(f"{save}/{name}")
    for alike in ("checkpoint-50/x", "checkpoint-5.bak", "checkpoint-5-merged/x"):
        small.place.put(f"{small.execution}/{alike}")
    small.run("prune", "-keep", "1").succeeded(f"{small.path}/{save}\n".encode())
    entry = Publication(EPOCH, 5, save)
    deleted = [said.removeprefix("DELETE ") for said in small.ordered() if said.startswith("DELETE ")]
    inside = {f"{save}/{name}" for name in ("", "a/", "a/b/", "a/b/c", "optimizer.pt", "zz", "model.safetensors")}
    assert deleted[:2] == [entry.key, f"{save}/trainer_state.json"]
    assert (set(deleted[2:-1]), deleted[-1]) == (inside, entry.record)
    assert small.saves == {"checkpoint-6", "checkpoint-50", "checkpoint-5.bak", "checkpoint-5-merged"}
    assert (small.steps, small.records) == ([6], [])


def test_b36_a_save_of_2300_objects_goes_whole(small: S3Root) -> None:
    """Three pages of objects are deleted, singly and many at once, and nothing else."""
    small.published(5, 6)
    for number in range(2300):
        small.place.put(f"{small.execution}/checkpoint-5/shard-{number:05d}")
    small.run("prune", "-keep", "1").succeeded(f"{small.path}/{small.execution}/checkpoint-5\n".encode())
    assert [key.rpartition("/")[2] for key in small.place.keys("exec/")] == ["model.safetensors", "trainer_state.json"]
    assert (small.steps, small.records) == ([6], [])


@pytest.mark.parametrize("service", ["seaweed", "moto"])
def test_b37_in_a_versioned_bucket_a_delete_marker_is_gone(request: pytest.FixtureRequest, service: str) -> None:
    """What versions lie below is the bucket's affair: the save is gone, and may be published anew."""
    server = request.getfixturevalue(service)
    root = S3Root(server.place(server.new_bucket(versioned=True))).published(5, 6)
    root.run("prune", "-keep", "1").succeeded(f"{root.path}/{root.execution}/checkpoint-5\n".encode())
    assert (root.steps, root.records, root.saves) == ([6], [], {"checkpoint-6"})
    root.run("publish", root.hf(5), "5").succeeded().said_one_line("published")
    assert root.steps == [5, 6]


def test_b37_a_key_that_may_not_be_deleted_is_named_and_the_rest_goes(seaweed: SeaweedFS) -> None:
    """Rule 12: a policy holds one object; the other saves go, and the next prune finishes when the policy is lifted."""
    bucket = seaweed.new_bucket()
    root = S3Root(seaweed.place(bucket)).published(3, 4, 5, 6)
    held = f"{root.execution}/checkpoint-4/model.safetensors"
    resource = f"arn:aws:s3:::{bucket}/{root.place.prefix}/{held}"
    statement = {"Effect": "Deny", "Principal": "*", "Action": "s3:DeleteObject", "Resource": resource}
    policy = {"Version": "2012-10-17", "Statement": [statement]}
    seaweed.request("PUT", f"/{bucket}", {"policy": ""}, json.dumps(policy).encode())
    ran = root.run("prune", "-keep", "1")
    saves = [f"{root.path}/{root.execution}/checkpoint-{step}\n" for step in (3, 4, 5)]
    assert (ran.code, ran.out.decode()) == (1, saves[0] + saves[2])
    ran.said_one_line("cannot delete", f"{root.path}/{held}", "denies")
    assert root.place.keys("exec/") == [
        held,
        *(f"{root.execution}/checkpoint-6/{name}" for name in ("model.safetensors", "trainer_state.json")),
    ]
    assert (root.steps, root.records) == ([6], [Publication(EPOCH, 4, f"{root.execution}/checkpoint-4").name])
    seaweed.request("DELETE", f"/{bucket}", {"policy": ""})
    root.run("prune", "-keep", "1").succeeded(saves[1].encode())
    assert (root.saves, root.records) == ({"checkpoint-6"}, [])


def test_b37_each_refused_key_is_named(small: SmallRoot) -> None:
    """Of several keys of one save that are refused, one error names them all; the latest is as it was."""
    small.published(4, 5, 6)
    for name in ("locked-1", "locked-2"):
        small.place.put(f"{small.execution}/checkpoint-4/{name}")
    small.server.script("DELETE", "*/locked-*", [error(403, "AccessDenied")] * 2)
    ran = small.run("prune", "-keep", "1")
    assert (ran.code, ran.out.decode()) == (1, f"{small.path}/{small.execution}/checkpoint-5\n")
    ran.said_one_line("locked-1", "locked-2", "denies")
    assert [key.rpartition("/")[2] for key in small.place.keys(f"{small.execution}/checkpoint-4")] == ["locked-1", "locked-2"]
    small.run("prune", "-keep", "1").succeeded()
    assert (small.saves, small.records) == ({"checkpoint-6"}, [])


def test_b34_a_save_inside_or_around_a_kept_one_stays(mass: S3Root) -> None:
    """Rule 10: only what no remaining publication needs goes; what was never published is not touched."""
    inner, outer = f"{mass.execution}/run/checkpoint-5", f"{mass.execution}/run"
    for key in (f"{inner}/x", f"{outer}/y", f"{mass.execution}/other/checkpoint-1/z", f"{mass.execution}/unpublished/w"):
        mass.place.put(key)
    mass.publish(outer, 1)  # around a kept one
    mass.publish(f"{mass.execution}/other/checkpoint-1", 2)
    mass.publish(f"{mass.execution}/other", 3)
    mass.publish(inner, 4)
    ran = mass.run("prune", "-keep", "2").succeeded(b"")
    assert ran.err.count("a remaining publication needs it") == 2
    assert mass.steps == [3, 4]
    assert mass.place.names(f"{mass.execution}/other") == {"checkpoint-1"}
    mass.run("prune", "-keep", "1").succeeded(f"{mass.path}/{mass.execution}/other\n".encode())
    assert mass.saves == {"run", "unpublished"}


def test_a_publication_whose_save_is_gone_does_not_count(mass: S3Root) -> None:
    """Rule 10: it is named on stderr, and its entry goes with the victims."""
    mass.published(4, 5, 7)
    mass.publish(f"{mass.execution}/checkpoint-6", 6)
    ran = mass.run("prune", "-keep", "2").succeeded()
    assert ran.out.decode() == f"{mass.path}/{mass.execution}/checkpoint-4\n"
    assert "not counted" in ran.err
    assert mass.steps == [5, 6, 7]


def test_what_a_killed_prune_left_is_finished(mass: S3Root) -> None:
    """Rule 12: a record without its entry, a record beside its entry, and junk among the records."""
    mass.published(6, 7)
    mass.place.put(f"prune/{Publication(EPOCH, 4, mass.hf(4)).name}")
    mass.publish(mass.hf(5), 5)
    mass.place.put(f"prune/{Publication(EPOCH, 5, f'{mass.execution}/checkpoint-5').name}")
    mass.place.put("prune/notes.txt")
    ran = mass.run("prune", "-keep", "2").succeeded()
    assert "prune/notes.txt" in ran.err
    assert (mass.steps, mass.saves, mass.records) == ([6, 7], {"checkpoint-6", "checkpoint-7"}, ["notes.txt"])


# Noise


def test_b18_nothing_else_comes_on_stdout(small: SmallRoot) -> None:
    """Debugging variables and an answer that had to be asked for again change no byte of the answer."""
    small.published(5)
    noise = {"PYTHONWARNINGS": "always", "PYTHONASYNCIODEBUG": "1", "PYTHONDEVMODE": "1", "BOTO_DEBUG": "1", "AWS_DEBUG": "1"}
    save = f"{small.path}/exec/1.4101.0/checkpoint-5\n".encode()
    for arguments in (["resolve"], ["resolve", "-verify"]):
        small.server.queue += [Answer(503), error(503, "SlowDown")]
        ran = small.run(*arguments, env=small.env(**noise)).succeeded(save)
        assert small.server.keys.secret_key not in ran.err
    assert not small.server.queue
    small.run("list", env=small.env(**noise)).succeeded()


# Many at once


def test_five_processes_publish_one_save(s3: S3Root) -> None:
    """Rule 1: of five at once exactly one creates the entry, and all exit 0; round after round."""
    for step in (5, 6, 7):
        save = s3.hf(step)
        ran = at_once([started(s3, "publish", save, str(step)) for _ in range(5)])
        said = sorted(each.succeeded(b"").said_one_line().err.split(": ")[1] for each in ran)
        assert said == ["it already exists, nothing to do"] * 4 + ["published"]
    assert s3.steps == [5, 6, 7]


async def test_fifty_tasks_publish_one_save(mass: S3Root) -> None:
    """Rule 1: of fifty at once exactly one creates the entry; round after round."""
    service = mass.place.service
    access = Access(parse_source("env"), mass.environ, S3Settings(endpoint=service.endpoint, region=REGION))
    stores = [open_s3(mass.path, access) for _ in range(5)]
    for step in (5, 6, 7):
        publication = Publication(EPOCH, step, mass.hf(step))
        announced = await asyncio.gather(*(publish(store, publication) for store in stores for _ in range(10)))
        assert announced.count(Announced.CREATED) == 1
        assert announced.count(Announced.EXISTED) == 49
    for store in stores:
        await store.aclose()
    assert mass.steps == [5, 6, 7]


@pytest.mark.parametrize("service", ["seaweed", "moto"])
def test_b31_three_prunes_at_once(request: pytest.FixtureRequest, service: str) -> None:
    """Rule 13: all exit 0; the latest remain whole, and nothing else of what was published."""
    root = S3Root(request.getfixturevalue(service).place()).published(*range(1, 21))
    ran = at_once([started(root, "prune", "-keep", "3") for _ in range(3)])
    saves = {line for each in ran for line in each.succeeded().out.decode().splitlines()}
    assert {save.removeprefix(f"{root.path}/exec/1.4101.0/checkpoint-") for save in saves} <= {str(step) for step in range(1, 18)}
    assert (root.steps, root.records) == ([18, 19, 20], [])
    assert root.saves == {"checkpoint-18", "checkpoint-19", "checkpoint-20"}


# How much is asked: exact numbers, on a server that counts


@pytest.mark.parametrize(("count", "pages"), [(0, 1), (1, 1), (999, 1), (1000, 1), (1001, 2), (2500, 3)])
def test_b36_resolve_asks_for_the_pages_of_pub_and_twice_more(small: SmallRoot, count: int, pages: int) -> None:
    """The latest is on the last page; its save costs one request, and a Trainer save's sign another; nothing makes two."""
    for step in range(1, count + 1):
        small.publish(f"{small.execution}/checkpoint-{step}", step)
    if count:
        small.hf(count)
    answer = f"{small.path}/{small.execution}/checkpoint-{count}\n".encode() if count else b""
    small.run("resolve").succeeded(answer)
    save = f"{small.execution}/checkpoint-{count}"
    looks = [f"LIST {save}/", f"LIST {save}/checkpoint-is-incomplete.txt"] if count else ["LIST pub", "LIST prune/"]
    assert small.ordered() == ["LIST pub/"] * pages + looks


def test_resolve_of_a_save_of_2300_objects_asks_no_more(small: SmallRoot) -> None:
    """How much lies in the save doesn't matter."""
    small.published(5)
    for number in range(2300):
        small.place.put(f"{small.execution}/checkpoint-5/shard-{number:05d}")
    small.run("resolve").succeeded()
    assert len(small.server.requests) == 3


def test_publishing_by_hand_asks_for(small: SmallRoot) -> None:
    """The save, the records, Trainer's sign; then the entry; then what rule 5 wants seen again: the records and the save."""
    save = small.hf(5)
    before = [f"LIST {save}/", "LIST prune/", f"LIST {save}/checkpoint-is-incomplete.txt"]
    entry = Publication(EPOCH, 5, save).key
    small.run("publish", save, "5").succeeded()
    assert small.ordered() == [*before, f"PUT {entry}", "LIST prune/", f"LIST {save}/"]
    small.run("publish", save, "5").succeeded()
    assert small.ordered(since=6) == [*before, f"PUT {entry}"]


def test_pruning_asks_for(small: SmallRoot) -> None:
    """The saves are listed once, each that stays is asked for; per victim nine and one for each object; entries three times."""
    small.published(5, 6)
    small.run("prune", "-keep", "1").succeeded()
    save, kept = (f"{small.execution}/checkpoint-{step}" for step in (5, 6))
    victim = Publication(EPOCH, 5, save)
    assert small.ordered() == [
        *("LIST pub/", "LIST prune/"),
        *(f"LIST {small.execution}/checkpoint-", f"LIST {kept}/"),
        *(f"LIST {victim.key}", f"PUT {victim.record}", f"DELETE {victim.key}"),
        *("LIST pub/", "LIST prune/"),
        *(f"LIST {victim.record}", f"LIST {save}", f"LIST {save}/"),
        *(f"DELETE {save}/trainer_state.json", f"DELETE {save}/model.safetensors"),
        *(f"LIST {save}", f"LIST {victim.record}"),
        "LIST pub/",
        f"DELETE {victim.record}",
    ]


def test_b36_2500_publications_are_pruned_to_the_latest(small: SmallRoot) -> None:
    """The oldest go, with their saves, and the three pages of the others stay."""
    small.published(*range(1, 2501))
    ran = small.run("prune", "-keep", "2490").succeeded()
    assert ran.out.decode().splitlines() == [f"{small.path}/{small.execution}/checkpoint-{step}" for step in range(1, 11)]
    assert (small.steps, small.records) == (list(range(11, 2501)), [])
    assert small.saves == {f"checkpoint-{step}" for step in range(11, 2501)}
