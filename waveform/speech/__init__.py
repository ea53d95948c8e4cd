"""The domain of speech: its settings, data sets, trained runs and figures."""
