"""The environment variables of ranks: torchrun's, so that any script runs unchanged, and our own."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from lockstep.launch.job.program import local_rank_option
from lockstep.launch.job.request import Function
from lockstep.launch.rendezvous.job_contract import SECRET
from lockstep.launch.rendezvous.plan import NodePlacement, Plan
from lockstep.launch.run_dir.run_directory import Job
from lockstep.launch.workers.rank_process import LOCAL_RANK_OPTION, RESULT
from lockstep.launch_contract import (
    BIND,
    CHANNEL,
    EMERGENCY,
    FAILURE,
    FRESH,
    GENERATION,
    RESUME,
    RESUME_FROM,
    RUN_DIR,
    RUN_ID,
    SAVE_ONLY,
    STACKS,
    STATUS,
)
from lockstep.network_interface import INTERFACES
from lockstep.settings import OPTIONS_VARIABLE, options_given
from lockstep.world import World

#: How long ranks wait for one that may be in a debugger: a day.
_ATTACHED_TIMEOUT_S = "86400"


def common_environment(job: Job, env: Mapping[str, str], channel: str) -> dict[str, str]:
    """The environment of the fork server and of all ranks of all generations, made from the launcher's ``env``.

    ``channel`` is where their heartbeats go.
    """
    # Ranks that each use all CPUs slow each other down many times; a script or `Run` may choose otherwise. An empty
    # variable would mean all CPUs.
    threads = {} if env.get("OMP_NUM_THREADS", "").strip() else {"OMP_NUM_THREADS": "1"}
    # On one machine ranks talk over its loopback: a host name that resolves slowly, or to an address that a firewall
    # closes, then does no harm.
    loopback = sys.platform == "linux" and job.request.nodes is None
    local = dict.fromkeys(INTERFACES, "lo") if loopback else {}
    # The others wait for a rank whose user thinks; the launcher ends them should that rank die.
    attached = job.request.attach is not None and "LOCKSTEP_PEER_TIMEOUT_S" not in env
    patience = {"peer_timeout_s": _ATTACHED_TIMEOUT_S} if attached else {}
    # The order of a set of strings is then the same on all ranks, and every time. A copy of this process has its seed.
    copied = isinstance(job.request.program, Function) or job.request.start_method == "copy"
    hashes = {} if copied or env.get("PYTHONHASHSEED") else {"PYTHONHASHSEED": "0"}
    not_handed_on = (RESUME, RESUME_FROM, FRESH, EMERGENCY, SAVE_ONLY, SECRET)
    kept = {name: value for name, value in env.items() if name not in not_handed_on}
    return {
        # With the threads that NumPy's import starts, the process could not be forked; where the user has set
        # OMP_NUM_THREADS, that does not prevent them.
        "OPENBLAS_NUM_THREADS": "1",
        **local,
        **kept,
        **threads,
        **hashes,
        RUN_ID: job.run_id,
        RUN_DIR: str(job.run_dir),
        STATUS: str(job.status),
        CHANNEL: channel,
        # Over the settings of a program that started this launcher, such as a benchmark.
        OPTIONS_VARIABLE: json.dumps({**patience, **options_given(env), **job.request.settings}),
        **({BIND: "1"} if job.request.bind else {}),
        **({LOCAL_RANK_OPTION: local_rank_option(job.request.program)} if job.request.pass_local_rank else {}),
        "TORCHELASTIC_RUN_ID": job.run_id,
        "TORCHELASTIC_MAX_RESTARTS": str(job.request.max_restarts),
        # The ranks find a store that exists already; none of them is to open one.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def world_of_rank(plan: Plan, placement: NodePlacement, rank: int, run_id: str) -> World:
    """The world of ``plan``, as ``rank`` of the node at ``placement`` sees it."""
    return World(
        rank=rank,
        size=plan.ranks,
        local_rank=rank - plan.first_rank(placement.node_rank),
        local_size=plan.members[placement.node_rank].ranks,
        node_rank=placement.node_rank,
        nodes=len(plan.members),
        generation=plan.generation,
        address=placement.address,
        port=plan.port,
        run_id=run_id,
    )


def rank_environment(job: Job, world: World, restart: int, interface: str = "", save_only: str = "") -> dict[str, str]:
    """The variables of one rank of one generation, on top of `common_environment`.

    Args:
        job: what is carried out.
        world: the rank and its world.
        restart: generations of this launcher before this one.
        interface: the network interface that leads to the other nodes; "": the rank finds it out.
        save_only: see `Plan.save_only`.
    """
    # A restart goes on from what the generation before it has saved, also where the run itself started over.
    begins = "resume" if restart else job.begins
    # Once: a job that the scheduler starts again goes on from what it has saved since.
    back_to = None if job.given.restarted else job.request.resume_from
    return {
        **world.rank_variables(),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(world.rank),
        "ROLE_WORLD_SIZE": str(world.size),
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        GENERATION: str(world.generation),
        FAILURE: str(job.failure(world.generation, world.rank)),
        RESULT: str(job.result(world.rank)),
        STACKS: str(job.stacks(world.rank)),
        **({RESUME: "1"} if begins == "resume" else {}),
        **({RESUME_FROM: back_to} if back_to and not restart else {}),
        **({FRESH: "1"} if begins == "fresh" else {}),
        **({SAVE_ONLY: save_only} if save_only else {}),
        **(dict.fromkeys(INTERFACES, interface) if interface else {}),
    }
