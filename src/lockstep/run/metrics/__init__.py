"""What a run measures, and who is told.

    run.step, run.measure ──► metric_means ──► run_log ──► metrics.jsonl, trackers, the line on the screen
                                   ├──► early_stopping    by which metric a run is ended
                                   └──► trial_reports     what a search is told

`progress_reporter` shows where the run is, and says what ranks other than the leader have found.
"""
