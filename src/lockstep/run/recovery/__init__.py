"""From the death of a rank to the step after it, without a step lost.

    while all is well                (told by loop.train_step and loop.end_of_step)
      resume_point                 does this rank still hold the state of the last finished step, unchanged?
      measures_journal             the measured values of this rank alone, in memory that outlives its process;
      copied_measures              ... and on another host
      mirror                       where a rank alone holds a part of the state: copies of it, here and on another host

    rank 2 is killed
      setup.shutdown               the next collective fails on the others: the error ends the script and closes the run
      survivor                     they hold the last finished step: under one lock per node the first of them writes it
                                   into memory, as a checkpoint; then they end
      emergency_files              the places of these files, and the free memory for them

    the launcher (lockstep.launch), meanwhile
      workers.fork_server          a rank was killed: worker_group and generation note it
      rendezvous.membership        the others are asked to end, by SIGTERM; once all have ended: is a state left, are
                                   restarts left? Then the plan has a next generation
      workers.rank_environment     its ranks start, with RESUME

    the next generation
      newest_state                 chooses the newest complete state among those on all nodes: a pure function; sends
                                   its parts to nodes that lack them
      setup.resume                 begins the resume; setup.run_checkpoints loads that state, or the newest checkpoint
                                   where that is as new, or no state is complete and readable
      survivor                     removes the files of the dead generation two steps later

Decision 0010 gives the reasons for this design.
"""
