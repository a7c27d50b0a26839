"""The files of a run, on disk and in memory.

run_directory      logs, record, checkpoints; checked before any rank starts
owned_directory    directories of the launcher's own, such as that in memory in which survivors leave the state of the
                   last finished step; the next launcher removes them if this one is killed
"""
