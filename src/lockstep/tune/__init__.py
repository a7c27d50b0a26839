"""`lockstep.tune`: evolutionary search on islands, whose trials are data-parallel runs.

start_search    tune(): starts workers, or is a rank of one; search_settings: what it is set to
search/         spaces, operators, algorithms, islands: pure functions of values    (no files, no torch)
stopping/       rules that stop a trial early, from its reports and those of others
workers/        the processes of a search: who starts them, and what each rank of a worker does
record/         what is written down: append-only files that hold the search, and which worker has which trial
results/        the result of a search, its views while it runs, studies of Optuna
pictures/       drawn
"""

import sys
import types

TYPE_CHECKING = False  # type checkers read it as True by its name

__all__ = [
    "Algorithm",
    "Bool",
    "Choice",
    "Driver",
    "Evaluated",
    "Float",
    "Individual",
    "Int",
    "Islands",
    "Proposal",
    "SearchRequest",
    "SearchResult",
    "Space",
    "StoppingRule",
    "Trial",
    "draw_pictures",
    "enqueue",
    "export_optuna",
    "has_optuna",
    "import_optuna",
    "is_search",
    "join_directory",
    "load",
    "open_directory",
    "show",
    "tune",
    "visible_gpus",
    "watch_directory",
    "worker_sizes",
]

if TYPE_CHECKING:
    from lockstep.tune.pictures import draw_pictures
    from lockstep.tune.record.planned_trials import enqueue
    from lockstep.tune.record.search_directory import is_search, join_directory, open_directory
    from lockstep.tune.record.trial import Trial
    from lockstep.tune.results.importance import has_optuna
    from lockstep.tune.results.optuna_study import export_optuna, import_optuna
    from lockstep.tune.results.result import SearchResult, load
    from lockstep.tune.results.summary import show
    from lockstep.tune.search import Algorithm, Bool, Choice, Float, Individual, Int, Islands, Proposal, Space
    from lockstep.tune.start_search import tune, worker_sizes
    from lockstep.tune.stopping import StoppingRule
    from lockstep.tune.workers.driver import Driver, SearchRequest, visible_gpus, watch_directory
    from lockstep.tune.workers.outcome import Evaluated
else:
    # In the else branch, for a type checker would otherwise take every misspelt name for one that exists.
    import importlib

    _ROOM_OF = {
        "Driver": "workers.driver",
        "Evaluated": "workers.outcome",
        "SearchRequest": "workers.driver",
        "SearchResult": "results.result",
        "StoppingRule": "stopping",
        "Trial": "record.trial",
        "draw_pictures": "pictures",
        "enqueue": "record.planned_trials",
        "export_optuna": "results.optuna_study",
        "has_optuna": "results.importance",
        "import_optuna": "results.optuna_study",
        "is_search": "record.search_directory",
        "join_directory": "record.search_directory",
        "load": "results.result",
        "open_directory": "record.search_directory",
        "show": "results.summary",
        "tune": "start_search",
        "visible_gpus": "workers.driver",
        "watch_directory": "workers.driver",
        "worker_sizes": "start_search",
    }

    class _Tune(types.ModuleType):
        """The package, which is also the function: ``lockstep.tune(objective, space)``."""

        def __call__(self, *args: object, **kwargs: object) -> object:
            """The result of the search over the arguments, which are those of `lockstep.tune.tune`."""
            return self.tune(*args, **kwargs)

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'lockstep.tune' has no attribute {name!r}; it has {', '.join(__all__)}")
        value = getattr(importlib.import_module(f"lockstep.tune.{_ROOM_OF.get(name, 'search')}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return list(__all__)

    sys.modules[__name__].__class__ = _Tune
