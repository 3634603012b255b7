"""Sweeps: points, their ledger, and where they run (this machine, Slurm, Ray)."""
