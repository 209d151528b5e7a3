"""Does `allranks run` read torchrun's command lines as torchrun does?"""

from __future__ import annotations

import subprocess
import sys

import pytest

from allranks.core.errors import StartError
from allranks.run.command_line import duration_s, rank_list
from allranks.run.endpoint import split_endpoint
from allranks.run.options import parse

TORCHRUN_FLAGS = [
    "--nnodes",
    "--nproc-per-node",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--standalone",
    "--max-restarts",
    "--monitor-interval",
    "--start-method",
    "--event-log-handler",
    "--role",
    "--module",
    "--no-python",
    "--run-path",
    "--log-dir",
    "--redirects",
    "--tee",
    "--local-ranks-filter",
    "--duplicate-stdout-filters",
    "--duplicate-stderr-filters",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--local-addr",
    "--logs-specs",
    "--numa-binding",
    "--signals-to-handle",
    "--shutdown-timeout",
    "--virtual-local-rank",
]
SWITCHES = ("--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank")


@pytest.mark.parametrize("flag", TORCHRUN_FLAGS)
def test_parse_when_a_flag_of_torchrun_is_given_in_either_spelling_then_it_is_taken(flag: str) -> None:
    value = {"--rdzv-endpoint": "h:29500", "--rdzv-conf": "timeout=5", "--rdzv-backend": "c10d"}.get(
        flag, "1"
    )
    under = "--" + flag[2:].replace("-", "_")
    for spelling in (flag, under):
        given = [spelling] if flag in SWITCHES else [spelling, value]
        options = parse(
            [*given, *(["--nnodes=2"] if flag == "--node-rank" else []), "train.py", "--lr", "1"], {}
        )
        assert options.script == "train.py"
        assert options.args == ("--lr", "1")


def test_parse_when_script_has_options_of_the_same_name_then_they_are_the_script_s() -> None:
    options = parse(["--nproc", "4", "train.py", "--nproc", "9", "-m", "--help"], {})
    assert (options.nproc, options.module) == ("4", False)
    assert options.args == ("--nproc", "9", "-m", "--help")


def test_parse_when_pet_variables_are_set_then_they_are_defaults_that_flags_override() -> None:
    env = {
        "PET_NPROC_PER_NODE": "3",
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "h",
        "PET_STANDALONE": "0",
    }
    options = parse(["--nproc-per-node", "5", "train.py"], env)
    assert (options.nproc, options.max_nodes, options.node_rank, options.host, options.port) == (
        "5",
        2,
        1,
        "h",
        29500,
    )


def test_parse_when_standalone_then_the_endpoint_has_no_effect_and_that_is_said() -> None:
    options = parse(["--standalone", "--rdzv-endpoint", "h:1", "train.py"], {})
    assert (options.host, options.port) == ("", None)
    assert any("no effect" in note for note in options.notes)


def test_parse_when_an_option_has_no_effect_then_it_says_so_once() -> None:
    options = parse(["--start-method", "fork", "--numa-binding=node", "--after=10m", "train.py"], {})
    assert len(options.notes) == 3


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--nproc"], "AR030", "expected one argument"),
        (["--bogus", "train.py"], "AR030", "--bogus"),
        ([], "AR030", "script"),
        (["--nnodes", "3:2", "x.py"], "AR031", "3:2"),
        (["--nnodes", "two", "x.py"], "AR031", "two"),
        (["--nnodes", "2", "--node-rank", "2", "x.py"], "AR031", "0 to 1"),
        (["--master-port", "70000", "x.py"], "AR032", "70000"),
        (["--rdzv-endpoint", "h:abc", "x.py"], "AR032", "abc"),
        (["--rdzv-backend", "etcd-v2", "x.py"], "AR033", "c10d"),
        (["--rdzv-backend", "zeus", "x.py"], "AR033", "zeus"),
        (["-m", "--no-python", "x"], "AR039", "exclude"),
        (["--standalone", "--nnodes", "2", "x.py"], "AR039", "one node"),
        (["--max-restarts", "-1", "x.py"], "AR039", "negative"),
        (["--rdzv-conf", "timeout", "x.py"], "AR030", "KEY=VALUE"),
        (["--rdzv-conf", "join_timeout=soon", "x.py"], "AR030", "soon"),
        (["--after", "later", "x.py"], "AR030", "later"),
    ],
)
def test_parse_when_the_line_cannot_be_right_then_the_error_names_the_value(
    argv: list[str], code: str, says: str
) -> None:
    with pytest.raises(StartError) as caught:
        parse(argv, {})
    assert caught.value.code == code
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h", ("h", None)),
        ("h:1", ("h", 1)),
        ("[fe80::1]:29", ("fe80::1", 29)),
        ("fe80::1", ("fe80::1", None)),
        ("10.0.0.1:5", ("10.0.0.1", 5)),
    ],
)
def test_split_endpoint_then_host_and_port(text: str, expected: tuple[str, int | None]) -> None:
    assert split_endpoint(text) == expected


def test_duration_and_rank_list_then_plain_values() -> None:
    assert [duration_s(t) for t in ("90", "30s", "10m", "1.5h")] == [90, 30, 600, 5400]
    assert rank_list("0,2-4") == (0, 2, 3, 4)


def test_command_line_when_help_is_asked_then_torch_is_not_imported() -> None:
    code = (
        "import sys\nfrom allranks.cli import main\n"
        "try: main({argv})\nexcept SystemExit: pass\nassert 'torch' not in sys.modules, 'torch was imported'"
    )
    for argv in (["--help"], ["run", "--help"], ["version"], ["explain", "AR037"]):
        done = subprocess.run(
            [sys.executable, "-c", code.format(argv=argv)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
