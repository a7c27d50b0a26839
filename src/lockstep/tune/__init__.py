"""`lockstep.tune`: evolutionary search on islands, whose trials are data-parallel runs.

search/           spaces, operators, algorithms, islands: pure moves over values      (no files, no torch)
trial             what is known of one trial
journal           append-only files, one for each worker: the truth about a search
stopping/         rules that end a trial early, decided from its reports and those of others
workers, driver   worlds of k ranks that evaluate trials; who starts and watches them
result, summary   what came out: the best trials, counts, failures
views             a search while it runs: tables on a terminal, lines in a log
pictures/         progress, timeline, parallel coordinates, importance, descent
optuna_study      searches as studies of Optuna, and back
"""

from lockstep.tune.optuna_study import export_optuna, import_optuna
from lockstep.tune.pictures import draw_pictures
from lockstep.tune.result import SearchResult, load
from lockstep.tune.summary import show

__all__ = ["SearchResult", "draw_pictures", "export_optuna", "import_optuna", "load", "show"]
