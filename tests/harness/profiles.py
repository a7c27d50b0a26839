"""Profiles for tests of predictions."""

from dataclasses import replace

from lockstep.scale import GradientReady, StepProfile, Timing


def steady(seconds, cv=0.0):
    """A duration with the coefficient of variation ``cv``."""
    half = 2.563 / 2 * cv * seconds
    return Timing(seconds, seconds - half, seconds + half)


def profile(
    *,
    gradients=20,
    size=4_000_000,
    forward=0.1,
    backward=0.2,
    optimizer=0.01,
    data=0.0,
    cv=0.0,
    micro_batches=1,
    **more,
):
    """A step whose gradients of ``size`` bytes become ready evenly within the backward pass."""
    ready = tuple(GradientReady(f"g{n}", size, backward * (n + 1) / gradients) for n in range(gradients))
    made = StepProfile(
        script="train.py",
        device="NVIDIA A100-SXM4-80GB",
        precision="fp32",
        global_batch=32 * micro_batches,
        micro_batch=32,
        micro_batches=micro_batches,
        steps=30,
        data=steady(data, cv),
        forward=steady(forward, cv),
        backward=steady(backward, cv),
        optimizer=steady(optimizer),
        other=steady(0.0),
        gradients=ready,
        parameter_bytes=gradients * size,
        optimizer_bytes=2 * gradients * size,
        peak_bytes=None,
    )
    return replace(made, **more)
