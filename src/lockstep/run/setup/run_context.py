"""Set-up of a run, before the script registers anything: device, threads, process group, strategy, checkpoints."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch

from lockstep.batch import BatchPlan
from lockstep.checkpoint import Checkpoints
from lockstep.collectives import Group, open_group
from lockstep.cpu_affinity import allotted_cpus
from lockstep.errors import SettingError, UsageError
from lockstep.formatting import plural
from lockstep.heartbeat import ProgressMarker, progress_marker
from lockstep.launch_contract import MEASURE, RESUME, STOP_FILE, TRANSCRIPT
from lockstep.report import refuse_unknown_trackers
from lockstep.run.benchmark.torch_profiler import StepProfiler
from lockstep.run.checks.oom_advice import free_bytes, gpu_memory
from lockstep.run.inputs.shared_inputs import SharedInputs
from lockstep.run.loop.position import RunPosition
from lockstep.run.metrics.metric_means import PassMetrics
from lockstep.run.metrics.progress_reporter import ProgressReporter, RankWarnings
from lockstep.run.recovery.survivor import Emergency, open_emergency, writes_emergency
from lockstep.run.setup.identity import RunIdentity
from lockstep.run.setup.kernels import Kernels, Precision, number_formats
from lockstep.run.setup.run_checkpoints import DirectoryCheckpointer, RunCheckpointer
from lockstep.run.state.carried_state import CarriedState
from lockstep.run.state.registered import State
from lockstep.run.stopping.leave_agreement import LeaveAgreement
from lockstep.run.stopping.save_stop import SaveStopController
from lockstep.run.stopping.stop_requests import JobDeadline, StopRequests
from lockstep.seeding import seed_of
from lockstep.settings import ResolvedSettings, Settings
from lockstep.step_record import MeasureRequest
from lockstep.strategies import ReplicaAssignment, ServerStrategy, Strategy, StrategyContext, open_strategy
from lockstep.transcript import TranscriptRequest
from lockstep.trial_contract import CHECKPOINTS, CurrentTrial, current_trial, directory_of_run
from lockstep.world import World


class TrainingPlan:
    """The division of a pass's steps into micro-batches, which the strategy asks for while it reduces."""

    def __init__(self) -> None:
        self.plan: BatchPlan | None = None
        self.sizes: dict[str, list[int]] = {}  #: global batch and micro-batch of each loader that was trained on
        self.samples: dict[str, int | None] = {}  #: of an epoch of each such loader

    def micro_batches_of(self, rank: int, micro_batches: int) -> range:
        """The micro-batches that ``rank`` computes in a step of ``micro_batches``."""
        assert self.plan is not None  # the strategy reduces nothing outside of `train`
        return self.plan.run(rank, micro_batches)


#: How many runs this process has opened in the run directory of a launcher's job.
_runs_of_script: Final[dict[str, int]] = {}


@dataclass(frozen=True, slots=True)
class RunContext:
    """The objects and settings that the parts of a run share, from its beginning to its end."""

    resolved: ResolvedSettings
    world: World
    device: torch.device
    threads: int  #: CPU threads of this rank
    marker: ProgressMarker
    deadline: JobDeadline
    reporter: ProgressReporter
    group: Group
    precision: Precision
    kernels: Kernels
    plan: TrainingPlan
    strategy: Strategy
    share: ReplicaAssignment
    directory: str | None  #: of the run or of its checkpoints; None: the run has no directory, or saves nothing
    checkpointer: RunCheckpointer
    warnings: RankWarnings
    stop_requests: StopRequests
    save_stop: SaveStopController
    leaves: LeaveAgreement
    identity: RunIdentity
    state: State
    position: RunPosition
    metrics: PassMetrics
    carried: CarriedState
    inputs: SharedInputs
    emergency: Emergency
    profiler: StepProfiler | None  #: None: no steps are recorded
    measure: MeasureRequest | None  #: what a benchmark measures; None: this is no run of a benchmark
    transcript: TranscriptRequest | None  #: what is recorded to be compared with other runs; None: nothing

    @property
    def settings(self) -> Settings:
        """The values of the settings, without their sources."""
        return self.resolved.values


