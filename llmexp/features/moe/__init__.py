"""The load of experts in each step: its figures, and the bias that moves by it."""
