"""Data sets without an index: streams, divided among ranks without the data set knowing of ranks.

iterable_dataset      which reader hands out which samples; each reads as if alone
stream_division       an epoch of a stream, divided among ranks
stream_agreement      what each step holds, agreed many steps ahead
iterable_loader       reads here, or ahead of time in loader processes
"""
