"""The script as text: the variables that its lines read and write, and the functions that they run.

    variable_names ─┐                     a name that stands for several things in a function: a name for each
    source_paths ───┴► source_reads       what a function computes its values from: paths, calls
    source_reads ──► script_places        values that outlive a body: variables, and attributes of what they hold
             └─────► decided_tests        tests that are decided for the whole run, so that a branch is never taken
    script_functions ──► script_callees   which functions run where an object is called, by name or as a callback
                          └─ line_calls      ... as seen while a body ran: the source does not name all of them

`reachable` is what the script's objects hold, and what of that has changed between two looks.
"""
