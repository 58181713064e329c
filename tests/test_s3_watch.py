"""The watch on s3:// roots as a process of its own: on a real SeaweedFS, on moto's server, and on a small S3 that counts."""

from __future__ import annotations

import re
import signal
import threading
import time
from itertools import pairwise, repeat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from commands import EPOCH, Watch, eventually
from publishd.publications import Publication
from s3_roots import S3Root, SmallRoot, ended, started
from services.scripted import Answer, Fate, ScriptedS3, error

if TYPE_CHECKING:
    from services.exchanges import Behaviour, Request
    from services.seaweed import SeaweedFS


class Switch:
    """A step of a script that can be turned on and off while it runs: what the store does while it is on."""

    def __init__(self, server: ScriptedS3, what: Answer | Fate, method: str = "*", key: str = "*") -> None:
        self.on = threading.Event()
        self._what = what
        server.script(method, key, self)

    def __iter__(self) -> Switch:
        return self

    def __next__(self) -> Switch:
        return self

    def __call__(self, request: Request, behave: Behaviour) -> Answer | Fate:
        return self._what if self.on.is_set() else behave(request)


# Publishing


@pytest.mark.parametrize("framework", ["hf", "dcp"])
def test_a_save_is_published_when_its_marker_has_come(s3: S3Root, framework: str) -> None:
    """Not while only its shards are there; then at the next scan, and resolve names it."""
    save, marker = {"hf": ("checkpoint-7", "trainer_state.json"), "dcp": ("step-7", ".metadata")}[framework]
    with Watch(s3, framework) as watch:
        watch.watching()
        s3.place.put(f"{s3.execution}/{save}/shard", b"weights")
        watch.scanned()
        assert 7 not in s3.steps
        s3.place.put(f"{s3.execution}/{save}/{marker}", b'{"global_step": 7}')
        watch.says(f"published: {s3.path}/{s3.execution}/{save}: epoch 1000000, step 7")
        assert s3.pub[-1] == Publication(EPOCH, 7, f"{s3.execution}/{save}").name
        assert s3.resolved() == f"{s3.execution}/{save}"
        watch.stop().succeeded(b"")


def test_b66_an_upload_in_parts_is_there_once_it_is_completed(s3: S3Root) -> None:
    """A marker whose parts have all been sent is no marker until the store was told that they are."""
    s3.place.put(f"{s3.execution}/checkpoint-7/model.safetensors", b"weights")
    key = f"/{s3.place.bucket}/{s3.place.prefix}/{s3.execution}/checkpoint-7/trainer_state.json"
    request = s3.place.service.request
    upload = {"uploadId": _text("UploadId", request("POST", key, {"uploads": ""}))}
    request("PUT", key, {"partNumber": "1", **upload}, b'{"global_step": 7}')
    with Watch(s3) as watch:
        watch.scanned()
        assert s3.steps == [1]
        part = f"<Part><PartNumber>1</PartNumber><ETag>{_text('ETag', request('GET', key, upload))}</ETag></Part>"
        request("POST", key, upload, f"<CompleteMultipartUpload>{part}</CompleteMultipartUpload>".encode())
        watch.says("checkpoint-7: epoch 1000000, step 7")
        watch.stop().succeeded()


def _text(element: str, answer: bytes) -> str:
    """The text of an element of a document, as it stands there."""
    return answer.decode().partition(f"<{element}>")[2].partition(f"</{element}>")[0]


def test_b03_a_marker_is_read_again_until_it_is_right(s3: S3Root) -> None:
    """Whatever is wrong with it is said once; rewritten in the same size, it is published."""
    save = s3.hf(48, 84)
    with Watch(s3) as watch:
        watch.says("checkpoint-48: trainer_state.json says global_step 84")
        watch.scanned().scanned()
        assert watch.log.count("global_step 84") == 1
        s3.place.put(f"{save}/trainer_state.json", b'{"global_step": 4')
        watch.says("does not decode")
        s3.place.put(f"{save}/trainer_state.json", b'{"global_step": 48}')
        watch.says("checkpoint-48: epoch 1000000, step 48")
        watch.stop().succeeded()


