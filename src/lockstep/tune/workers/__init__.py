"""The processes of a search.

driver             starts the workers of this machine and watches them
search_worker      the leader of one worker: chooses the next trial (breeding), writes down what happens to it
trial_ranks        each rank of a worker: evaluates one trial after another
outcome            how an objective ended on one rank: with losses, or with the reason why there are none
trial_channel      how the ranks of a worker agree on a trial and its outcome; signals that ask it to stop
"""
