"""Data sets with an index: the samples of each micro-batch, and how samples are read.

orders             a permutation, or what the user's sampler or function gives
sampling           the order divided into steps and micro-batches: pure functions
indexed_loader     this rank's micro-batches, read sample by sample; tensor_dataset: at once, from tensors in memory
"""
