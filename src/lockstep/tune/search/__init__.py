"""Search algorithms as pure moves: spaces, populations, operators, islands. No files, no ranks, no torch."""
