"""Data-parallel PyTorch training whose result does not depend on how many ranks computed it.

The front door: each name stands in the room that makes it, and a room is loaded when its name is first asked for, so
that ``import lockstep`` costs nothing and needs no torch.
"""

import os

# Else `torch.cuda.is_available()` starts CUDA in this process, and its copies, such as the ranks of a notebook, see no
# GPU.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# Torch asks for it once, before the first product of matrices on a GPU, which may stand before `Run(...)`: without it
# cuBLAS gives other bits each time, and torch refuses it in strict backward passes.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

__version__ = "0.1.0"

__all__ = [
    "AuditError",
    "BatchPlan",
    "CheckpointError",
    "DamagedCheckpoint",
    "DataError",
    "DifferentCalls",
    "LaunchError",
    "LockstepError",
    "MismatchError",
    "NonFiniteError",
    "PeerLost",
    "PlanError",
    "Progress",
    "RendezvousError",
    "Run",
    "SettingError",
    "TrialStopped",
    "UnreadableCheckpoint",
    "UsageError",
    "World",
    "WorldError",
    "__version__",
    "launch",
    "load",
    "metrics",
    "tune",
]

TYPE_CHECKING = False  # type checkers read it as True by its name; importing it would be most of this module's cost

if TYPE_CHECKING:
    from lockstep.batch import BatchPlan
    from lockstep.errors import (
        AuditError,
        CheckpointError,
        DamagedCheckpoint,
        DataError,
        DifferentCalls,
        LaunchError,
        LockstepError,
        MismatchError,
        NonFiniteError,
        PeerLost,
        PlanError,
        RendezvousError,
        SettingError,
        TrialStopped,
        UnreadableCheckpoint,
        UsageError,
        WorldError,
    )
    from lockstep.launch import launch
    from lockstep.progress import Progress
    from lockstep.run import Run
    from lockstep.saved_run import load, metrics
    from lockstep.tune import tune
    from lockstep.world import World
else:
    # In the else branch, for a type checker would otherwise take every misspelt name for one that exists.
    import importlib
    import sys
    import types

    _ROOM_OF = {
        "BatchPlan": "batch",
        "Progress": "progress",
        "Run": "run",
        "World": "world",
        "launch": "launch",
        "load": "saved_run",
        "metrics": "saved_run",
        "tune": "tune",
    }

    class _FrontDoor(types.ModuleType):
        """A package whose names are never taken by a room: `launch` stays the function when its room is loaded."""

        def __setattr__(self, name: str, value: object) -> None:
            # Python binds each submodule in its package once it is imported. One that can be called is the name itself.
            if not (name in __all__ and isinstance(value, types.ModuleType)) or callable(value):
                super().__setattr__(name, value)

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'lockstep' has no attribute {name!r}; it has {', '.join(__all__)}")
        room = importlib.import_module(f"lockstep.{_ROOM_OF.get(name, 'errors')}")
        value = room if callable(room) else getattr(room, name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return list(__all__)

    sys.modules[__name__].__class__ = _FrontDoor
