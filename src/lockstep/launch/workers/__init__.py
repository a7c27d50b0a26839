"""The ranks of this node: how they are started, watched and ended.

WorkerGroup(...)    fork_server_client   starts the fork server, which imports torch while the nodes still meet
start(plan)         rank_environment     torchrun's variables and our own, for each rank
                    tcp_store            where the ranks meet, in a process of its own
                    fork_server          starts each rank as a copy of itself: `rank_process`, from the first line of
                                         the script to the record of its error
poll()              fork_server_client   what has happened to the ranks (`fork_messages`): one has ended ...
                    generation           ... which this notes; `rank_exits` finds out why, once all have ended
                    rank_messages        what ranks tell the launcher while they run, and notes for them
                    rank_output          the log of the leader on the screen (`log_stream`: how ranks write it)
                    output_comparison    ... and whether another rank has printed other numbers
stop(mode)          worker_group         SIGTERM or SIGINT, and SIGKILL for those that stay
"""
