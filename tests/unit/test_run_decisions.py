"""Roster, restarts, environment, devices: the launcher's decisions as values."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from signal import SIGINT, SIGTERM, SIGUSR1
from unittest import mock

import pytest

from allranks.core.errors import StartError
from allranks.core.job import RankExit
from allranks.run import devices, network, roster
from allranks.run.endings import story_of_lost
from allranks.run.environment import Place, command_of, of_rank
from allranks.run.local import shown_as
from allranks.run.options import Options, parse
from allranks.run.preempt import ScheduledStop
from allranks.run.restarts import Failure, decide, failure_of
from allranks.run.roster import Hello
from allranks.run.signals import Requests
from allranks.run.story import Story

HUB = Hello("a", 2, "2", 0, "job", 2, 2, versions={"torch": "2.13.0"})
OTHER = replace(HUB, host="b", node_rank=1)
PLACE = Place(
    job_id="j",
    restart=1,
    node_rank=1,
    num_nodes=2,
    first_rank=2,
    local_world_size=2,
    world_size=4,
    master_addr="10.0.0.1",
    master_port=4242,
    run_dir=Path("/r"),
    node_dir=Path("/dev/shm/allranks-j"),
    interface="eth1",
)


@pytest.mark.parametrize(
    ("new", "code"),
    [
        (OTHER, None),
        (replace(OTHER, node_rank=0), "AR311"),
        (replace(OTHER, job="x"), "AR312"),
        (replace(OTHER, max_nodes=3), "AR313"),
        (replace(OTHER, nproc=4, nproc_asked="4"), "AR313"),
        (replace(OTHER, nproc=4, nproc_asked="auto"), None),
        (replace(OTHER, wire=99), "AR318"),
    ],
)
def test_refusal_then_it_names_what_differs(new: Hello, code: str | None) -> None:
    error = roster.refusal(new, HUB, [HUB], "a:29500")
    assert (error.code if error else None) == code
    if error:
        assert "b" in error.what
        assert error.fix


def test_seats_when_numbered_then_by_number_and_ranks_follow() -> None:
    third = replace(HUB, host="0", node_rank=2)
    found = roster.seats([HUB, third, replace(OTHER, nproc=3)])
    assert [(s.hello.host, s.node_rank, s.first_rank) for s in found] == [
        ("a", 0, 0),
        ("b", 1, 2),
        ("0", 2, 5),
    ]


def test_seats_when_not_numbered_then_hub_first_and_the_order_before_is_kept() -> None:
    hub, b, c = (replace(HUB, host=h, node_rank=None) for h in ("z", "b", "c"))
    assert [s.hello.host for s in roster.seats([hub, c, b])] == ["z", "b", "c"]
    assert [s.hello.host for s in roster.seats([hub, b, c], ["c", "z"])] == ["c", "z", "b"]


def test_attendance_when_a_numbered_node_is_missing_then_it_and_its_ranks_are_named() -> None:
    options = parse(["--nnodes", "2", "--node-rank", "0", "--nproc", "2", "x.py"], {})
    said = roster.attendance([HUB], options, 12.0, "a:29500")
    assert "node 1 (rank 2 and rank 3)" in said
    assert "1 of 2 nodes are here" in said
    assert "12 s" in said


def test_version_differences_then_one_sentence_with_hosts() -> None:
    said = roster.version_differences([HUB, replace(OTHER, versions={"torch": "2.6.0"})])
    assert said == ["AR318 torch differs between the nodes: 2.13.0 on a; 2.6.0 on b"]


def test_decide_when_none_are_allowed_then_silence() -> None:
    assert decide([Failure(True, "E at a:1")], 0).said == ""


def test_decide_when_the_machines_fail_then_back_off_doubles_and_is_capped() -> None:
    waits = [decide([Failure(False)] * n, 100).wait_s for n in range(1, 8)]
    assert waits == [1, 2, 4, 8, 16, 30, 30]


def test_decide_when_the_training_got_further_then_the_back_off_begins_anew() -> None:
    steps = [None, None, 20, 20, 40, 30, 30, 90]
    failures = [Failure(False, "", step) for step in steps]
    waits = [decide(failures[: n + 1], 100).wait_s for n in range(len(steps))]
    assert waits == [1, 2, 1, 2, 1, 2, 4, 1]


def test_decide_when_the_same_exception_comes_back_then_it_stops_and_says_so() -> None:
    same = [Failure(True, "E at a:1", 7), Failure(True, "E at a:1", 7)]
    assert not decide(same, 5).restart
    assert decide(same, 5).code == "AR044"
    assert decide([same[0], Failure(True, "E at a:1", 9)], 5).restart  # the training got further
    assert decide([same[0], Failure(False), same[1]], 5).restart  # not in a row


NOON = datetime.fromisoformat("2026-11-29T12:00:00")  # local, as squeue prints it


@pytest.mark.parametrize(
    ("env", "squeue", "found"),
    [
        ({"SLURM_JOB_END_TIME": "5000"}, "exit 1", 4400.0),
        (
            {"SLURM_JOB_ID": "7"},
            f"echo {NOON.isoformat()}",
            NOON.timestamp() - 600,
        ),  # Slurm 22.05 does not tell the job
        ({"SLURM_JOB_ID": "7"}, "echo NONE", None),
        ({"SLURM_JOB_ID": "7"}, "exit 1", None),
        ({}, f"echo {NOON.isoformat()}", None),
    ],
)
def test_stop_before_then_so_long_before_the_end_or_it_is_said_that_none_is_known(
    tmp_path: Path, env: dict[str, str], squeue: str, found: float | None
) -> None:
    (tmp_path / "squeue").write_text(f"#!/bin/sh\n{squeue}\n")
    (tmp_path / "squeue").chmod(0o755)
    env = {**env, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said: list[str] = []
    options = parse(["--stop-before", "10m", "train.py"], {})
    stop = ScheduledStop(options, env, said.append)
    deadline = time.monotonic() + 30
    while stop.is_asking and time.monotonic() < deadline:
        assert not stop.strikes(0.0)
        time.sleep(0.01)
    assert (stop.at, bool(said)) == (found, found is None)
    assert [stop.strikes(t) for t in ((found or 0) - 1, found or 0, 1e12)] == [
        False,
        found is not None,
        False,
    ]
    assert ScheduledStop(parse(["train.py"], {}), env, said.append).at is None and len(said) == (
        found is None
    )


def test_stop_before_when_slurm_does_not_answer_then_nothing_waits_and_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "squeue").write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; exec sleep 600\n"
    )
    (tmp_path / "squeue").chmod(0o755)
    env = {"SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said: list[str] = []
    stop = ScheduledStop(parse(["--stop-before", "10m", "train.py"], {}), env, said.append)
    while not (tmp_path / "pid").exists():
        assert not stop.strikes(1e12) and stop.is_asking
    stop.close()
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists() and not said


RAISED = (
    "Traceback (most recent call last):",
    '  File "/a/train.py", line 7, in <module>',
    "    f()",
    "ValueError: x",
)
GONE = (*RAISED[:3], "RuntimeError: Connection closed by peer")


@pytest.mark.parametrize(
    ("lines", "by_us", "identity"),
    [(RAISED, True, "ValueError at /a/train.py:7"), (RAISED, False, "ValueError at /a/train.py:7"), (GONE, True, ""), ((), True, "")],
)  # fmt: skip
def test_failure_when_a_verdict_came_before_the_exits_then_it_is_that_of_the_rank_that_raised(
    lines: tuple[str, ...], by_us: bool, identity: str
) -> None:
    stopped = RankExit(0, "a", 0, -1, 15, 1.0, (), 10, by_us=True)
    how = (-1, 15) if by_us else (1, None)
    exits = [stopped, RankExit(1, "a", 0, *how, 1.1, lines, 11, by_us=by_us)]
    found = failure_of(Story("AR200", "a verdict", 1, None), exits, 7)
    assert found == Failure(bool(identity), identity, 7)
    hung = failure_of(Story("AR251", "a verdict", 1, None), exits, 7)
    assert not hung.by_script, "that a rank logged a traceback once does not explain a hang"
    lost = failure_of(story_of_lost([]), exits, 7)
    assert lost == Failure(False, "", 7), "a lost node explains all else"


def test_decide_when_all_restarts_are_used_then_the_kinds_are_counted_apart() -> None:
    decision = decide([Failure(True, "E at a:1"), Failure(False), Failure(False)], 2)
    assert not decision.restart
    assert "1 by the script, 2 by the machines" in decision.said


@pytest.mark.parametrize(
    ("came", "meant"),
    [
        (
            [(SIGTERM, 0), (SIGTERM, 0.01), (SIGTERM, 1.5)],
            ["pass on", "ignore", "ignore"],
        ),  # step and batch script
        ([(SIGTERM, 0), (SIGTERM, 2.5)], ["pass on", "kill"]),
        ([(SIGINT, 0), (SIGINT, 0.5)], ["pass on", "kill"]),  # Ctrl-C twice
        ([(SIGUSR1, 0), (SIGUSR1, 60), (SIGTERM, 120)], ["pass on"] * 3),  # a warning, then the end
        (
            [("elsewhere", 0), (SIGTERM, 5), (SIGTERM, 9)],
            ["ignore", "kill"],
        ),  # the same at another node, earlier
        ([(SIGTERM, 0), (SIGINT, 1)], ["pass on", "kill"]),
    ],
)
def test_signals_when_they_come_again_then_only_a_later_one_kills(came: list, meant: list[str]) -> None:
    requests, judged = Requests(), []
    for number, now in came:
        if number == "elsewhere":
            requests.passed_on_at[SIGTERM] = now
            continue
        judged.append(requests.judge(number, now))
        if judged[-1] == "pass on":
            requests.passed_on_at[number] = now
    assert judged == meant


def test_of_rank_then_it_has_torchrun_s_variables_and_ours() -> None:
    env = of_rank(PLACE, 1, Options(script="x.py", max_restarts=3, job="id"), {"HOME": "/h", "RANK": "99"}, 8)
    expected = {
        "HOME": "/h",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "ROLE_RANK": "3",
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "4",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4242",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "id",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "ALLRANKS_JOB": "j",
        "ALLRANKS_RUN_DIR": "/r",
        "ALLRANKS_RECORD_DIR": "/dev/shm/allranks-j/record",
        "ALLRANKS_STOP_FILE": "/dev/shm/allranks-j/stop",
        "ALLRANKS_AGENT_PID": str(os.getpid()),
        "OMP_NUM_THREADS": "4",
        "ALLRANKS_OMP": "agent",
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "=eth1",
    }
    assert {k: env.get(k) for k in expected} == expected


def test_of_rank_when_the_user_chose_then_that_is_kept() -> None:
    base = {
        "OMP_NUM_THREADS": "3",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "ib0",
        "PYTHONPATH": "/mine",
    }
    env = of_rank(PLACE, 0, Options(script="x.py"), base, 8)
    assert {k: env[k] for k in base if k != "PYTHONPATH"} == {
        k: v for k, v in base.items() if k != "PYTHONPATH"
    }
    assert env["PYTHONPATH"].split(os.pathsep)[-1] == "/mine"
    assert "ALLRANKS_OMP" not in env


def test_of_rank_when_not_watched_then_no_record_and_no_probe() -> None:
    env = of_rank(PLACE, 0, Options(script="x.py", watch=False), {"ALLRANKS_RECORD_DIR": "/old"}, 8)
    assert "ALLRANKS_RECORD_DIR" not in env
    assert "PYTHONPATH" not in env


def test_of_rank_when_virtual_local_rank_then_one_device_each() -> None:
    env = of_rank(
        PLACE, 1, Options(script="x.py", virtual_local_rank=True), {"CUDA_VISIBLE_DEVICES": "4,6"}, 8
    )
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) == ("0", "6")


def test_command_of_then_as_torchrun_starts_it() -> None:
    assert command_of(Options(script="t.py", args=("a",)), "py") == ["py", "-u", "t.py", "a"]
    assert command_of(Options(script="pkg.t", module=True), "py") == ["py", "-u", "-m", "pkg.t"]
    assert command_of(Options(script="./x.sh", no_python=True), "py") == ["./x.sh"]
    assert command_of(Options(script="t.py", run_path=True), "py")[:3] == ["py", "-u", "-c"]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({}, ["as-is", "", ""]),
        ({"show": "all"}, ["prefixed"] * 3),
        ({"show": (2,)}, ["", "", "prefixed"]),
        ({"tee": "3"}, ["prefixed"] * 3),
        ({"tee": "1:3"}, ["as-is", "prefixed", ""]),
        ({"redirects": "0:3", "show": "all"}, ["", "prefixed", "prefixed"]),
        ({"local_ranks_filter": (0, 1)}, ["prefixed", "prefixed", ""]),
    ],
)
def test_shown_as_then_as_asked(given: dict, shown: list[str]) -> None:
    assert [shown_as(r, r, Options(script="x", **given)) for r in range(3)] == shown


def machine(root: Path, num_gpus: int) -> Path:
    (root / "dev").mkdir()
    for i in range(num_gpus):
        (root / "dev" / f"nvidia{i}").touch()
    (root / "dev" / "nvidiactl").touch()
    return root


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, 4), ("", 0), ("0,1", 2), ("2,-1,3", 1), ("0,0", 1), ("0,1,2,3,4,5", 4), ("GPU-aa,GPU-bb", 2)],
)
def test_find_when_cuda_visible_devices_then_as_cuda_reads_it(
    tmp_path: Path, visible: str | None, expected: int
) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert devices.find(env, machine(tmp_path, 4)).num_gpus == expected


def test_find_when_nvidia_smi_is_all_there_is_then_it_is_asked(tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\necho '  MIG 1g'\necho 'GPU 1: NVIDIA H200'\n"
    )
    smi.chmod(0o755)
    with mock.patch.dict(os.environ, PATH=f"{tmp_path}:{os.environ['PATH']}"):
        assert devices.find({}, tmp_path).num_gpus == 2


@pytest.mark.parametrize(
    ("nproc", "gpus", "expected"),
    [("3", 0, 3), ("auto", 0, 2), ("auto", 4, 4), ("gpu", 4, 4), ("cpu", 4, 6), ("4", 4, 4)],
)
def test_num_ranks_then_as_asked(nproc: str, gpus: int, expected: int) -> None:
    assert devices.num_ranks(nproc, devices.Devices(gpus, "test", 6)) == expected


@pytest.mark.parametrize(
    ("nproc", "gpus", "code"),
    [("8", 4, "AR034"), ("gpu", 0, "AR036"), ("0", 0, "AR035"), ("many", 0, "AR035"), ("-1", 0, "AR035")],
)
def test_num_ranks_when_it_cannot_be_then_an_error_with_what_could(nproc: str, gpus: int, code: str) -> None:
    with pytest.raises(StartError) as caught:
        devices.num_ranks(nproc, devices.Devices(gpus, "test", 6))
    assert caught.value.code == code
    assert "--nproc" in caught.value.fix


def test_network_then_loopback_has_its_interface_and_is_ours() -> None:
    assert network.is_loopback("127.0.1.1")
    assert not network.is_loopback("10.0.0.1")
    assert network.is_ours("127.0.0.1")
    assert not network.is_ours("203.0.113.7")
    assert network.interface_of("127.0.0.1") in ("lo", "lo0")
    assert network.resolve("no-such-host.invalid") == []
