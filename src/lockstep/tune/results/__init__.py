"""What came of a search: `result`, `summary`; its views while it runs: `live_views`, `terminal_view`.

`importance` says which parameters matter. `optuna_study` exports a search to Optuna and imports a study.
"""
