"""Why a run failed or hangs: heartbeats, stacks and error records in, one cause out.

error_record    the file in which a failing rank writes why it failed
root_cause      the one cause among the ends of all ranks, and the text that says it
hang_monitor    the heartbeats of this node's ranks; when ranks are overdue, `hang_analysis` says who keeps the
                others waiting, and `hang_report` where (`rank_places` for other nodes)
host_memory     the memory of this host, and whether the kernel killed for lack of it
part_monitor    the launcher's own processes, so that no rank is blamed for what befell one of them
"""
