"""Is a script reproducible? It is run unchanged in several ways, and all that it does is compared, step by step.

way               the ways: the same again, ranks, loader processes, resumes, strategies, surroundings
written_run       one of them carried out; script_process: what its ranks begin with
surroundings      clock, host, directory ... of a script, watched and shifted; plain_script: a script without `Run`
difference        what two runs did differently first
reason            why, most likely; script_source: in which line of the script
verification      all of it, and what a script in plain torch would have to change; result: what was found
"""

from lockstep.verify.result import VerifyResult, WayResult, report, verdict
from lockstep.verify.verification import VerifyPlan, verify
from lockstep.verify.way import Varies

__all__ = ["Varies", "VerifyPlan", "VerifyResult", "WayResult", "report", "verdict", "verify"]
