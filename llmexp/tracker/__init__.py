"""The mirror of metrics.jsonl in wandb: while a run trains, and later by `llmexp sync`.

Read in this order: fields (what a run is called there), position (how far the mirror has come),
mirror (rows on their way), calls (the only file that imports wandb), sync.
"""
