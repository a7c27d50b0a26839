"""Components that several strategies share.

a model comes in      initial_values          the values that one rank would draw, or a file's
module_states           rank 0's values on every rank; differing models are refused
stage_sequence          a model given as a list of stages
forward               buffers                 moved by the mean over the step, as one rank would move them
batchnorm               statistics over all ranks, where that is asked for
random_state            generators, saved and restored
backward              gradient_accumulation   sums along the tree, micro-batch by micro-batch
sparse_gradients        gradients of which only some rows are there
grad_norm               the norm of all gradients, wherever they lie
multi_gpu               models that lie on several GPUs of a rank
a checkpoint          state_layout            which rank holds what; row_shard: some rows of a table
"""
