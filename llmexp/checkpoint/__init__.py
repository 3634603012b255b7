"""Write and read checkpoints, which hold no pickle and fit any layout of ranks.

In reading order:

folders       names of their folders: what is a checkpoint and what the rest of a killed save
slices        the tensors of a model and its optimizers, and the boxes of them that a rank holds
tensor_files  one file of tensors, hashed while it is written
hashes        damage and change, found by size, sha256 and time; files that are opened once
stored        pieces in files: the index of all, the box that is read
loading       the format, its files and their names; the newest whole checkpoint; filling of tensors
saving        a snapshot, one file a rank, then the commit: manifest, rename
"""
