"""What a run has logged, for comparing two runs."""

from lockstep.report import MetricsFile


def metric_lines(run_dir):
    """The lines of the run's metrics.jsonl, without the times."""
    return [
        {name: v for name, v in row.items() if name != "wall_s"} for row in MetricsFile.read(run_dir / "metrics.jsonl")
    ]
