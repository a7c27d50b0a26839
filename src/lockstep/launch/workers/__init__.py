"""The ranks of this node: how they are started, watched and ended."""
