"""Runs in, an answer out: reading run folders, statistics, tables, pictures and a page. No torch,
no Hydra."""
