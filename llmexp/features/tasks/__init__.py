"""Scores of tasks of multiple choice, while a run trains; the package `tasks` scores them."""
