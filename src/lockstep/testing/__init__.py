"""What tests of training code need: real ranks for one function, a hash of what they trained, faults, laws, scripts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from lockstep.faults import FaultPlan
from lockstep.launch import Script
from lockstep.testing.hashes import state_hash
from lockstep.testing.ranks import Outcome, run_each, run_ranks
from lockstep.testing.strategy_laws import StrategyLaws
from lockstep.verify import Varies, VerifyPlan, VerifyResult, report
from lockstep.verify import verify as find_differences

__all__ = ["FaultPlan", "Outcome", "StrategyLaws", "run_each", "run_ranks", "state_hash", "verify"]


def verify(
    path: str | os.PathLike[str],
    *args: str,
    strategies: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
    only: Sequence[Varies] = (),
    time_s: float = 120.0,
) -> VerifyResult:
    """Run the script at ``path`` in several ways; returns what was compared, which was equal.

    As ``lockstep verify``: docs/reproducible.md says what is run and what is compared.

    Args:
        path: of the script.
        args: its own options.
        strategies: that must give the same bits as the script's own.
        settings: for `Run`, over those of the script.
        only: what is varied, beside running it again, such as ``("ranks", "resume")``; (): all.
        time_s: that all of it may take, about.

    Raises:
        AssertionError: if two ways differ, with the table, what differs first and the likely line.
        SettingError: if there is no such script.
        LaunchError: if the script fails as it is, or trains no step.
    """
    plan = VerifyPlan(Script(os.fspath(path), args), tuple(strategies), settings or {}, tuple(only), time_s)
    result = find_differences(plan)
    if not result.is_equal:
        raise AssertionError("\n".join(report(result)))
    return result
