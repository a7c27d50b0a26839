"""`lockstep.tune`: evolutionary search on islands, whose trials are data-parallel runs.

search/           spaces, operators, algorithms, islands: pure moves over values      (no files, no torch)
trial             what is known of one trial
journal           append-only files, one for each worker: the truth about a search
stopping/         rules that end a trial early, decided from its reports and those of others
workers, driver   worlds of k ranks that evaluate trials; who starts and watches them
result, pictures  what came out
"""
