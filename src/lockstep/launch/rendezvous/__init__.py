"""How the launchers of several nodes agree on one job."""
