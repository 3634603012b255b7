"""Spikes of the loss, each recorded with its run-up layer by layer, in spikes/STEP.json."""
