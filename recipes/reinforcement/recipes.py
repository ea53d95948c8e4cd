"""The names of the recipes that train agents; light, because command lines are parsed with them."""

OBJECT_MATCHING, GYMNASIUM = "object_matching", "rl"
RECIPES = (OBJECT_MATCHING, GYMNASIUM)
AGENTS_STUDY = "figure5"
