"""Write and read checkpoints. They hold no pickle and fit any layout of ranks. In reading order:

saving    a snapshot, one file a rank, then the commit: manifest, rename; `Writer`, the thread
loading   the format; the newest whole checkpoint; parameters and optimizer state from its files
"""
