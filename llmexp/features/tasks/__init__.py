"""Scores of tasks of multiple choice, while a run trains; the room `tasks` scores them."""
