"""Compiled kernels for CPUs (numba), for training and sampling; those in fp32 use the instructions of vectors.py."""
