"""What `lockstep run` and the ranks it starts agree on: names of variables and files, exit codes, a signal, words.

`run` and `launch` never import each other; both import this.
"""

import signal
import zlib

RUN_ID = "LOCKSTEP_RUN_ID"  #: names the run, through all its generations; set for every rank of `lockstep run`
RUN_DIR = "LOCKSTEP_RUN_DIR"  #: directory of the run's records, logs and checkpoints
GENERATION = "LOCKSTEP_GENERATION"  #: worlds that this run had before this one
RESUME = "LOCKSTEP_RESUME"  #: "1": load the newest whole checkpoint
RESUME_FROM = "LOCKSTEP_RESUME_FROM"  #: "best", or a step: load that checkpoint, and set later ones aside
FRESH = "LOCKSTEP_FRESH"  #: "1": start over, whatever checkpoints there are
STATUS = "LOCKSTEP_STATUS"  #: path where the leader writes its progress instead of drawing it
ENDS_AT = "LOCKSTEP_ENDS_AT"  #: when the job that holds this run ends, in seconds since 1970
FAILURE = "LOCKSTEP_FAILURE"  #: path where a failing rank writes its failure record
BIND = "LOCKSTEP_BIND"  #: "1": each rank keeps to its own part of the CPUs
CHANNEL = "LOCKSTEP_CHANNEL"  #: where a rank sends its heartbeats: path of a datagram socket, or host:port for UDP
FAULTS = "LOCKSTEP_FAULTS"  #: what is to go wrong on purpose, in the words of `lockstep.faults.FaultPlan`
STACKS = "LOCKSTEP_STACKS"  #: path where a rank writes the stacks of all its threads when it gets `STACKS_SIGNAL`
MEASURE = "LOCKSTEP_MEASURE"  #: what a benchmark has each rank measure, see `lockstep.step_record.MeasureRequest`
TRANSCRIPT = (
    "LOCKSTEP_TRANSCRIPT"  #: what each rank writes down of its steps, see `lockstep.transcript.TranscriptRequest`
)
BARE = "LOCKSTEP_BARE"  #: "1": `lockstep run` takes no options from files, as where another command starts it
PROJECT_SETTINGS = "LOCKSTEP_PROJECT_SETTINGS"  #: what the files said of settings when the launcher started, as JSON
PROJECT = "LOCKSTEP_PROJECT"  #: the file with the project's defaults; empty: there is none; unset: the nearest one
LAUNCHER = "LOCKSTEP_LAUNCHER"  #: name of the row of `LAUNCHERS` to believe, where two contradict each other
SEARCH = "LOCKSTEP_SEARCH"  #: of which search, and which of its workers, this rank is one; set by `lockstep tune`

EMERGENCY = "LOCKSTEP_EMERGENCY_MEMORY"  #: directory in this host's memory where survivors of a dead rank leave a state
#: In that directory: the name of the directory of a generation, which is its number and a mark of its own.
GENERATION_FILES = "{run}-generation-{generation}"
LEFT_STATE = "left-state"  #: in the directory of a generation: a file; its survivors have left their state
SAVE_ONLY = "LOCKSTEP_SAVE_ONLY"  #: this generation saves what survivors left, and no more; why, in words

#: In messages of a rank, and of the launcher, about a value that a script prints of one rank's bodies alone.
OWN_MICRO_BATCHES = "each rank has its own micro-batches"

TERMINAL = "LOCKSTEP_TERMINAL"  #: path of the terminal of a rank that has one

PRIVATE = "lockstep-"  #: what the name of the launcher's own temporary directory begins with, which holds that socket
RANK_FILES = "rank-"  #: in that directory: what the name of the directory for a rank's temporary files begins with
STOP_REASON = "stop-reason"  #: beside the socket of `CHANNEL`: a file that says why the launcher asks for a stop
LOST_ADDRESSES = "lost-addresses"  #: beside it: a file with the addresses of hosts that are lost, one a line
RUN_FILE = "run.json"  #: in the run directory: the file by which one recognizes it
LOCK_FILE = ".lock"  #: in the run directory: the launcher that works there holds the lock on it
STOP_FILE = "STOP"  #: in the run directory: a file of this name asks the run to save and stop
FAULT_NOTES = "faults.txt"  #: in the run directory: a line for each fault on purpose, before it happens

EXIT_OK = 0
EXIT_FAILED = 1  #: a rank failed
EXIT_USAGE = 2  #: options or configuration that cannot be used
EXIT_BLOCKED = 3  #: of `lockstep doctor`: it has found what prevents a training, or makes it wrong
EXIT_NOT_SAVED = 74  #: trained to the end, but the last step is in no checkpoint, though checkpoints were asked for
EXIT_STOPPED = 75  #: stopped with a complete checkpoint: run again to resume
EXIT_TIMEOUT = 124  #: nodes that were waited for did not come in time
EXIT_INTERRUPTED = 130  #: Ctrl-C, without a checkpoint
EXIT_KILLED = 137  #: a rank was killed by the system
EXIT_TERMINATED = 143  #: SIGTERM, without a checkpoint: as for any signal, 128 more than its number

#: Signals that ask the whole run to stop. Schedulers send most of them as a warning before the end of a job, some of
#: them to each process.
STOP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)

#: Asks a process for its stacks. Not a signal that schedulers and users send to a job.
STACKS_SIGNAL: int = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2

# Below the range from which Linux hands out ports by itself, above those of the usual services.
_FIRST_PORT, _PORTS = 16384, 16384


def job_port(job: str) -> int:
    """The port at which processes of ``job`` meet that cannot tell each other one: the same for all of them.

    Two jobs on one node most often get different ones.
    """
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS
