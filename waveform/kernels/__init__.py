"""Kernels for CPUs (numba), in training and in sampling, in one language of vectors."""
