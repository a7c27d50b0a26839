"""What is refused or told while a run trains, each check with what to write instead.

divergence        ranks that hold different values
nonfinite         losses and gradients that are not finite
loop_checks       what a body must not do because ranks run it different numbers of times
update_checks     ... and must not do with gradients where ranks divide an update
script_sums       sums and lists of the script that hold one rank's share
script_options    learning rates of a resumed script that differ from those the run began with
outside_forward   methods of a model that do not train
oom_advice        two settings that would fit, where a GPU's memory is full
rank_warnings     what ranks other than the leader have to say
"""
