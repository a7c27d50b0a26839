"""This machine, and its processes.

machine            CPUs, GPUs and ports; on which GPUs ranks run: those that computed wrong bits are left out
procfs             what Linux says of a process
child_process      processes that end with their parent
timed_calls        calls that may block for ever, made in threads
"""
