"""From the death of a rank to the step after it, without a step lost.

    while all is well
      resume_point                 does this rank still hold the state of the last finished step, unchanged?
      measures_journal             the measured values of this rank alone, in memory that outlives its process;
      copied_measures              ... and on another host
      mirror                       where a rank alone holds a part of the state: copies of it, here and on another host

    rank 2 is killed
      survivor                     the next collective fails on the others. They hold the last finished step: under one
                                   lock per node the first of them writes it into memory, as a checkpoint
      emergency_files              the places of these files, and the free memory for them
                                   then they end; the launcher starts all ranks of the next generation

    the next generation
      newest_state                 chooses the newest complete state among those on all nodes: a pure function; sends
                                   its parts to nodes that lack them
      setup.resume                 loads that state, or the newest checkpoint where no state is complete
      survivor                     removes the files of the dead generation two steps later

Decision 0010 gives the reasons for this design.
"""