def set_up(resolved: ResolvedSettings, env: MutableMapping[str, str]) -> RunContext:
    """Find out this process's rank, choose the device, connect to the other ranks. Collective.

    The rank variables that scripts of any launcher know are added to ``env``.

    Raises:
        UsageError: if the script has spawned this process, which is importing the script.
        SettingError: for a value that cannot be used here.
        WorldError: if the environment describes no world, or the ranks do not meet.
        MismatchError: if the ranks have different settings.
    """
    _refuse_child_import()
    if (trial := current_trial()) is not None and trial.repeat:
        # Repeats of all trials have the same seeds, so that compared trials share their luck.
        seed = seed_of(resolved.values.seed, "repeat", trial.repeat)
        resolved = replace(resolved, values=replace(resolved.values, seed=seed))
    settings = resolved.values
    refuse_unknown_trackers(settings.track or "")
    marker = progress_marker()
    marker.set_phase("start")
    job = World.from_env(env)
    world = _world_of_run(job, current_trial())
    device, threads = _prepare_device(settings, world, marker)
    promised, on_cpu = settings.reduction == "exact", device.type == "cpu"
    kernels = Kernels(
        pins=promised and not on_cpu,
        refuses=settings.nondeterministic == "refuse",
        threads=threads if promised and on_cpu else None,
        formats=partial(number_formats, device) if promised else dict,
    )
    kernels.pin()
    deadline = JobDeadline.from_env(env)
    reporter = ProgressReporter(world, env, deadline, marker.memory, is_trial=current_trial() is not None)
    env.update(world.rank_variables())
    shares_gpu = _share_gpus(world, settings.rehearse)
    group = open_group(world, device, settings.peer_timeout_s, shares_gpu=shares_gpu)
    group.check_equal("what Run(...) was given", sorted(resolved.as_dict().items()))
    precision, plan = Precision(settings.precision, device), TrainingPlan()
    context = StrategyContext(
        group=group,
        runs=plan.micro_batches_of,
        exact=settings.reduction == "exact",
        bucket_mb=settings.bucket_mb,
        dtype=precision.dtype,
        rehearse=settings.rehearse,
        free_bytes=lambda: free_bytes(device, world.local_size),
        say=reporter.say,
    )
    strategy = _open_strategy(settings.strategy, context, mirror=settings.mirror)
    share = strategy.assignment
    home = world.run_dir or settings.checkpoint
    measure = MeasureRequest.from_text(env[MEASURE]) if env.get(MEASURE) else None
    transcript = TranscriptRequest.from_text(env[TRANSCRIPT]) if env.get(TRANSCRIPT) else None
    # A measured or compared run is thrown away: such a run saves, logs and resumes nothing.
    is_kept = measure is None and (transcript is None or transcript.saves)
    directory = home if is_kept else None
    checkpointer = (
        _open_checkpointer(settings, world, job, group, strategy, reporter, deadline) if is_kept else RunCheckpointer()
    )
    # The state that a dead rank's survivors leave may be of another trial: a trial goes on from its own checkpoint.
    has_emergency = is_kept and current_trial() is None
    notes = has_emergency and writes_emergency(env, settings, group, strategy)
    metrics = PassMetrics(counts=share.counts, recent=settings.log_every is not None, notes=notes, alike=share.in_step)
    # The stop file of a script's second run is that of its first run.
    of_script = job.run_dir is not None and current_trial() is None and is_kept
    stop_requests = StopRequests(Path((job.run_dir if of_script else directory) or ".", STOP_FILE), deadline)
    if of_script:
        _runs_of_script[job.run_dir or ""] = _runs_of_script.get(job.run_dir or "", 0) + 1
    state = State()
    return RunContext(
        resolved=resolved,
        world=world,
        device=device,
        threads=threads,
        marker=marker,
        deadline=deadline,
        reporter=reporter,
        group=group,
        precision=precision,
        kernels=kernels,
        plan=plan,
        strategy=strategy,
        share=share,
        directory=directory,
        checkpointer=checkpointer,
        warnings=RankWarnings(group, reporter.say, checkpointer.protect_newest),
        stop_requests=stop_requests,
        save_stop=SaveStopController(
            group, settings.save_every, stop_requests.reason, deadline, peer_timeout_s=settings.peer_timeout_s
        ),
        leaves=LeaveAgreement(group, agrees=not isinstance(strategy, ServerStrategy)),
        identity=RunIdentity(settings, threads, device),
        state=state,
        position=RunPosition(settings.seed, settings.best),
        metrics=metrics,
        emergency=open_emergency(settings, env, group, world, strategy, metrics, reporter.say)
        if has_emergency
        else Emergency(),
        inputs=SharedInputs(state, several=group.size > 1, say=reporter.say),
        carried=CarriedState(group, plan.micro_batches_of, has_server_ranks=share.replicas != group.size),
        profiler=None
        if settings.profile is None
        else StepProfiler(settings.profile, Path(home or ".", "profile"), group.rank, device, marker, reporter.say),
        measure=measure,
        transcript=transcript,
    )


