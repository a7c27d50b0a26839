"""What a cluster's scheduler says about a job, and what it is told."""
