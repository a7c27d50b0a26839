"""What is wrong with a machine, or with a script on several ranks, found by trying: `lockstep doctor`.

    examine, of a machine: ranks are started, see their hosts and each other
      probe            what each rank does        host_facts      what a host is like
      machine_facts    what they have seen        machine_findings   what that means
    examine, of a script: it trains for a minute on two ranks
      script_facts     what they have seen, and what its source says
      script_findings  what that means
      watched          how a script without `Run` is watched
    finding          one finding, and all of them as text, JSON and a block for an issue

Facts are gathered by one file and judged by another: a judgement is a pure function, and needs no GPU to be tested.
"""

from lockstep.doctor.examine import MachineRequest, ScriptRequest, examine_machine, examine_script
from lockstep.doctor.finding import Finding, Report

__all__ = ["Finding", "MachineRequest", "Report", "ScriptRequest", "examine_machine", "examine_script"]
