"""The mirror of metrics.jsonl in wandb: while a run trains, and later by `llmexp sync`. In reading
order:

fields    what a run is called there
position  how far the mirror has come
mirror    rows on their way, live and afterwards
calls     the calls to wandb, which no other file imports
sync      the command
"""
