"""One training run: the loop, and what it needs in memory.

    run          Run: what the user calls; each call goes to one of these folders
    setup        from `Run(...)` to the first loop: devices, registration, resume; and the end of a run
    loop         epochs, micro-batches, steps
    batches      data sets, and micro-batches on their way to the device
    state        what a checkpoint holds
    recovery     from the death of a rank to the step after it
    stopping     when to save and to stop, decided for all ranks at once
    metrics      what is measured, and who is told
    checks       what is refused while a run trains
    proofs       replays, the proof of a resume, the audit
    inputs       what training is computed from, by the script's source
    source       how the script's source is read
    benchmark    what is measured of a run's speed

Each folder's own page says what its files are for.
"""

from lockstep.run.benchmark.measurement import HostWaits
from lockstep.run.checks.oom_advice import free_bytes
from lockstep.run.metrics.metric_means import MetricMeans
from lockstep.run.proofs.replay import Play
from lockstep.run.run import Run

__all__ = ["HostWaits", "MetricMeans", "Play", "Run", "free_bytes"]
