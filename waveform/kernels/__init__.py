"""The compiled language of the CPU kernels (numba), and kernels that train small models."""
