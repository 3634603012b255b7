"""The mirror of metrics.jsonl in wandb and other trackers: while a run trains, and later by `llmexp
sync`. In reading order:

fields   what a run is called there, and how far the mirror has come
mirror   rows on their way, live and afterwards
calls    the calls to wandb, which no other file imports
stores   TensorBoard, MLflow and Trackio: four calls each
opening  rows on their way to one of these; the trackers of a run
sync     the command
"""
