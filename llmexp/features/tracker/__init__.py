"""The rows of a run in wandb and other trackers, sent while it trains.

assembly   refuses trackers that cannot be used
"""
