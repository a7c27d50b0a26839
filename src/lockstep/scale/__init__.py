"""How many ranks are worth asking for: measuring a script (`bench`), and predicting it elsewhere (`predict`)."""

from lockstep.scale.profile_file import read_profile, write_profile
from lockstep.scale.profile_script import profile_link, profile_script
from lockstep.scale.step_profile import GradientReady, LinkProfile, StepProfile, Timing

__all__ = [
    "GradientReady",
    "LinkProfile",
    "StepProfile",
    "Timing",
    "profile_link",
    "profile_script",
    "read_profile",
    "write_profile",
]
