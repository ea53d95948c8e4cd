"""What trained runs attend to, how well they compress, how far back they look, and what carrying state saves.

Runs and tokens of any modality come in, plain figures go out. `waveform/verbs/analyse.py` runs all of it.
"""
