"""The units under a real systemd: when they are started, restarted, stopped, and what they may do."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from commands import ATTEMPT, EPOCH, Root, eventually, require
from hanging import hanging as hanging_when
from services.systemd import ROOTS, System, system

if TYPE_CHECKING:
    from collections.abc import Iterator

    from s3_roots import S3Root

UNITS = Path(__file__).parent.parent / "systemd"
SERVICES = sorted(path for path in UNITS.iterdir() if path.suffix == ".service")
FILES = sorted(path for path in UNITS.iterdir() if path.suffix in (".service", ".timer"))
PUBLISHD, ALICE = 4711, 4712


@pytest.fixture(scope="module")
def booted() -> Iterator[System]:
    with system() as running:
        running.install(*FILES)
        yield running


class Service:
    """One instance of the template for folders, with a root of its own that belongs to its account."""

    def __init__(self, booted: System, inside: str, *, user: int = PUBLISHD) -> None:
        self.booted, self.inside = booted, inside
        self.root = Root(Path(f"{booted.inside}{inside}")).make()
        subprocess.run(["chown", "-R", f"{user}:{user}", str(self.root.path)], check=True)
        self.instance = booted.call("systemd-escape", "--path", inside).stdout.strip()
        self.unit = f"publishd@{self.instance}.service"
        self._drop_ins = 0
        self.drop_in(f"User={user}")
        self.configure()

    def configure(self, flags: str = "-interval 200ms", *, epoch: str = str(EPOCH), attempt: str = ATTEMPT) -> None:
        variables = f"DISPATCH_ATTEMPT={attempt}\nDISPATCH_EPOCH={epoch}\nFRAMEWORK=hf\nFLAGS={flags}\nKEEP=2\n"
        self.booted.write(self.environment_file, variables)

    @property
    def environment_file(self) -> str:
        return f"/etc/publishd{self.inside}.env"

    def drop_in(self, *lines: str) -> None:
        self._drop_ins += 1
        self.booted.write(f"/run/units/{self.unit}.d/{self._drop_ins}.conf", "\n".join(["[Service]", *lines, ""]))
        self.booted.systemctl("daemon-reload")

    def start(self) -> None:
        self.booted.systemctl("start", self.unit)

    def stop(self) -> None:
        self.booted.systemctl("stop", self.unit)

    def show(self, name: str) -> str:
        return self.booted.show(self.unit, name)

    @property
    def restarts(self) -> int:
        return int(self.show("NRestarts"))

    @property
    def journal(self) -> str:
        return self.booted.journal(self.unit)

    def publishes(self, step: int, seconds: float = 30) -> None:
        """Make a save, and wait for its entry."""
        self.root.hf(step)
        eventually(lambda: step in self.root.steps, f"step {step} in {self.journal}", seconds)


@pytest.fixture
def service(booted: System, request: pytest.FixtureRequest) -> Iterator[Service]:
    """One whose root has a dash in its name, which its instance must escape."""
    made = Service(booted, f"{ROOTS}/{request.node.name}/fine-tune")
    yield made
    booted.call("systemctl", "kill", "--signal=KILL", made.unit)
    booted.call("systemctl", "stop", made.unit)


@pytest.fixture
def hanging(service: Service) -> Path:
    """The file that makes the store of a service hang for as long as it stands."""
    flag = f"{service.inside}.hang"
    variables = hanging_when(service.booted.roots / "hang.so", service.inside, flag) | {"LD_PRELOAD": f"{ROOTS}/hang.so"}
    service.drop_in(*(f"Environment={name}={value}" for name, value in variables.items()))
    return Path(f"{service.booted.inside}{flag}")


# The files


@pytest.mark.parametrize("unit", FILES, ids=lambda path: path.name)
def test_systemd_has_nothing_to_say_about_a_unit(unit: Path) -> None:
    """No directive is unknown or ignored: `verify` would say so, and nothing else."""
    require("systemd", None if shutil.which("systemd-analyze") else "systemd-analyze is not installed")
    ran = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@pytest.mark.parametrize("unit", SERVICES, ids=lambda path: path.name)
def test_a_unit_may_do_little(unit: Path) -> None:
    """Its exposure, as systemd reckons it, is at most 3.0 of 10."""
    require("systemd", None if shutil.which("systemd-analyze") else "systemd-analyze is not installed")
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=30", "--no-pager", str(unit)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


# A watch as a service


def test_start_waits_for_the_first_scan_and_the_status_tells_how_it_goes(service: Service) -> None:
    """`systemctl start` returns with the watch ready; then saves seen, published and pending, and the last one's age."""
    service.drop_in("WatchdogSec=4s")
    (service.root.execution / "checkpoint-9").mkdir()
    service.start()
    assert service.show("ActiveState") == "active"
    assert "watching: " in service.journal
    assert service.show("StatusText").startswith("1 saves seen, 0 published, 1 pending; no publication")
    service.publishes(5)
    eventually(lambda: "2 saves seen, 1 published, 1 pending; last publication " in service.show("StatusText"), seconds=30)
    service.stop()
    assert service.show("Result") == "success"
    assert service.journal.count("published: ") == 1


