"""Records of ranks, made up for tests."""

from lockstep.step_record import RankRecord, StepTimes


def step_of(number=0, *, data=0.002, forward=0.004, backward=0.006, exposed=0.001, cpu=None, began=None, **more):
    """A step of one micro-batch."""
    compute = forward + backward
    total = data + compute + exposed + 0.002
    values = {
        "step": number,
        "samples": 32,
        "began_s": number * total if began is None else began,
        "begins_pass": number == 0,
        "data_s": (data,),
        "forward_s": (forward,),
        "backward_s": (backward,),
        "exposed_s": exposed,
        "optimizer_s": 0.0015,
        "other_s": 0.0005,
        "cpu_s": compute if cpu is None else cpu,
    }
    return StepTimes(**{**values, **more})


def record_of(rank=0, steps=(), ranks=2, **more):
    """What a rank has seen of a small model."""
    values = {
        "rank": rank,
        "ranks": ranks,
        "host": "a",
        "device": "Some CPU",
        "on_gpu": False,
        "threads": 1,
        "backend": "gloo",
        "strategy": "ddp",
        "precision": "fp32",
        "global_batch": 32,
        "micro_batch": 8,
        "steps_per_epoch": 10,
        "epochs": 2,
        "began_at": 1e9,
        "steps": tuple(steps),
        "parameter_bytes": 4_000_000,
        "gradient_bytes": 4_000_000,
        "buffer_bytes": 100,
        "optimizer_bytes": 8_000_000,
        "peak_bytes": 300_000_000,
        "activation_bytes": 80_000,
        "largest_layer_bytes": 1_000_000,
    }
    return RankRecord(**{**values, **more})
