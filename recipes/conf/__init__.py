"""Hydra configs of the text recipes; see `recipes/settings.py`."""
