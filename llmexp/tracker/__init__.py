"""Mirror metrics.jsonl in wandb and other trackers: while a run trains, and later by `llmexp sync`.

In reading order:

fields  what a run is called there, and how far the mirror has come
stores  four calls for any tracker; TensorBoard, MLflow and Trackio
wandb   the same four calls; no other file but compare/projects imports wandb
mirror  rows on their way, live and afterwards; the trackers of a run
answer  the answer of a sweep, the verdicts in its runs' summaries, a saved workspace
sync    the command: which runs lack what; `mirror` sends it
"""