def test_start_goes_on_waiting_while_the_first_scan_hangs(service: Service, hanging: Path) -> None:
    """A store that does not answer is no service that is ready."""
    hanging.touch()
    service.booted.systemctl("start", "--no-block", service.unit)
    eventually(lambda: service.show("ActiveState") == "activating" and service.show("MainPID") != "0")
    began = time.monotonic()
    eventually(lambda: time.monotonic() - began > 3)
    assert service.show("ActiveState") == "activating"
    hanging.unlink()
    eventually(lambda: service.show("ActiveState") == "active")
    service.publishes(5)


def test_a_watch_whose_store_hangs_is_restarted_and_goes_on(service: Service, hanging: Path) -> None:
    """1. The store hangs for longer than WatchdogSec. 2. The watch is ended, and started anew. 3. The store answers again."""
    service.drop_in("WatchdogSec=2s", "RestartSec=200ms")
    service.start()
    service.publishes(5)
    hanging.touch()
    eventually(lambda: service.restarts >= 1, "a restart", 30)
    assert "Watchdog timeout" in service.journal
    hanging.unlink()
    service.publishes(6)
    eventually(lambda: service.show("ActiveState") == "active")
    assert service.root.steps == [5, 6]


def test_a_first_scan_that_never_ends_is_given_up_and_tried_again(service: Service, hanging: Path) -> None:
    """It does not wait for the store for ever, nor does it stay failed."""
    service.configure("-interval 200ms -drain 1s")
    service.drop_in("TimeoutStartSec=3s", "RestartSec=200ms")
    hanging.touch()
    service.booted.systemctl("start", "--no-block", service.unit)
    eventually(lambda: service.restarts >= 1, "a restart", 30)
    assert "start operation timed out" in service.journal
    hanging.unlink()
    service.publishes(5)
    eventually(lambda: service.show("ActiveState") == "active")


def outlives_its_watchdog(service: Service) -> None:
    """Wait until the watchdog was fed for more than twice its time, without a restart."""

    def fed() -> int:
        return int(service.show("WatchdogTimestampMonotonic"))

    first = fed()
    eventually(lambda: fed() - first > 5_000_000, "a fed watchdog", 30)
    assert service.restarts == 0
    assert service.show("ActiveState") == "active"


def test_a_watch_whose_scans_only_fail_is_not_restarted(service: Service) -> None:
    """A root that can't be read is said, and no reason to begin anew."""
    service.drop_in("WatchdogSec=2s")
    service.start()
    service.root.path.chmod(0)
    eventually(lambda: "cannot list" in service.show("StatusText"), seconds=30)
    outlives_its_watchdog(service)
    service.root.path.chmod(0o755)
    service.publishes(5)


def test_a_watch_that_scans_seldom_is_not_restarted(service: Service) -> None:
    """Between scans it is idle, not dead."""
    service.configure("-interval 1h")
    service.drop_in("WatchdogSec=2s")
    service.start()
    outlives_its_watchdog(service)


def test_a_long_drain_is_not_cut_off(service: Service, hanging: Path) -> None:
    """1. It is stopped while its store hangs. 2. TimeoutStopSec is over, -drain is not. 3. The store answers."""
    service.configure("-interval 1h -drain 60s")
    service.drop_in("TimeoutStopSec=2s", "WatchdogSec=2s")
    service.start()
    service.root.hf(5)
    hanging.touch()
    service.booted.systemctl("stop", "--no-block", service.unit)
    eventually(lambda: service.show("ActiveState") == "deactivating")
    began = time.monotonic()
    eventually(lambda: time.monotonic() - began > 5)
    assert service.show("ActiveState") == "deactivating", service.journal
    hanging.unlink()
    eventually(lambda: service.show("ActiveState") == "inactive")
    assert (service.show("Result"), service.root.steps) == ("success", [5])


