"""Data sets without an index: streams, divided among ranks without the data set knowing of ranks.

iterable_dataset      the readers and their samples; single_process_view: each reads as if alone
stream_division       an epoch of a stream, divided among ranks
stream_agreement      the samples of each step, agreed on many steps ahead
stream_epoch          how a stream is told its epoch
iterable_loader       reads in this process, or ahead of time in loader processes
"""
