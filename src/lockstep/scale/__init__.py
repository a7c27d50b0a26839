"""How many ranks are worth asking for: measuring a script (`bench`), and predicting it elsewhere (`predict`)."""

from lockstep.scale.bench import BenchPlan, bench, look
from lockstep.scale.bench_picture import draw
from lockstep.scale.bench_result import BenchResult
from lockstep.scale.bench_table import table
from lockstep.scale.catalogue import open_catalogue
from lockstep.scale.find_setting import find
from lockstep.scale.find_setting import report as found_report
from lockstep.scale.measured_run import FailedRun
from lockstep.scale.memory_need import memory_table
from lockstep.scale.profile_file import read_profile, write_profile
from lockstep.scale.profile_script import profile_link, profile_script
from lockstep.scale.rows import Prices
from lockstep.scale.step_profile import GradientReady, LinkProfile, StepProfile, Timing
from lockstep.scale.sweep import Sweep
from lockstep.scale.trace_run import trace

__all__ = [
    "BenchPlan",
    "BenchResult",
    "FailedRun",
    "GradientReady",
    "LinkProfile",
    "Prices",
    "StepProfile",
    "Sweep",
    "Timing",
    "bench",
    "draw",
    "find",
    "found_report",
    "look",
    "memory_table",
    "open_catalogue",
    "profile_link",
    "profile_script",
    "read_profile",
    "table",
    "trace",
    "write_profile",
]