def test_a_killed_watch_is_restarted_and_publishes_what_came_meanwhile(service: Service) -> None:
    """A kill -9 costs no save."""
    service.drop_in("RestartSec=1s")
    service.start()
    service.publishes(5)
    service.booted.systemctl("kill", "--kill-whom=main", "--signal=KILL", service.unit)
    service.publishes(6)
    assert service.restarts == 1


def test_bad_configuration_is_not_tried_again(service: Service) -> None:
    """A usage error is no more right the second time; the journal names the variable."""
    service.configure(epoch="soon")
    assert service.booted.call("systemctl", "start", service.unit).returncode != 0
    eventually(lambda: service.show("ActiveState") == "failed")
    assert (service.show("ExecMainStatus"), service.restarts) == ("2", 0)
    assert "bad variable: DISPATCH_EPOCH" in service.journal


def test_a_missing_environment_file_is_an_error(service: Service) -> None:
    """The journal tells why nothing was started."""
    os.unlink(f"{service.booted.inside}{service.environment_file}")
    assert service.booted.call("systemctl", "start", service.unit).returncode != 0
    assert "Failed to load environment files" in service.journal


def test_a_missing_root_is_an_error(service: Service) -> None:
    """The journal names it; nothing is started that could only write elsewhere."""
    shutil.rmtree(service.root.path)
    assert service.booted.call("systemctl", "start", service.unit).returncode != 0
    assert f"{service.inside}: No such file or directory" in service.journal
    assert not service.root.path.exists()


def test_one_that_always_fails_is_given_up(service: Service) -> None:
    """Four times within five minutes, and it stays failed."""
    service.configure(attempt="x" * 200)
    service.drop_in("RestartSec=100ms")
    service.booted.call("systemctl", "start", service.unit)
    eventually(lambda: service.show("ActiveState") == "failed" and service.restarts == 4, seconds=30)
    assert "Start request repeated too quickly" in service.journal
    assert service.journal.count("publishd watch: cannot watch") == 4


def test_it_writes_below_its_root_and_nowhere_else(service: Service) -> None:
    """Not into a folder that everybody may write into."""
    other = service.root.path.with_name("everybodys")
    other.mkdir()
    other.chmod(0o777)
    below = Path(service.inside)
    tries = (f"! touch {below.with_name('everybodys')}/x", f"touch {below}/x")
    service.drop_in(*(f"ExecStartPre=/bin/sh -c '{what}'" for what in tries))
    service.start()
    service.publishes(5)
    assert list(other.iterdir()) == []


def runs_without_privileges(booted: System, unit: str) -> None:
    """Assert that the kernel holds its process to a filter of calls, no capability, no new privileges, and no core."""
    process = booted.show(unit, "MainPID")
    lines = booted.call("cat", f"/proc/{process}/status", f"/proc/{process}/limits").stdout.splitlines()
    facts = [line.split() for line in lines]
    for wanted in (["Seccomp:", "2"], ["CapBnd:", "0" * 16], ["NoNewPrivs:", "1"]):
        assert wanted in facts
    assert ["Max", "core", "file", "size", "0", "0", "bytes"] in facts


def test_it_runs_without_privileges(service: Service) -> None:
    """What the unit says is so: some kernels and containers ignore it."""
    service.start()
    runs_without_privileges(service.booted, service.unit)


@pytest.mark.parametrize("path", ["/home/team/root", f"{ROOTS}/the team-a/fine-tüne 100% _.x"], ids=["home", "name"])
def test_a_root_may_be_anywhere_and_have_any_name(booted: System, path: str) -> None:
    """In a home, which is read-only else; with blanks, dashes and letters that systemd must escape."""
    service = Service(booted, path)
    service.start()
    service.publishes(5)
    service.stop()
    assert service.show("Result") == "success"


def test_the_example_of_an_environment_file_is_enough(service: Service) -> None:
    """It starts a watch as it is, of the attempt and the epoch it names."""
    root = Root(service.root.path, attempt="4101.0")
    root.hf(5)
    subprocess.run(["chown", "-R", f"{PUBLISHD}:{PUBLISHD}", str(root.path)], check=True)
    service.booted.write(service.environment_file, (UNITS / "publishd.env.example").read_text())
    service.start()
    eventually(lambda: root.pub, f"an entry, {service.journal}")
    assert root.pub[0].startswith("00000000004101000000-00000000000000000005-")


