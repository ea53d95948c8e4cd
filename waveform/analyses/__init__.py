"""What trained runs attend to, how well they compress, how far back they look, and what carrying state saves.

Tokens and runs of any modality come in, plain figures go out; `report` runs all of it and writes JSON and a PNG.
"""
