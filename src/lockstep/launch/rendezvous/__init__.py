"""How the launchers of several nodes agree on one job. On one machine the launcher agrees with itself.

join                 how this launcher takes part: alone, as coordinator, or following one (`job_contract`: if both
                     have the same job and secret); `endpoint` is where they meet
store                the reports of all nodes, and the plan: a dict on one machine, else torch's TCPStore
                     (`store_connection`, `tcp_store_client`)
membership           decides, on the coordinator, what all nodes do next: `plan`; `membership_state` is all that it
                     remembers, `notices` what it announces
connection           what a node makes of the silence of the coordinator
lease, takeover      who coordinates when the coordinator's host is lost
"""
