"""Agents that learn from rewards: the environment, the agent, V-trace, actors, learner, evaluation and drawing."""
