"""What a run measures, and who is told.

    run.step, run.measure ──► metric_means ──► run_log ──► metrics.jsonl, trackers, the line on the screen
                                   ├──► best, early_stopping    by which metric a run is judged
                                   └──► trial_reports           what a search is told

`progress_reporter` shows where the run is.
"""
