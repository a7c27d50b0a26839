"""The files of a run, on disk and in memory.

run_directory      logs, record, checkpoints; checked before any rank starts
memory_files       the directory in memory in which survivors leave the state of the last finished step
owned_directory    directories outside of the run directory, which the next launcher removes if this one is killed
"""
