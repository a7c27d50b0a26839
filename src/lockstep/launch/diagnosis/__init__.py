"""Why a run failed or hangs: heartbeats, stacks and error records in, one cause out."""
