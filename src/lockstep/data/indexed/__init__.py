"""Data sets with an index: which samples each micro-batch holds, and how they are read.

orders             a permutation, or what the user's sampler or function gives
sampling           the order divided into steps and micro-batches: pure functions
indexed_loader     reads them: tensor_dataset whole micro-batches, map_dataset sample by sample
"""
