"""``lockstep run --fit``: the micro-batch that a run is started with."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from lockstep.errors import SettingError

if TYPE_CHECKING:
    from lockstep.launch import Module, Script


def fitting_micro_batch(parsed: argparse.Namespace, program: Script | Module, settings: Mapping[str, str]) -> str:
    """The largest micro-batch that fits on this machine, found by short runs of ``program``; says so on stderr.

    Args:
        parsed: the command line of ``lockstep run``.
        program: what it starts.
        settings: what it sets.

    Raises:
        SettingError: where there is nothing to find, or nothing fits.
    """
    # Late, for what it loads is needed only from here on.
    from lockstep.launch import Machine, Request, ranks_of
    from lockstep.scale import fit_micro_batch

    for given, why in (
        ("micro_batch" in settings, "micro_batch is given by --set"),
        (parsed.resume or parsed.resume_from is not None, "a resumed run keeps its micro_batch"),
        (parsed.requeue, "a job that is requeued keeps its micro_batch"),
        (parsed.nnodes != "1", "it is found on one machine; find it there, and give --set micro_batch= on all of them"),
    ):
        if given:
            raise SettingError(f"--fit: {why}")
    request = Request(program, nproc_per_node=parsed.nproc_per_node)
    ranks, _ = ranks_of(request, Machine.detect(os.environ), os.environ)
    return str(fit_micro_batch(program, ranks, settings, partial(print, file=sys.stderr, flush=True)))
