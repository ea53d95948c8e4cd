"""Naive implementations, written from the papers, that the models are compared with."""
