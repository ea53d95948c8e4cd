"""Compiled kernels for CPUs (numba), for training and for sampling, written in the instructions of vectors.py."""