def _prepare_device(settings: Settings, world: World, marker: ProgressMarker) -> tuple[torch.device, int]:
    """Choose this rank's device and number of CPU threads, and set torch to both."""
    device = _choose_device(world, settings.rehearse)
    threads = _choose_threads(settings, device)
    torch.set_num_threads(threads)
    if device.type == "cuda":
        marker.memory = partial(gpu_memory, device)
    return device, threads


def _world_of_run(job: World, trial: CurrentTrial | None) -> World:
    """The world of ``job``, with a directory for this run alone: a script or trial may open several runs in turn.

    In a search, the number of a trial's attempt takes the place of the generation.
    """
    if trial is not None:
        directory = directory_of_run(trial.directory, len(trial.reports_of_runs))
        generation = trial.attempt - 1
    elif job.run_dir is not None:
        directory = directory_of_run(Path(job.run_dir), _runs_of_script.get(job.run_dir, 0))
        generation = job.generation
    else:
        return job
    directory.mkdir(parents=True, exist_ok=True)
    return replace(job, run_dir=str(directory), generation=generation)


def _refuse_child_import() -> None:
    """Refuse to open a run in a spawned process, which imports the script and so runs its top level again."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "this process was spawned by the script and imports it, which would open the run once more: put what opens "
            'the run under `if __name__ == "__main__":`, or start the process by fork'
        )


def cpus_of_this_rank() -> int:
    """The number of CPUs for this rank, of those that the job may use on this node."""
    return allotted_cpus(os.environ)


def _open_strategy(spec: str, context: StrategyContext, *, mirror: bool) -> Strategy:
    try:
        strategy = open_strategy(spec, context)
        if mirror and strategy.state_part is None:
            strategy.close()
            raise SettingError(
                f"mirror=True: under strategy={spec!r} a rank cannot tell its part of the state without the others; "
                "leave it out and give save_every=..., or use ddp, zero, fsdp or hsdp"
            )
        return strategy
    except SettingError:
        context.group.close()  # the process may open a run with another strategy
        raise


def _open_checkpointer(
    settings: Settings,
    world: World,
    job: World,
    group: Group,
    strategy: Strategy,
    reporter: ProgressReporter,
    deadline: JobDeadline,
) -> RunCheckpointer:
    # Trials never share a directory, even if the script gives one.
    given = None if current_trial() is not None else settings.checkpoint
    root = given or (world.run_dir and Path(world.run_dir, CHECKPOINTS))
    if root:
        checkpoints = Checkpoints(
            Path(root),
            group,
            keep=settings.keep,
            say=reporter.say,
            peer_timeout_s=settings.peer_timeout_s,
            reads_back=settings.verify_saves,
        )
        try:
            # A run directory names a launcher's job: only one launcher at a time works in it.
            checkpoints.claim((job if current_trial() is None else world).run_dir or "", world.generation)
        except SettingError:
            strategy.close()
            group.close()  # the process may open a run in another directory
            raise
        return DirectoryCheckpointer(checkpoints, reporter.say, deadline)
    if os.environ.get(RESUME) == "1" or settings.save_every is not None:
        raise SettingError(
            "there is no directory for checkpoints to save to or to resume from; "
            "give Run(checkpoint=...), or start the script with lockstep run"
        )
    return RunCheckpointer()


def _choose_threads(settings: Settings, device: torch.device) -> int:
    if settings.threads is not None:
        return settings.threads
    # On a CPU the bits depend on the threads of a rank, whose number must not depend on the number of ranks.
    if device.type == "cpu" and settings.reduction == "exact":
        return 1
    return cpus_of_this_rank()


def _share_gpus(world: World, rehearse: bool) -> bool:
    """Whether ranks share GPUs, on purpose."""
    return rehearse and torch.cuda.is_available() and world.local_size > torch.cuda.device_count()


def _choose_device(world: World, rehearse: bool) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    devices = torch.cuda.device_count()
    # Where a scheduler shows each task only one GPU, this GPU is number 0 for each task.
    index = 0 if devices == 1 else world.local_rank
    if _share_gpus(world, rehearse):
        index %= devices
    if index >= devices:
        raise SettingError(
            f"rank {world.rank} is number {world.local_rank} on this machine, which has {devices} GPUs; "
            f"start at most {devices} ranks here, share them with --rehearse, or hide them with CUDA_VISIBLE_DEVICES="
        )
    device = torch.device("cuda", index)
    try:
        torch.cuda.init()
        torch.cuda.set_device(device)
    except RuntimeError as error:
        raise SettingError(
            f"the driver shows {plural(devices, 'GPU')}, and torch can use none: {str(error).splitlines()[0]}. The "
            "driver may be older than torch's CUDA, or this process a copy of one that had started CUDA. "
            "CUDA_VISIBLE_DEVICES= before the command trains on the CPU"
        ) from error
    return device
