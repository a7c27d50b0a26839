"""What a search has written down, in files that outlive its workers.

search_directory   the files of a search, which workers run, and how the ranks of a worker died
journal, records   append-only files, one for each worker, and what a line of them says; read by others meanwhile
trial_claims        which worker has which trial
warm_start         what the algorithm knows from other searches
planned_trials     trials that are bound to their numbers before these are claimed
trial              all that is known about one trial
trial_history      trials from the records, in whatever order these are read; when they have become better
"""
