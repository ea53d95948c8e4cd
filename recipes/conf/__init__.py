"""Hydra configs of the text recipes; see `recipes/text.py`."""
