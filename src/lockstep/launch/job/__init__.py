"""What is started: the user's request, and the program, looked at before any rank starts.

request            how many ranks, where, with which settings and limits
program            is the script there, can it be read, what is it asked?
program_sources    its files, so that nodes can compare them
quiet_run          one run beside others, as `bench`, `verify` and `doctor` start it
"""
