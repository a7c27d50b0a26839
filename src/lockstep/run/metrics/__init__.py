"""What a run measures, and who is told.

    run.step, run.measure ──► metric_means ──► run_log ──► metrics.jsonl, trackers, the line on the screen, the search
                                   └──► early_stopping    by which metric a run is ended

`progress_reporter` shows where the run is, and says what ranks other than the leader have found.
"""