def test_what_is_no_save_is_not_published(s3: S3Root) -> None:
    """B06, B14: look-alikes, an object where a folder is wanted, and other executions' saves."""
    for folder in ("checkpoint-0500", "checkpoint-500-bak", "tmp-checkpoint-500", "Checkpoint-500", "run-0/checkpoint-500"):
        s3.hf(500, folder=folder)
    s3.place.put(f"{s3.execution}/checkpoint-600")
    s3.place.put(f"{s3.execution}/")
    s3.place.hf(700, attempt="1.4101.1")
    s3.place.hf(800, attempt="1.4101.00")
    s3.hf(400)
    s3.run("watch", "-framework", "hf", "-once").succeeded()
    assert s3.steps == [400]


def test_a_sign_of_the_trainer_keeps_a_save_back(s3: S3Root) -> None:
    """While `checkpoint-is-incomplete.txt` stands in it, a save is not published though its marker is right."""
    save = s3.hf(5)
    s3.place.put(f"{save}/checkpoint-is-incomplete.txt")
    with Watch(s3) as watch:
        watch.says("checkpoint-is-incomplete.txt stands in it")
        assert s3.steps == []
        s3.place.delete(f"{save}/checkpoint-is-incomplete.txt")
        watch.says("checkpoint-5: epoch 1000000, step 5")
        watch.stop().succeeded()


def test_a_save_published_by_hand_at_another_step_is_published(s3: S3Root) -> None:
    """Rule 14: a publication at whatever step settles it, made before the watch or beside it."""
    s3.publish(s3.hf(5), 4)
    with Watch(s3) as watch:
        watch.watching()
        s3.place.put(f"{s3.execution}/checkpoint-7/model.safetensors")
        s3.run("publish", f"{s3.execution}/checkpoint-7", "6").succeeded()
        s3.hf(7)
        watch.scanned().scanned()
        watch.stop().succeeded()
    assert s3.steps == [1, 2, 4, 6]


def test_a_save_that_a_prune_has_recorded_is_not_published(s3: S3Root) -> None:
    """Rule 12: until the record is gone."""
    record = f"prune/{Publication(EPOCH, 5, s3.hf(5)).name}"
    s3.place.put(record)
    with Watch(s3) as watch:
        watch.says("a prune is removing it")
        watch.scanned()
        assert 5 not in s3.steps
        s3.place.delete(record)
        watch.says("checkpoint-5: epoch 1000000, step 5")
        watch.stop().succeeded()


@pytest.mark.parametrize("stray", ["pub/notes.txt", "pub/folder/x", "prune/junk"])
def test_rule_7_a_stray_object_costs_no_save(s3: S3Root, stray: str) -> None:
    """A watch says what doesn't belong among the entries, and goes on."""
    s3.place.put(stray)
    s3.hf(5)
    ran = s3.run("watch", "-framework", "hf", "-once").succeeded()
    assert (f"{s3.path}/{stray.rpartition('/x')[0] or stray}" in ran.err) == stray.startswith("pub/")
    assert Publication(EPOCH, 5, f"{s3.execution}/checkpoint-5").name in s3.pub


def test_keep_prunes_after_publishing(s3: S3Root) -> None:
    """Only the latest and their saves stay, at every end, too."""
    s3.published(1, 2, 3)
    with Watch(s3, "hf", "-keep", "2") as watch:
        watch.watching()
        s3.hf(4)
        watch.says("pruned: ", times=2)
        s3.hf(5)
        watch.stop().succeeded()
    assert (s3.steps, s3.saves, s3.records) == ([4, 5], {"checkpoint-4", "checkpoint-5"}, [])


@pytest.mark.parametrize(
    ("epoch", "said"), [(EPOCH + 1, "epoch 1000001 has published"), (EPOCH - 1, "published as epoch 999999")]
)
def test_rule_18_another_epoch_is_said(s3: S3Root, epoch: int, said: str) -> None:
    """A greater epoch in `pub/`, or this attempt's saves under another; those count as settled."""
    path = "exec/1.4101.1/checkpoint-5" if epoch > EPOCH else s3.hf(5)
    s3.publish(path, 5, epoch)
    s3.hf(6)
    ran = s3.run("watch", "-framework", "hf", "-once").succeeded()
    assert ran.err.count("WRONG EPOCH?") == 1
    assert said in ran.err
    assert sorted(s3.steps) == [5, 6]


def test_rule_3_a_path_too_long_is_said_and_named_at_the_end(small: SmallRoot) -> None:
    """An attempt none of whose saves could fit ends the watch at once; a single save that doesn't is said once."""
    ran = small.run("watch", "-framework", "hf", "-attempt", "a" * 130)
    ran.failed("cannot watch", "133")
    assert not small.place.keys()


# The end


def test_rule_16_what_is_complete_is_published_before_the_exit(s3: S3Root) -> None:
    """The wait is cut short: a scan that was an hour away finds what came since; what is incomplete is left."""
    with Watch(s3, interval="1h") as watch:
        watch.watching()
        s3.hf(5)
        s3.place.put(f"{s3.execution}/checkpoint-6/model.safetensors")
        ran = watch.stop(signal.SIGTERM).succeeded(b"")
        assert "left as it is" in ran.err
    assert s3.steps == [5]


def test_b52_two_hundred_saves_are_published_newest_first(small: SmallRoot) -> None:
    """SIGTERM comes when none of them was seen yet; the newest go first, and all within the drain."""
    with Watch(small, interval="1h") as watch:
        watch.watching()
        for step in range(1, 201):
            small.hf(step)
        began = time.monotonic()
        watch.stop().succeeded()
        seconds = time.monotonic() - began
    print(f"200 saves: {seconds:.2f} s, {len(small.server.requests)} requests")
    puts = [int(request.key.split("-")[1]) for request in small.server.seen("PUT")]
    assert sorted(puts) == list(range(1, 201))
    assert all(abs(step - expected) < 32 for step, expected in zip(puts, range(200, 0, -1), strict=True)), puts
    assert seconds < 20


def test_rule_16_a_store_that_is_down_to_the_end_is_a_failure_in_time(small: SmallRoot) -> None:
    """What is complete and could not be published is named, exit 1, soon after the drain."""
    small.hf(5)
    down = Switch(small.server, Fate.SILENCE, "PUT")
    down.on.set()
    with Watch(small, "hf", "-drain", "2s") as watch:
        eventually(lambda: small.server.seen("PUT"), "an attempt to publish")
        began = time.monotonic()
        ran = watch.stop()
        assert time.monotonic() - began < 12
    assert ran.code == 1
    assert "time ran out after 2 s" in ran.err
    assert f"not published: {small.path}/{small.execution}/checkpoint-5" in ran.err
    assert "Traceback" not in ran.err


def test_rule_16_the_drain_tries_again_until_the_store_is_back(small: SmallRoot) -> None:
    """A store that refuses at the last scan and comes back within the drain costs nothing."""
    down = Switch(small.server, error(503, "SlowDown"))
    with Watch(small, interval="1h") as watch:
        watch.watching()
        small.hf(5)
        down.on.set()
        watch.send(signal.SIGTERM)
        since = len(small.server.requests)
        eventually(lambda: len(small.server.requests) > since + 1, "requests in vain")
        down.on.clear()
        watch.ended().succeeded()
    assert small.steps == [5]


# Trouble


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (error(403, "AccessDenied"), "denies access"),
        (error(404, "NoSuchBucket"), "no such bucket"),
        (Answer(200, b"<html><body>log in</body></html>"), "no complete listing"),
        (Answer(302, headers={"Location": "http://login.example/"}), "redirect"),
    ],
)
def test_rule_15_trouble_is_said_once_and_the_watch_goes_on(small: SmallRoot, trouble: Answer, said: str) -> None:
    """Whatever the store answers; when it is over, that is said, too, and nothing is lost."""
    with Watch(small) as watch:
        watch.scanned().says("step 1")
        switch = Switch(small.server, trouble)
        switch.on.set()
        watch.says(said)
        small.hf(7)
        since = len(small.server.requests)
        eventually(lambda: len(small.server.requests) > since + 3, "more scans")
        assert watch.log.count(said) == 1
        switch.on.clear()
        watch.says("can be seen again").says("step 7")
        watch.stop().succeeded()


