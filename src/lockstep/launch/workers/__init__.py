"""The ranks of this node: started, listened to and ended."""
