"""Everything that Lockstep raises, in one tree.

    LockstepError
    ├── SettingError (ValueError)        a setting, option or argument that cannot be used
    ├── PlanError (ValueError)           batch sizes and ranks that do not fit each other
    ├── WorldError (RuntimeError)        the environment does not describe one world, or a rank cannot join it
    │   └── RendezvousError              the ranks of a world do not reach each other
    ├── DataError (ValueError)           a data set that cannot be divided into samples
    ├── UsageError (RuntimeError)        the training loop calls `Run` in an order that would train wrongly
    ├── MismatchError (RuntimeError)     ranks differ where they must be equal
    │   ├── AuditError                   a rank has computed wrong bits, or holds some
    │   └── DifferentCalls               ... in what they call; what they hold may be equal
    ├── NonFiniteError (ArithmeticError) a loss or a gradient is nan or infinite
    ├── PeerLost (RuntimeError)          another rank died, left or does not answer
    ├── TrialStopped                     a search ends a trial early: not an error, but the way out of the objective
    ├── CheckpointError (RuntimeError)   nothing whole to load, or the state does not fit
    │   ├── DamagedCheckpoint            one checkpoint is not what was committed
    │   └── UnreadableCheckpoint         ... or the file system does not give what may be whole
    └── LaunchError (RuntimeError)       ranks could not be started

Each message says what is wrong, with the values, and the way out. Each error is also the builtin named beside it,
so that code which knows nothing of Lockstep can catch it.
"""


class LockstepError(Exception):
    """Whatever this package raises on purpose."""


class SettingError(LockstepError, ValueError):
    """A setting, option or argument cannot be used as given."""


class PlanError(LockstepError, ValueError):
    """Batch sizes and the number of ranks do not fit each other."""


class WorldError(LockstepError, RuntimeError):
    """The environment does not describe one world, or this rank cannot join it."""


class RendezvousError(WorldError):
    """The ranks do not reach each other, such as while a name server is away: it may be otherwise a little later."""


class DataError(LockstepError, ValueError):
    """A data set cannot be divided into the samples that the plan asks for."""


class UsageError(LockstepError, RuntimeError):
    """The training loop calls `Run` in an order that would train something else than it says."""


class MismatchError(LockstepError, RuntimeError):
    """Ranks differ where they must be equal; the message names them."""


class AuditError(MismatchError):
    """Something was computed, or is stored, with wrong bits; the message names rank, host and device.

    Args:
        text: what is wrong.
        accused: the ranks that were wrong; empty where it cannot be told.
        headline: the same in one line.
    """

    def __init__(self, text: str, accused: tuple[int, ...] = (), headline: str = "") -> None:
        super().__init__(text)
        self.accused = accused  #: ranks that were wrong; empty where it cannot be told
        self.headline = headline  #: what is wrong, in one line


class DifferentCalls(MismatchError):
    """Ranks call different things, such as after one of them has left a loop; what they hold may be equal."""


class NonFiniteError(LockstepError, ArithmeticError):
    """A loss or a gradient is not a finite number; the message names step, rank and micro-batch."""


class PeerLost(LockstepError, RuntimeError):
    """Another rank died, left or does not answer: never the first cause of a failure."""


class TrialStopped(LockstepError):
    """A search stops this trial early, on all of its ranks in the same report; the objective should not catch it."""


class CheckpointError(LockstepError, RuntimeError):
    """No whole checkpoint can be loaded, or its state does not fit what it is loaded into."""


class DamagedCheckpoint(CheckpointError):
    """One checkpoint is not what was committed: a part is missing, cut short or changed."""


class UnreadableCheckpoint(CheckpointError):
    """The file system fails to give a checkpoint that may be whole: it may be otherwise a little later."""


class LaunchError(LockstepError, RuntimeError):
    """Ranks could not be started."""