def test_rule_15_from_the_first_scan_on(small: SmallRoot) -> None:
    """A bucket that is made only after the watch was started."""
    switch = Switch(small.server, error(404, "NoSuchBucket"))
    switch.on.set()
    small.hf(5)
    with Watch(small) as watch:
        watch.says("no such bucket")
        switch.on.clear()
        watch.says("step 5")
        watch.stop().succeeded()


def test_rule_15_a_store_that_drops_every_connection(small: SmallRoot) -> None:
    """It is asked again with growing waits, and once it is back the watch works on."""
    with Watch(small) as watch:
        watch.watching()
        switch = Switch(small.server, Fate.DROP)
        switch.on.set()
        since = len(small.server.requests)
        eventually(lambda: len(small.server.requests) > since + 4, "attempts", 30)
        switch.on.clear()
        small.hf(5)
        watch.says("step 5", seconds=40)
        watch.stop().succeeded()
    times = [request.time for request in small.server.requests[since : since + 5]]
    waits = [after - before for before, after in pairwise(times)]
    assert waits[0] < waits[-1]


def test_wrong_keys_are_said_and_asked_with_again_at_every_scan_only(seaweed: SeaweedFS) -> None:
    """Rule 15 holds for them, too: somebody may mend them."""
    root = S3Root(seaweed.place(), identity=seaweed.wrong_secret)
    with Watch(root, "hf", "-drain", "1s") as watch:
        watch.says("signature")
        ran = watch.stop()
    assert (ran.code, ran.out) == (1, b"")
    assert "Traceback" not in ran.err
    assert seaweed.wrong_secret.secret_key not in ran.err


# Beside others


def test_b31_prunes_beside_a_watch(s3: S3Root) -> None:
    """Rule 13: every prune exits 0, every save is published, and the latest stand whole at the end."""
    with Watch(s3) as watch:
        watch.watching()
        for step in range(1, 13):
            s3.hf(step)
            if step % 3 == 0:
                ended(started(s3, "prune", "-keep", "2")).succeeded()
        watch.says("step 12")
        watch.stop().succeeded()
    s3.run("prune", "-keep", "2").succeeded()
    assert (s3.steps, s3.records) == ([11, 12], [])
    s3.run("resolve", "-verify").succeeded(f"{s3.path}/{s3.execution}/checkpoint-12\n".encode())


def test_three_watches_of_one_execution(s3: S3Root) -> None:
    """Rule 1: one entry for each save, and all exit 0."""
    with Watch(s3) as one, Watch(s3) as two, Watch(s3) as three:
        for watch in (one, two, three):
            watch.watching()
        for step in (5, 6, 7):
            s3.hf(step)
        eventually(lambda: s3.steps == [5, 6, 7], "all three")
        for watch in (one, two, three):
            assert "not published" not in watch.stop().succeeded().err
    assert s3.steps == [5, 6, 7]


# How much is asked: exact numbers, on a server that counts


def scans(root: SmallRoot, count: int) -> list[list[str]]:
    """The requests of the next whole scans, each of which begins with the listing of the execution's folder."""
    first = f"LIST {root.execution}/"
    since = len(root.server.requests)

    def begun() -> list[int]:
        return [since + number for number, said in enumerate(root.ordered(since=since)) if said == first]

    found = eventually(lambda: len(begun()) > count and begun(), f"{count} scans")
    every = root.ordered()
    return [every[start:end] for start, end in pairwise(found)][:count]


def test_rule_14_a_settled_scan_is_one_listing(small: SmallRoot) -> None:
    """However many saves are settled; nothing of them is asked."""
    small.published(*range(1, 21))
    with Watch(small) as watch:
        watch.scanned()
        assert scans(small, 5) == [[f"LIST {small.execution}/"]] * 5
        watch.stop().succeeded()


