"""Why eight V100 were little faster than four: DeepLabV3-ResNet101 over gloo, by the simulator.

python benchmarks/spell.py

The Spell benchmark trained it on PASCAL VOC with 8 images a GPU, gloo between the GPUs of one machine, and a loader in
the training process: 14.8 images/s on one V100, 2.90 times that on four, 3.61 times on eight (rows of
benchmarks/published/scaling.csv). It shows that the mechanism suffices, and is no prediction: two numbers were chosen
after looking at its rows of four and eight GPUs. The bandwidth of gloo through the host's memory (`host-gloo` in the
catalogue) was lowered from 3.0 to 1.6 GB/s, which is within the 1.3 to 1.9 GB/s that were measured, on another machine;
and that an image takes 10 ms to load is assumed.
"""

from dataclasses import replace

from lockstep.scale import SimulatedStrategy, StepTime, open_catalogue, parse_system, simulate
from lockstep.scale.published import PublishedRow
from lockstep.scale.simulator import alone_s
from lockstep.scale.step_profile import MIB, Timing
from lockstep.scale.table_prediction import profile_of

PUBLISHED = {4: 2.90, 8: 3.61}
BATCH, RATE, PARAMETERS, LOADING_S = 8, 14.8, 61e6, 0.010


def speed_up(ranks: int) -> tuple[float, StepTime]:
    """Of so many V100 over one, and the step."""
    row = PublishedRow(
        *(2, "", "", "DeepLabV3-ResNet101", PARAMETERS, "", "FP32", "V100", 1, 1, "", ""),
        *(float(BATCH), None, "", None, "img/s", "", "", ""),
    )
    loading = BATCH * LOADING_S
    profile = replace(profile_of(row, BATCH / RATE - loading), data=Timing(loading, loading, loading))
    system = parse_system(f"{ranks}xV100-host-gloo", open_catalogue())
    ddp = SimulatedStrategy("ddp", reduction="fast", first_bucket_bytes=MIB)
    step = simulate(profile, system, ddp)
    return ranks * alone_s(profile) / step.seconds, step


def main() -> None:
    """Print speed-ups, and where the step's time goes."""
    for ranks, published in PUBLISHED.items():
        found, step = speed_up(ranks)
        parts = ", ".join(f"{part} {1000 * seconds:.0f} ms" for part, seconds in step.parts.items() if seconds > 5e-4)
        print(f"{ranks} V100: {found:.2f}x, published {published:.2f}x; {parts}")


if __name__ == "__main__":
    main()
