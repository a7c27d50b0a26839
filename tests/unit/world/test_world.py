"""Each launcher's row, from environments as the launcher really sets them; contradictions; where the ranks meet."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cpu_affinity import allotted_cpus, by_core, own_cpus
from lockstep.errors import WorldError
from lockstep.launch_contract import GENERATION, LAUNCHER, RUN_DIR, RUN_ID
from lockstep.world import LAUNCHERS, World, leading_host

SHELL = {"HOME": "/home/ada", "USER": "ada", "SHELL": "/bin/bash", "HOSTNAME": "n01", "SHLVL": "1"}
SLURM_BATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_NODELIST": "n[01-02]",
    "SLURM_NODELIST": "n[01-02]",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "5",
    "SLURM_NPROCS": "5",
    "SLURM_TASKS_PER_NODE": "3,2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_CPUS_ON_NODE": "12",
    "SLURM_CPUS_PER_TASK": "4",
    "SLURM_SUBMIT_DIR": "/home/ada",
}
SLURM_STEP = SLURM_BATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "n[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
    "SLURM_SRUN_COMM_HOST": "10.0.0.9",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASK_PID": "31337",
}
SLURM_PTY = SLURM_BATCH | {
    "SLURM_JOB_NAME": "bash",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n01",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_PTY_PORT": "40123",
    "SLURM_PTY_WIN_COL": "120",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_NAME": "default",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "n01",
    "MASTER_PORT": "29500",
    "OMP_NUM_THREADS": "1",
}
OURS = {
    RUN_ID: "digits-1",
    RUN_DIR: "runs/digits",
    GENERATION: "3",
    "RANK": "2",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "3",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "1",
    "NODE_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "n01",
    "MASTER_PORT": "20000",
}
DEEPSPEED = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_SIZE": "4",
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",
}
RAY = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "NODE_RANK": "0",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "41009",
}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
OPENMPI_4 = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_NODE_RANK": "3",
    "OMPI_UNIVERSE_SIZE": "4",
    "OMPI_MCA_orte_num_nodes": "1",
    "OMPI_MCA_ess_base_jobid": "2129264641",
    "OMPI_MCA_ess_base_vpid": "3",
    "OMPI_MCA_orte_hnp_uri": "2129264640.0;tcp://10.0.0.1,192.168.7.1:34911",
    "PMIX_NAMESPACE": "2129264641",
    "PMIX_RANK": "3",
    "OMPI_COMMAND": "python",
}
OPENMPI_4_TWO_NODES = OPENMPI_4 | {
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_MCA_orte_num_nodes": "2",
}
OPENMPI_5_TWO_NODES = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "PMIX_NAMESPACE": "prterun-n01-4242@1",
    "PMIX_RANK": "2",
    "PMIX_SERVER_URI41": "prterun-n01-4242@0.1;tcp4://10.0.0.1:51717",
}
HYDRA = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "9",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "MASTER_PORT": "29511",
}
MVAPICH2 = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "MPIRUN_RSH_LAUNCH": "1",
    "MASTER_ADDR": "n01",
    "MASTER_PORT": "29500",
}
PBS = {"PBS_JOBID": "812.head", "PBS_NODEFILE": "/var/spool/pbs/aux/812.head", "PBS_ENVIRONMENT": "PBS_BATCH"}
PALS = PBS | {
    "PALS_RANKID": "5",
    "PALS_NODEID": "1",
    "PALS_LOCAL_RANKID": "1",
    "PALS_APID": "4c1ee1a2-0d1d-4d7e-b8a4-8c0c53f3c2b9",
    "PMI_SIZE": "8",
    "PMI_RANK": "5",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "4",
    "MASTER_ADDR": "x3001c0s1b0n0",
}
SGE = {
    "JOB_ID": "9001",
    "SGE_ROOT": "/usr/local/sge",
    "SGE_CELL": "default",
    "QUEUE": "gpu.q",
    "NSLOTS": "8",
    "NHOSTS": "1",
    "PE": "smp",
    "PE_HOSTFILE": "/var/spool/sge/n01/active_jobs/9001.1/pe_hostfile",
}

# (rank, size, local_rank, local_size, node_rank, nodes), generation, address
ALONE = ((0, 1, 0, 1, 0, 1), 0, "127.0.0.1")
RECORDED = [
    ("lockstep", OURS, ((2, 3, 0, 1, 1, 2), 3, "n01")),
    ("torchrun", TORCHRUN, ((3, 4, 1, 2, 1, 2), 2, "n01")),
    ("generic", DEEPSPEED, ((5, 8, 1, 4, 1, 2), 0, "10.0.0.1")),
    ("generic", RAY, ((1, 2, 1, 2, 0, 1), 0, "10.0.0.1")),
    ("generic", BY_HAND, ((1, 2, 1, 2, 0, 1), 0, "localhost")),
    ("slurm", SLURM_STEP, ((4, 5, 1, 2, 1, 2), 0, "n01")),
    ("slurm", SLURM_STEP | {"SLURM_RESTART_COUNT": "2"}, ((4, 5, 1, 2, 1, 2), 2, "n01")),
    ("slurm-job", SLURM_BATCH, ALONE),
    ("slurm-job", SLURM_BATCH | {"SLURM_STEP_ID": str(0xFFFFFFFB)}, ALONE),
    ("slurm-job", SLURM_PTY, ALONE),
    ("openmpi", OPENMPI_4, ((3, 4, 3, 4, 0, 1), 0, "127.0.0.1")),
    ("openmpi", OPENMPI_4_TWO_NODES, ((3, 4, 1, 2, 1, 2), 0, "10.0.0.1")),
    ("openmpi", OPENMPI_5_TWO_NODES | {"MASTER_ADDR": "n01"}, ((2, 4, 0, 2, 1, 2), 0, "n01")),
    ("hydra", HYDRA, ((1, 2, 1, 2, 0, 1), 0, "127.0.0.1")),
    ("mvapich2", MVAPICH2, ((3, 4, 1, 2, 1, 2), 0, "n01")),
    ("pals", PALS, ((5, 8, 1, 4, 1, 2), 0, "x3001c0s1b0n0")),
    ("sge-job", SGE, ALONE),
    ("pbs-job", PBS, ALONE),
    ("none", {}, ALONE),
]


@pytest.mark.parametrize(("launcher", "env", "expected"), RECORDED, ids=lambda value: str(value)[:12])
def test_a_recorded_environment_gives_its_place(launcher, env, expected):
    place, generation, address = expected
    found = World.from_env(SHELL | env)
    assert found.launcher == launcher
    assert (found.rank, found.size, found.local_rank, found.local_size, found.node_rank, found.nodes) == place
    assert found.generation == generation
    assert found.address == address
    assert (found.port == 0) == (found.size == 1)


def test_every_row_is_recorded():
    assert {name for name, _, _ in RECORDED} == {launcher.name for launcher in LAUNCHERS}


@pytest.mark.parametrize(
    ("inner", "outer", "launcher"),
    [
        (OURS, SLURM_STEP, "lockstep"),  # one agent per node, started by srun
        (TORCHRUN, SLURM_STEP, "torchrun"),
        (OURS, TORCHRUN, "lockstep"),
        (TORCHRUN, OPENMPI_4, "torchrun"),
        (OPENMPI_4, SLURM_STEP, "openmpi"),  # mpirun starts its own helpers by srun, one on each node
        (HYDRA, SLURM_STEP, "hydra"),
        (DEEPSPEED, SGE, "generic"),
        (DEEPSPEED, SLURM_BATCH, "generic"),
        (RAY, SLURM_PTY, "generic"),
    ],
)
def test_a_launcher_inside_another_is_believed(inner, outer, launcher):
    assert World.from_env(outer | inner).launcher == launcher


def test_srun_with_pmi2_is_still_slurm():
    assert World.from_env(SLURM_STEP | {"PMI_RANK": "4", "PMI_SIZE": "5"}).launcher == "slurm"


def test_a_wrapper_that_repeats_what_srun_says_is_no_contradiction():
    found = World.from_env(SLURM_STEP | {"RANK": "4", "WORLD_SIZE": "5", "MASTER_ADDR": "n02", "MASTER_PORT": "3000"})
    assert (found.launcher, found.address, found.port, found.local_rank) == ("slurm", "n02", 3000, 1)


@pytest.mark.parametrize("stale", [{"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "4"}, {"WORLD_SIZE": "1"}])
@pytest.mark.parametrize("env", [SLURM_STEP, OPENMPI_4])
def test_stale_variables_that_contradict_a_launcher_are_refused(env, stale):
    if stale == {"RANK": "4"} and env is SLURM_STEP:
        assert World.from_env(env | stale).rank == 4
        return
    with pytest.raises(WorldError) as refused:
        World.from_env(env | stale)
    message = str(refused.value)
    for name, value in stale.items():
        assert f"{name}={value}" in message
    assert "SLURM_STEP_NUM_TASKS=5" in message or "OMPI_COMM_WORLD_SIZE=4" in message
    assert "unset RANK and WORLD_SIZE" in message
    assert LAUNCHER in message


def test_the_user_may_say_which_of_two_is_meant():
    env = SLURM_STEP | BY_HAND
    assert World.from_env(env | {LAUNCHER: "generic"}).size == 2
    assert World.from_env(env | {LAUNCHER: "slurm"}).size == 5
    with pytest.raises(WorldError, match="there is no such launcher; give one of lockstep, torchrun"):
        World.from_env(env | {LAUNCHER: "slrum"})
    with pytest.raises(WorldError, match="not started by torchrun"):
        World.from_env(env | {LAUNCHER: "torchrun"})


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (BY_HAND | {"RANK": "7", "WORLD_SIZE": "4"}, "RANK=7 WORLD_SIZE=4"),
        (BY_HAND | {"RANK": "-1"}, "RANK=-1"),
        (BY_HAND | {"RANK": "one"}, "RANK='one': it must be a whole number"),
        (BY_HAND | {"WORLD_SIZE": "2.0"}, "WORLD_SIZE='2.0'"),
        (BY_HAND | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999"),
        ({"RANK": "1"}, "RANK=1 is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set but RANK is not"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 LOCAL_WORLD_SIZE=2"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8"),
        (SLURM_STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(y3)"}, "SLURM_STEP_TASKS_PER_NODE"),
        (SLURM_STEP | {"SLURM_NODEID": "2"}, "describes 2 nodes"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "set LOCAL_WORLD_SIZE and LOCAL_RANK"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n01", "MASTER_PORT": "1"}, "set LOCAL_WORLD_SIZE"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "1"}, "export MASTER_ADDR=HOST"),
        ({k: v for k, v in BY_HAND.items() if k != "MASTER_PORT"}, "export MASTER_PORT=29500"),
        ({k: v for k, v in HYDRA.items() if k != "MASTER_PORT"}, "mpiexec -genv MASTER_PORT 29500"),
        (OPENMPI_5_TWO_NODES, "mpirun -x MASTER_ADDR=HOST"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_values(env, words):
    with pytest.raises(WorldError) as refused:
        World.from_env(SHELL | env)
    assert words in str(refused.value)


def test_k8s_pods_of_one_rank_each():
    pod = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    found = World.from_env(pod | {"MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456"})
    assert (found.node_rank, found.nodes, found.leads, found.leads_node) == (1, 3, False, True)


@pytest.mark.parametrize("env", [SLURM_STEP, OPENMPI_4, PALS])
def test_the_port_is_the_same_on_all_ranks_and_another_in_another_job(env):
    rank, job = {
        "SLURM_JOB_ID": ("SLURM_PROCID", "SLURM_STEP_ID"),
        "PMIX_NAMESPACE": ("OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE"),
        "PALS_APID": ("PALS_RANKID", "PALS_APID"),
    }[next(name for name in ("SLURM_JOB_ID", "PMIX_NAMESPACE", "PALS_APID") if name in env)]
    port = World.from_env(env).port
    assert 16384 <= port < 32768
    assert World.from_env(env | {rank: "0"}).port == port
    assert World.from_env(env | {job: "17"}).port != port


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n01", "n01"),
        ("n[01-03,7]", "n01"),
        ("n[7,01-03]", "n7"),
        ("gpu-a1,gpu-b2", "gpu-a1"),
        ("rack[2-3]n[08-10,12],x1", "rack2n08"),
        ("n[3].site", "n3.site"),
        ("2129264640.0;tcp://10.0.0.1,192.168.7.1:34911", "10.0.0.1"),
        ("2129264640.0;tcp://10.0.0.1:34911", "10.0.0.1"),
    ],
)
def test_the_leading_host(hosts, first):
    assert leading_host(hosts) == first


def test_tasks_of_each_node_as_slurm_writes_them():
    env = SLURM_STEP | {
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_STEP_NUM_NODES": "4",
        "SLURM_LOCALID": "0",
    }
    sizes = [World.from_env(env | {"SLURM_NODEID": str(node)}).local_size for node in range(4)]
    assert sizes == [2, 2, 2, 1]


@st.composite
def worlds(draw):
    per_node = draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    node = draw(st.integers(0, len(per_node) - 1))
    local = draw(st.integers(0, per_node[node] - 1))
    return World(
        rank=sum(per_node[:node]) + local,
        size=sum(per_node),
        local_rank=local,
        local_size=per_node[node],
        node_rank=node,
        nodes=len(per_node),
        generation=draw(st.integers(0, 9)),
        address=draw(st.sampled_from(["127.0.0.1", "n01", "10.0.0.1"])),
        port=draw(st.integers(1, 65535)),
        launcher="lockstep",
        run_id=draw(st.text("abc-0", min_size=1)),
        run_dir=draw(st.none() | st.just("runs/x")),
    )


@given(worlds())
def test_what_a_launcher_sets_is_what_a_rank_reads(place):
    env = place.rank_variables() | {RUN_ID: place.run_id, GENERATION: str(place.generation)}
    if place.run_dir is not None:
        env[RUN_DIR] = place.run_dir
    assert World.from_env(env) == place
    assert World.from_env(SLURM_STEP | OPENMPI_4 | env) == place


@given(worlds())
def test_slurm_tells_the_same_place(place):
    per_node = [1] * place.nodes
    per_node[place.node_rank] = place.local_size
    found = World.from_env(
        {
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_ID": "3",
            "SLURM_STEP_NODELIST": "n[1-9]",
            "SLURM_STEP_NUM_TASKS": str(place.size),
            "SLURM_STEP_NUM_NODES": str(place.nodes),
            "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, per_node)),
            "SLURM_PROCID": str(place.rank),
            "SLURM_LOCALID": str(place.local_rank),
            "SLURM_NODEID": str(place.node_rank),
        }
    )
    told = ("rank", "size", "local_rank", "local_size", "node_rank", "nodes", "leads", "leads_node")
    assert all(getattr(found, name) == getattr(place, name) for name in told)


@pytest.mark.parametrize(
    "change",
    [{"rank": 4}, {"rank": -1}, {"local_rank": 2}, {"node_rank": 2}, {"nodes": 5, "node_rank": 0}, {"size": 0},
     {"local_size": 5, "local_rank": 0}, {"generation": -1}, {"port": 65536}],
)  # fmt: skip
def test_a_world_that_is_none_cannot_be_made(change):
    whole = World(rank=3, size=4, local_rank=1, local_size=2, node_rank=1, nodes=2)
    with pytest.raises(WorldError, match=next(iter(change))):
        dataclasses.replace(whole, **change)


def test_a_place_says_itself():
    assert str(World.from_env(SLURM_STEP)) == "rank 4 of 5, local rank 1 of 2 on node 1 of 2"
    assert str(World.from_env({})) == "rank 0 of 1"


@pytest.mark.parametrize(
    ("env", "affinity", "cpu_max", "cpus"),
    [
        ({}, 8, "max 100000\n", 8),
        ({}, 8, "250000 100000\n", 2),
        ({}, 8, "50000 100000", 1),
        ({}, 8, "", 8),
        (SLURM_BATCH, 64, "max", 12),
        (SLURM_STEP, 64, "max", 4),
        (SGE, 64, "max", 8),
        (PBS | {"NCPUS": "6"}, 64, "max", 6),
        (OURS | {"LOCAL_WORLD_SIZE": "3"}, 8, "max", 2),
        (TORCHRUN, 1, "max", 1),
        (RAY, 8, "max", 4),
        (BY_HAND, 8, "max", 4),
        (OPENMPI_4, 8, "max", 2),
        ({k: v for k, v in SLURM_STEP.items() if k != "SLURM_CPUS_PER_TASK"}, 64, "max", 6),
    ],
)
def test_cpus_that_a_process_may_keep_busy(env, affinity, cpu_max, cpus):
    assert allotted_cpus(env, affinity=affinity, cpu_max=cpu_max) == cpus


def test_the_last_node_may_have_fewer_ranks():
    env = {
        f"OMPI_COMM_WORLD_{name}": number for name, number in zip(("SIZE", "RANK", "LOCAL_RANK"), "320", strict=True)
    }
    env |= {
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "OMPI_MCA_orte_num_nodes": "2",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
    }
    assert World.from_env(env).node_rank == 1


def test_a_step_of_one_task_in_a_larger_job_stays_alone():
    """``srun -n1`` inside a job of five tasks: SLURM_NTASKS still speaks of the job."""
    assert World.from_env(SLURM_PTY | {"SLURM_NTASKS": "5"}).size == 1


def parts_of(cpus, ranks, near=()):
    worlds = [World(rank, ranks, rank, ranks, 0, 1, port=1) for rank in range(ranks)]
    return [own_cpus(cpus, world.rank_variables() | {"LOCKSTEP_RUN_ID": "r"}, near) for world in worlds]


@given(st.sets(st.integers(0, 500), min_size=1), st.integers(1, 12))
def test_bound_ranks_share_out_all_cpus_evenly(allowed, ranks):
    parts = parts_of(sorted(allowed), ranks)
    if ranks > len(allowed):
        assert parts == [allowed] * ranks
    else:
        assert sorted(cpu for part in parts for cpu in part) == sorted(allowed)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_bound_ranks_keep_to_the_cpus_beside_their_gpus():
    sockets = frozenset(range(0, 16, 2)), frozenset(range(1, 16, 2))  # numbers alternate, as on many hosts
    near = [sockets[1], sockets[1], sockets[0], sockets[1], sockets[0]]
    parts = parts_of(range(16), 5, near)
    assert parts == [{1, 3}, {5, 7, 9}, {0, 2, 4, 6}, {11, 13, 15}, {8, 10, 12, 14}]
    # A job has no CPU there: all that it has are shared out.
    assert parts_of([0, 2, 4, 6], 2, [sockets[1], sockets[1]]) == [{0, 2}, {4, 6}]


def test_threads_of_one_core_go_to_one_rank(tmp_path):
    for cpu in range(16):  # two sockets of four cores, with two threads each: the second ones from 8 on
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu % 2}\n")
        (topology / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    order = by_core(range(16), tmp_path)
    assert order == [0, 8, 2, 10, 4, 12, 6, 14, 1, 9, 3, 11, 5, 13, 7, 15]
    assert parts_of(order, 4)[1] == {4, 12, 6, 14}
    assert by_core([3, 1], tmp_path / "unknown") == [1, 3]


def test_a_bound_rank_is_not_shared_out_again():
    env = World(1, 4, 1, 4, 0, 1, port=1).rank_variables() | {"LOCKSTEP_RUN_ID": "r", "LOCKSTEP_BIND": "1"}
    assert allotted_cpus(env, affinity=2, cpu_max="max") == 2
    assert allotted_cpus(env, affinity=2, cpu_max="400000 100000") == 1
