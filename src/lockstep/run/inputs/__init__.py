"""The inputs of a training: which variables of the script decide a loss or an update, found in the source.

    given            what the script gives to the run: losses, changes of what is trained
    input_follower   ... is followed back, through functions and methods, to where a value comes from:
                       input_places    the places that were found, each with its line
                       body_changes    those that a body changes itself
    training_inputs  all of it for the loop that the script is in; refuses what is computed from the number of ranks
                     ... and the same look at what the loop over `Run.evaluate` measures
    shared_inputs    the places must hold the same on all ranks

Decision 0015 says why the source is read.
"""
