"""The measured values of a run, and their receivers.

    run.step, run.measure ──► metric_means ──► run_log ──► metrics.jsonl, trackers, the line on the screen, the search
                                   └──► early_stopping    by which metric a run is ended

`progress_reporter` shows the run's progress, and prints warnings of ranks other than the leader.
"""