def test_rule_14_a_settled_scan_is_the_pages_of_one_listing(small: SmallRoot) -> None:
    """2,500 settled saves are three pages."""
    small.published(*range(1, 2501))
    with Watch(small) as watch:
        watch.watching()
        eventually(lambda: len(small.server.requests) > 30, "scans")
        watch.stop().succeeded()
    said = small.ordered()
    assert said[:5] == ["LIST pub/"] * 3 + ["LIST prune/", f"LIST {small.execution}/"]
    assert set(said[5:30]) == {f"LIST {small.execution}/"}


@pytest.mark.parametrize("framework", ["hf", "dcp"])
def test_an_incomplete_save_costs_one_request_at_each_scan(small: SmallRoot, framework: str) -> None:
    """A GET of the marker that has to be read, or a listing of the one that has to be there."""
    save = f"{small.execution}/{'checkpoint' if framework == 'hf' else 'step'}-7"
    small.place.put(f"{save}/weights")
    asked = f"GET {save}/trainer_state.json" if framework == "hf" else f"LIST {save}/.metadata"
    with Watch(small, framework, interval="500ms") as watch:
        watch.watching()
        assert scans(small, 2) == [[f"LIST {small.execution}/", asked]] * 2
        watch.stop().succeeded()


def test_b59_a_missing_marker_that_is_denied_costs_one_listing_more(small: SmallRoot) -> None:
    """Where the store denies what is not there, a listing tells whether it is."""
    marker = f"{small.execution}/checkpoint-7/trainer_state.json"
    small.place.put(f"{small.execution}/checkpoint-7/weights")

    def denied(request: Request, behave: Behaviour) -> Answer:
        return behave(request) if "list-type" in request.query else error(403, "AccessDenied")

    small.server.script("GET", "trainer_state.json", repeat(denied))
    with Watch(small, interval="500ms") as watch:
        watch.watching()
        assert scans(small, 2) == [[f"LIST {small.execution}/", f"GET {marker}", f"LIST {marker}"]] * 2
        watch.stop().succeeded()


@pytest.mark.parametrize(("count", "pages"), [(1, 1), (1000, 1), (1001, 2)])
def test_publishing_one_save_costs_six_requests_and_the_pages_of_pub_beyond_one(small: SmallRoot, count: int, pages: int) -> None:
    """The marker and Trainer's sign; whether it is published; the entry; and what rule 5 wants seen again."""
    for step in range(count):
        small.publish(f"exec/1.4100.0/checkpoint-{step}", step)
    save = small.hf(5000)
    small.run("watch", "-framework", "hf", "-once").succeeded()
    begin = [*["LIST pub/"] * pages, "LIST prune/", f"LIST {small.execution}/"]
    judged = [f"GET {save}/trainer_state.json", *["LIST pub/"] * pages, f"LIST {save}/checkpoint-is-incomplete.txt"]
    assert small.ordered() == [*begin, *judged, f"PUT pub/{small.pub[-1]}", "LIST prune/", f"LIST {save}/trainer_state.json"]


def test_publishing_one_dcp_save_costs_five_requests(small: SmallRoot) -> None:
    """As above, and there is no sign to look for."""
    small.publish("exec/1.4100.0/checkpoint-1", 1)
    save = small.dcp(5)
    small.run("watch", "-framework", "dcp", "-once").succeeded()
    begin = ["LIST pub/", "LIST prune/", f"LIST {small.execution}/"]
    assert small.ordered() == [
        *begin,
        *(f"LIST {save}/.metadata", "LIST pub/", f"PUT pub/{small.pub[-1]}", "LIST prune/", f"LIST {save}/.metadata"),
    ]


