"""Proofs, while a run trains, that its bits do not depend on interruptions or on the number of ranks.

    replay            a micro-batch that is computed again has the same bits, here or on another rank
    replay_series     ... also many times over, in the first step: the body of the loop is made a function,
                      script_snapshot puts the script's objects back, and the sums in its variables
    resume_proof      the first step after a resume is the one that followed the checkpoint; script_state: so is what
                      variables of the script hold
    audit             a micro-batch is computed on two ranks now and then, so that wrong hardware shows itself
    transcript_writer a run records its steps, for `lockstep verify` to compare

Decisions 0013 and 0016 give the reasons for trying bodies.
"""
