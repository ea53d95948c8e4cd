"""Agents that learn from rewards: the environment, the agent, V-trace, actors, learner, evaluation and drawing.

Other packages read these names without loading agents, so nothing is imported here.
"""

OBJECT_MATCHING, GYMNASIUM = "object_matching", "rl"
RECIPES = (OBJECT_MATCHING, GYMNASIUM)
AGENTS_STUDY = "figure5"