def test_publishing_many_saves_of_one_scan_costs_four_requests_each(small: SmallRoot) -> None:
    """GET, two listings and a PUT; and once for all what is published and, up to 32 of them, what is withdrawn."""
    small.publish("exec/1.4100.0/checkpoint-1", 1)
    saves = [small.hf(step) for step in range(1, 21)]
    small.run("watch", "-framework", "hf", "-once").succeeded()
    each = ("GET {}/trainer_state.json", "LIST {}/checkpoint-is-incomplete.txt", "LIST {}/trainer_state.json")
    expected = ["LIST pub/", "LIST prune/", f"LIST {small.execution}/", "LIST pub/", "LIST prune/"]
    expected += [said.format(save) for save in saves for said in each] + [f"PUT pub/{name}" for name in small.pub[1:]]
    assert sorted(small.ordered()) == sorted(expected)


# A save that changes under the watch's hands


def test_a_marker_that_goes_before_the_create_is_missed(small: SmallRoot) -> None:
    """While the listing of pub/ is tried again, training takes the marker away: there is no entry until it comes back."""
    with Watch(small, interval="300ms") as watch:
        watch.watching()
        save = small.hf(5)
        small.server.script("GET", "pub/", [error(503, "SlowDown")] * 4)
        eventually(lambda: small.server.seen("GET", "*/trainer_state.json"), "a look at the marker")
        small.place.delete(f"{save}/trainer_state.json")
        small.place.put(f"{small.execution}/checkpoint-4/trainer_state.json", b'{"global_step": 4}')
        eventually(lambda: 4 in small.steps, "another publication")
        assert small.steps == [4]
        small.hf(5)
        watch.says("published: ", times=2).stop().succeeded()
    assert small.steps == [4, 5]


def test_a_marker_that_goes_with_the_create_takes_the_entry_along(small: SmallRoot) -> None:
    """Rule 5: the second look asks for the marker, not only for some object of the save."""
    save = small.hf(5)

    def taken(request: Request, behave: Behaviour) -> Answer:
        small.place.delete(f"{save}/trainer_state.json")
        return behave(request)

    small.server.script("PUT", "pub/*", [taken])
    small.run("watch", "-framework", "hf", "-once").succeeded()
    assert small.steps == []


def test_second_looks_that_fail_hold_nobody_up_and_are_said_once(small: SmallRoot) -> None:
    """While prune/ can't be listed every complete save gets its entry, and the log gets one line."""
    with Watch(small, "hf", "-drain", "5s", interval="1h") as watch:
        watch.watching()
        for step in range(60):
            small.hf(step)
        small.server.script("GET", "prune/", repeat(error(403, "AccessDenied")))
        ran = watch.stop()
    assert (ran.code, len(small.steps)) == (1, 60)
    assert ran.err.count("(trying again at every scan)") == 1
    assert ran.err.count("could not be looked at again") == 60


def test_a_prune_whose_deletes_hang_takes_no_turn_from_publishing(small: SmallRoot) -> None:
    """`-keep` never delays a publication."""
    save = small.hf(1)
    for shard in range(80):
        small.place.put(f"{save}/shard-{shard}")
    small.publish(save, 1)
    with Watch(small, "hf", "-keep", "1", "-drain", "3s", interval="200ms") as watch:
        watch.watching()
        small.server.script("DELETE", "*/shard-*", repeat(Fate.SILENCE))
        small.hf(2)
        eventually(lambda: len(small.server.seen("DELETE", "*/shard-*")) > 20, "a prune")
        small.hf(3)
        eventually(lambda: 3 in small.steps, "a publication", 5)


# Resident


def resident(watch: Watch) -> float:
    """Resident memory in MB."""
    status = Path(f"/proc/{watch.process.pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1000


def test_memory_does_not_grow(small: SmallRoot) -> None:
    """After 500 scans it is what S3's libraries take, and 500 scans later no more."""
    small.published(*range(1, 101))
    small.place.put(f"{small.execution}/checkpoint-700/model.safetensors")
    with Watch(small, interval="1ms") as watch:
        watch.watching()
        eventually(lambda: len(small.server.requests) > 1_000, "500 scans", 60)
        early = resident(watch)
        eventually(lambda: len(small.server.requests) > 2_000, "1,000 scans", 60)
        late = resident(watch)
        watch.stop().succeeded()
    print(f"resident: {early:.1f} MB after 500 scans, {late:.1f} MB after 1,000")
    assert early < 90
    assert late - early < 1
