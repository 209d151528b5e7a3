"""Does a process find its place from what each launcher sets, and does a contradiction name both values?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.core.errors import StartError
from allranks.core.place import Place, expand_counts, find_place, first_host, port_of

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "gpu-a",
    "MASTER_PORT": "29511",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_JOB_NODELIST": "gpu[03-04]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-h-1@1",
}


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


def problem(env: dict[str, str]) -> StartError:
    with pytest.raises(StartError) as caught:
        find_place(env, "h")
    return caught.value


# -- torch's variables -------------------------------------------------------------------------------------------------------


def test_place_when_torchruns_variables_are_complete_then_taken_as_they_are() -> None:
    assert find_place(TORCHRUN, "gpu-b") == Place(
        5, 8, 1, 4, 1, 2, "gpu-b", "torchrun", "RANK and WORLD_SIZE are set", "gpu-a", 29511, 2
    )


def test_place_when_our_agent_started_it_then_says_so() -> None:
    assert find_place({**TORCHRUN, "ALLRANKS_JOB": "x"}, "h").launcher == "allranks run"


def test_place_when_set_by_hand_then_one_node_is_assumed() -> None:
    place = find_place({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, "h")
    assert place == Place(
        1, 2, 1, 2, 0, 1, "h", "environment", "RANK and WORLD_SIZE are set", "127.0.0.1", 29500
    )


def test_place_when_local_world_size_is_set_by_hand_then_nodes_follow() -> None:
    env = without(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    place = find_place(
        {**env, "RANK": "6", "WORLD_SIZE": "7", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}, "h"
    )
    assert (place.node_rank, place.num_nodes) == (1, 2)


@pytest.mark.parametrize(
    ("env", "code", "what"),
    [
        ({"RANK": "0"}, "AR001", "RANK=0 set, but not WORLD_SIZE"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "AR001", "WORLD_SIZE=2, LOCAL_RANK=0 set, but not RANK"),
        ({"WORLD_SIZE": "2"}, "AR001", "WORLD_SIZE=2 set, but not RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "AR001", "WORLD_SIZE=2, but not MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "AR002", "RANK=2 does not fit WORLD_SIZE=2: ranks go from 0 to 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "AR002", "RANK=-1 is below 0"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "AR002", "RANK='zero' is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "AR002", "WORLD_SIZE='' is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "AR002", "WORLD_SIZE=0 is below 1"),
        (
            {**TORCHRUN, "LOCAL_RANK": "4"},
            "AR002",
            "LOCAL_RANK=4 does not fit LOCAL_WORLD_SIZE=4: ranks go from 0 to 3",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2", "MASTER_ADDR": "a"},
            "AR002",
            "LOCAL_RANK=2 does not fit WORLD_SIZE=2: ranks go from 0 to 1",
        ),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "AR002", "LOCAL_WORLD_SIZE=9 is more than WORLD_SIZE=8"),
        (
            {**TORCHRUN, "MASTER_PORT": "65536"},
            "AR002",
            "MASTER_PORT=65536 is above 65535, the largest port there is",
        ),
        ({**TORCHRUN, "MASTER_PORT": "0"}, "AR002", "MASTER_PORT=0 is below 1"),
        ({**TORCHRUN, "MASTER_PORT": "auto"}, "AR002", "MASTER_PORT='auto' is not a whole number"),
    ],
)
def test_place_when_torchs_variables_cannot_be_then_names_them(
    env: dict[str, str], code: str, what: str
) -> None:
    error = problem(env)
    assert (error.code, error.what) == (code, what)
    assert error.fix


@given(st.integers(1, 64).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n))))
def test_place_when_rank_is_below_world_size_then_every_number_fits(rank_and_size: tuple[int, int]) -> None:
    rank, size = rank_and_size
    place = find_place({"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "a"}, "h")
    assert place.rank == rank < place.world_size == size
    assert place.local_rank < place.local_world_size and place.node_rank < place.num_nodes
    assert place.is_rank_zero == (rank == 0)


# -- Slurm -------------------------------------------------------------------------------------------------------------------


def test_place_when_srun_started_it_then_all_of_slurm() -> None:
    place = find_place(SLURM, "gpu04")
    reason = "SLURM_PROCID and SLURM_NTASKS are set in step 4711.0"
    assert place == Place(5, 8, 1, 4, 1, 2, "gpu04", "Slurm", reason, "gpu03", port_of("4711.0"))


def test_place_when_in_the_batch_script_then_alone() -> None:
    place = find_place(without(SLURM, "SLURM_STEP_ID"), "h")
    assert (place.launcher, place.world_size) == ("alone", 1)
    assert place.reason == "inside a Slurm allocation, but not in a step started by srun"


@pytest.mark.parametrize("step", ["4294967290", "4294967291"])
def test_place_when_in_sallocs_shell_or_a_numbered_batch_step_then_alone(step: str) -> None:
    assert find_place({**SLURM, "SLURM_STEP_ID": step, "SLURM_PROCID": "0"}, "h").launcher == "alone"


def test_place_when_the_steps_own_number_differs_then_it_counts() -> None:
    env = {**SLURM, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    place = find_place({**env, "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}, "h")
    assert (place.rank, place.world_size, place.local_world_size, place.num_nodes) == (1, 2, 2, 1)


def test_place_when_all_tasks_are_on_one_node_then_ntasks_is_enough() -> None:
    env = without(SLURM, "SLURM_NTASKS_PER_NODE")
    place = find_place({**env, "SLURM_NNODES": "1", "SLURM_LOCALID": "5", "SLURM_NODEID": "0"}, "h")
    assert (place.local_rank, place.local_world_size, place.num_nodes) == (5, 8, 1)


def test_place_when_ntasks_goes_without_ntasks_per_node_then_names_both() -> None:
    error = problem(without(SLURM, "SLURM_NTASKS_PER_NODE"))
    assert error.code == "AR004"
    assert error.what == "SLURM_NTASKS=8 over SLURM_NNODES=2 nodes, and SLURM_NTASKS_PER_NODE is not set"
    assert error.fix == "#SBATCH --nodes=2 --ntasks-per-node=4, and no --ntasks"


@pytest.mark.parametrize(
    ("name", "value", "number"), [("SLURM_GPUS_ON_NODE", "8", 8), ("SLURM_GPUS_PER_NODE", "a100:2", 2)]
)
def test_place_when_slurm_counts_devices_then_an_error_compares_tasks_with_them(
    name: str, value: str, number: int
) -> None:
    error = problem({**without(SLURM, "SLURM_NTASKS_PER_NODE"), name: value})
    assert f"{name}={value}: one rank for each GPU of a node is {number}" in error.why
    assert f"--nodes=2 --ntasks-per-node={number}" in error.fix
    error = problem({**SLURM, "SLURM_NTASKS_PER_NODE": "3", name: value})
    assert (
        "SLURM_NTASKS=8 is not SLURM_NTASKS_PER_NODE=3 x SLURM_NNODES=2" in error.what and name in error.why
    )


def test_place_when_tasks_lie_unevenly_then_says_how() -> None:
    error = problem({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "5,3"})
    assert error.code == "AR004"
    assert error.what == "SLURM_NTASKS=8 ranks lie unevenly on the nodes: SLURM_STEP_TASKS_PER_NODE=5,3"


def test_place_when_the_product_is_not_ntasks_then_names_all_three() -> None:
    error = problem({**SLURM, "SLURM_NTASKS_PER_NODE": "3"})
    assert error.code == "AR004"
    assert error.what == "SLURM_NTASKS=8 is not SLURM_NTASKS_PER_NODE=3 x SLURM_NNODES=2"


def test_place_when_rank_was_exported_in_the_batch_script_then_names_both() -> None:
    error = problem({**SLURM, "RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "gpu03"})
    assert error.code == "AR003"
    assert error.what == "RANK=0 WORLD_SIZE=8, but Slurm says SLURM_PROCID=5 SLURM_NTASKS=8"
    assert "unset RANK" in error.fix


def test_place_when_world_size_was_exported_in_the_batch_script_then_names_both() -> None:
    error = problem({**SLURM, "WORLD_SIZE": "16"})
    assert (error.code, error.what) == ("AR003", "WORLD_SIZE=16, but Slurm says SLURM_NTASKS=8")


def test_place_when_rank_is_slurms_then_no_contradiction() -> None:
    env = {**SLURM, "RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "gpu03"}
    assert find_place(env, "h").launcher == "environment"


def test_place_when_torchrun_is_a_task_of_slurm_then_torchruns_numbers() -> None:
    env = {**SLURM, **TORCHRUN, "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
    assert (find_place(env, "h").launcher, find_place(env, "h").rank) == ("torchrun", 5)


def test_place_when_master_addr_is_exported_then_kept_under_slurm() -> None:
    place = find_place({**SLURM, "MASTER_ADDR": "10.0.0.3", "MASTER_PORT": "12345"}, "h")
    assert (place.master_addr, place.master_port) == ("10.0.0.3", 12345)


def test_place_when_the_port_is_exported_wrongly_then_also_an_error_under_slurm() -> None:
    assert problem({**SLURM, "MASTER_PORT": "99999"}).code == "AR002"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu03", "gpu03"),
        ("gpu[03-05,9],login", "gpu03"),
        ("gpu[7,03-05]", "gpu7"),
        ("login,gpu[1-2]", "login"),
        ("rack[1-2]n[3-4]", "rack1n3"),
        ("n[001-004]-ib0,x", "n001-ib0"),
        ("a-b.cluster.example,c", "a-b.cluster.example"),
    ],
)
def test_first_host_then_it_is_where_rank_0_runs(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("text", "counts"), [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("4,3(x2)", [4, 3, 3]), ("", []), ("x", [])]
)
def test_expand_counts_then_one_number_per_node(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@given(st.text(max_size=20), st.text(max_size=20))
def test_port_of_then_all_ranks_of_a_job_derive_the_same_below_the_ephemeral_range(a: str, b: str) -> None:
    assert port_of(a) == port_of(a)
    assert 20000 <= port_of(b) < 32000


def test_port_of_when_steps_run_side_by_side_then_ports_differ() -> None:
    assert (
        len({port_of(f"4711.{step}") for step in range(50)}) >= 49
    )  # 12,000 ports: a clash of 50 is a 10 % chance


# -- MPI ---------------------------------------------------------------------------------------------------------------------


def test_place_when_open_mpi_started_it_then_one_node_meets_on_itself() -> None:
    place = find_place(OPEN_MPI, "h")
    reason = "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE are set"
    assert place == Place(1, 4, 1, 4, 0, 1, "h", "MPI", reason, "127.0.0.1", port_of("prterun-h-1@1"))


def test_place_when_hydra_started_it_then_pmis_variables() -> None:
    env = {
        "PMI_RANK": "3",
        "PMI_SIZE": "4",
        "MPI_LOCALRANKID": "1",
        "MPI_LOCALNRANKS": "2",
        "MASTER_ADDR": "h0",
    }
    place = find_place(env, "h1")
    assert (place.rank, place.local_rank, place.node_rank, place.num_nodes) == (3, 1, 1, 2)
    assert (place.launcher, place.master_addr) == ("MPI", "h0")


def test_place_when_mpi_spans_hosts_without_an_address_then_says_how_to_give_it() -> None:
    error = problem({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert error.code == "AR006"
    assert error.what.startswith("OMPI_COMM_WORLD_SIZE=4, OMPI_COMM_WORLD_LOCAL_SIZE=2: several hosts")
    assert error.fix.startswith("mpirun -x MASTER_ADDR=")


def test_place_when_mpis_local_rank_is_too_large_then_names_both() -> None:
    error = problem({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "4"})
    assert error.code == "AR002" and "OMPI_COMM_WORLD_LOCAL_RANK=4" in error.what


def test_place_when_mpirun_runs_inside_a_slurm_step_then_its_daemons_are_the_tasks() -> None:
    assert find_place({**SLURM, **OPEN_MPI}, "h").launcher == "MPI"


def test_place_when_srun_gives_pmi_too_then_slurm() -> None:
    assert find_place({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"}, "h").launcher == "Slurm"


# -- alone, and for the log --------------------------------------------------------------------------------------------------


def test_place_when_nothing_is_set_then_alone() -> None:
    place = find_place({"PATH": "/bin", "WORLD_SIZE": "1"}, "h")
    assert place == Place(0, 1, 0, 1, 0, 1, "h", "alone", "no launcher's variables are set", "127.0.0.1", 0)
    assert str(place) == (
        "rank 0 of 1 (local rank 0 of 1, node 0 of 1) on host h, alone: no launcher's variables are set"
    )


def test_place_then_its_text_is_the_line_for_the_log() -> None:
    assert str(find_place(TORCHRUN, "h")) == (
        "rank 5 of 8 (local rank 1 of 4, node 1 of 2) on host h, started by torchrun: RANK and WORLD_SIZE are set"
    )
