"""Where a run came from, in its folder: commit, uncommitted changes, packages, drivers."""
