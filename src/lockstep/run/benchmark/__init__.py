"""Measurements of a run's speed, only for `lockstep bench`, `doctor` or a profile.

measurement       some steps of the user's own script, and then the run ends
                  ... and where the script has the host wait for a device
step_recorder     where the time of each step went
torch_profiler    `profile="steps 10:20"`: one trace per rank
idle_devices      the one line that says what would use CPUs or GPUs that lie idle
"""
