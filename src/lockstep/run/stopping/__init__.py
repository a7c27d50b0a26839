"""Decisions to save and to stop, made for all ranks at once.

a signal, STOP, the end of the job    stop_requests      requests from outside, seen by any rank
step_agreement     the step after which all ranks exchange their requests
save_stop          the decision of all ranks after this step
break, return, sys.exit on a rank     leave_agreement    reported at once, with its line
"""