def test_a_marker_that_a_child_must_decode_is_decoded(service: Service) -> None:
    """What a watch may not do does not keep it from anything that it must."""
    service.start()
    save = service.root.execution / "checkpoint-5"
    save.mkdir()
    (save / "trainer_state.json").write_text(f'{{"log_history": ["{"x" * (65 << 20)}"], "global_step": 5}}')
    eventually(lambda: service.root.steps == [5], f"step 5 in {service.journal}", 30)


def test_the_account_is_chosen_by_a_drop_in(booted: System) -> None:
    """What it makes belongs to whoever trains, and all may read it who may read the root."""
    alices = Service(booted, f"{ROOTS}/alices", user=ALICE)
    alices.start()
    alices.publishes(5)
    made = (alices.root.path / "pub").stat()
    assert (made.st_uid, made.st_mode & 0o777) == (ALICE, 0o755)
    alices.stop()
    assert alices.show("Result") == "success"


def test_without_a_drop_in_it_is_the_account_publishd(service: Service) -> None:
    """One that has no rights but those it is given."""
    shutil.rmtree(f"{service.booted.inside}/run/units/{service.unit}.d")
    service.booted.systemctl("daemon-reload")
    service.start()
    service.publishes(5)
    assert (service.root.path / "pub").stat().st_uid == PUBLISHD


# Pruning by a timer


def test_the_timer_s_service_prunes(service: Service) -> None:
    """Down to KEEP; the timer has a next time."""
    for step in range(1, 6):
        service.root.publish(service.root.hf(step), step)
    subprocess.run(["chown", "-R", f"{PUBLISHD}:{PUBLISHD}", str(service.root.path)], check=True)
    unit = f"publishd-prune@{service.instance}"
    service.booted.systemctl("start", f"{unit}.service")
    assert service.root.steps == [4, 5]
    assert service.booted.journal(f"{unit}.service").count(f"{service.inside}/exec/{ATTEMPT}/checkpoint-") == 3
    service.booted.systemctl("start", f"{unit}.timer")
    assert service.booted.show(f"{unit}.timer", "NextElapseUSecRealtime")
    service.booted.systemctl("stop", f"{unit}.timer")


# An S3 root


def test_a_passing_account_watches_an_s3_root_with_keys_that_only_it_can_read(booted: System, s3: S3Root) -> None:
    """DynamicUser and LoadCredential: the keys are in no environment, no journal, and no file that others could read."""
    key, secret = s3.environ["AWS_ACCESS_KEY_ID"], s3.environ["AWS_SECRET_ACCESS_KEY"]
    booted.write("/etc/publishd/s3.credentials", f"[default]\naws_access_key_id={key}\naws_secret_access_key={secret}\n", 0o600)
    flags = " ".join(["-interval", "200ms", *(flag for flag in s3.flags if flag not in ("-creds", "env"))])
    variables = f"CHECKPOINT={s3.path}\nDISPATCH_ATTEMPT={ATTEMPT}\nDISPATCH_EPOCH={EPOCH}\nFRAMEWORK=hf\nFLAGS={flags}\n"
    booted.write("/etc/publishd/s3.env", variables)
    unit = "publishd-s3@s3.service"
    booted.systemctl("start", unit)
    s3.hf(5)
    eventually(lambda: s3.steps == [5], f"step 5 in {booted.journal(unit)}", 60)
    runs_without_privileges(booted, unit)
    process = booted.show(unit, "MainPID")
    status = booted.call("cat", f"/proc/{process}/status").stdout
    user = next(line.split()[1] for line in status.splitlines() if line.startswith("Uid:"))
    assert 61184 <= int(user) <= 65519  # systemd's range for accounts that exist for a while
    credential = f"/run/credentials/{unit}/s3"
    assert secret in booted.call("cat", credential).stdout
    assert booted.call("setpriv", f"--reuid={ALICE}", "--clear-groups", "cat", credential).returncode != 0
    assert secret not in booted.call("sh", "-c", f"tr '\\0' '\\n' </proc/{process}/environ").stdout
    booted.systemctl("stop", unit)
    assert booted.show(unit, "Result") == "success"
    assert secret not in booted.journal(unit)
    assert booted.journal(unit).count("published: ") == 1
