"""Calls `python -m recipes` within the test's process."""

from functools import partial

from recipes.cli import main
from tests import calling

Capsys = calling.Capsys
run = partial(calling.cli, main=main)
figures_of = partial(calling.figures_of, main=main)
printed = partial(calling.printed, main=main)
mistake = partial(calling.mistake, main=main, name="recipes")
