"""Settings for every test: one thread (the models are tiny, threads cost more than they save); the same examples."""

import hypothesis
import torch

torch.set_num_threads(1)
# A failure must be the fault of what changed, not of the day; deadlines would fail on a busy machine.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")
