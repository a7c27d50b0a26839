"""When to save and when to stop, decided for all ranks at once.

a signal, STOP, the end of the job    stop_requests      what is asked for from outside, seen by any rank
step_agreement     after which step all ranks exchange what they have seen
save_stop          what all of them do after that step
break, return, sys.exit on a rank     leave_agreement    is told at once, with its line
"""
