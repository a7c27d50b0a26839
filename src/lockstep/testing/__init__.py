"""What tests of training code need: real ranks for one function, a hash of what they trained, faults, laws, scripts."""

from lockstep.faults import FaultPlan
from lockstep.testing.hashes import state_hash
from lockstep.testing.ranks import Outcome, run_each, run_ranks
from lockstep.testing.strategy_laws import StrategyLaws
from lockstep.testing.verified import verify

__all__ = ["FaultPlan", "Outcome", "StrategyLaws", "run_each", "run_ranks", "state_hash", "verify"]
