"""How many ranks are worth asking for: measuring a script (`bench`), and predicting it elsewhere (`predict`)."""

from lockstep.scale.bench import BenchPlan, bench, look
from lockstep.scale.bench_report import draw, table
from lockstep.scale.bench_result import BenchResult, Prices
from lockstep.scale.catalogue import open_catalogue
from lockstep.scale.find_setting import find
from lockstep.scale.find_setting import report as found_report
from lockstep.scale.fit import divisors, fit_micro_batch
from lockstep.scale.links import Link
from lockstep.scale.measured_run import FailedRun, MeasuredRun, Records, measure
from lockstep.scale.memory_need import memory_table
from lockstep.scale.predict import PredictionRequest, cheapest_within, fastest_within, predict, side_by_side, what_if
from lockstep.scale.predict_report import (
    basis,
    choice,
    compared,
    draw_estimates,
    draw_table,
    estimates_table,
    largest,
    rows_summary,
    rows_table,
    why_not,
)
from lockstep.scale.profile_script import profile_link, profile_script
from lockstep.scale.published import read_rows
from lockstep.scale.scaling_loss import shipped_loss
from lockstep.scale.simulated_strategy import SimulatedStrategy
from lockstep.scale.simulator import StepTime, StrategyCost, simulate
from lockstep.scale.step_profile import GradientReady, LinkProfile, StepProfile, Timing, read_profile, write_profile
from lockstep.scale.sweep import Sweep
from lockstep.scale.systems import System, parse_system
from lockstep.scale.table_prediction import predict_table
from lockstep.scale.trace_run import trace

__all__ = [
    "BenchPlan",
    "BenchResult",
    "FailedRun",
    "GradientReady",
    "Link",
    "LinkProfile",
    "MeasuredRun",
    "PredictionRequest",
    "Prices",
    "Records",
    "SimulatedStrategy",
    "StepProfile",
    "StepTime",
    "StrategyCost",
    "Sweep",
    "System",
    "Timing",
    "basis",
    "bench",
    "cheapest_within",
    "choice",
    "compared",
    "divisors",
    "draw",
    "draw_estimates",
    "draw_table",
    "estimates_table",
    "fastest_within",
    "find",
    "fit_micro_batch",
    "found_report",
    "largest",
    "look",
    "measure",
    "memory_table",
    "open_catalogue",
    "parse_system",
    "predict",
    "predict_table",
    "profile_link",
    "profile_script",
    "read_profile",
    "read_rows",
    "rows_summary",
    "rows_table",
    "shipped_loss",
    "side_by_side",
    "simulate",
    "table",
    "trace",
    "what_if",
    "why_not",
    "write_profile",
]
