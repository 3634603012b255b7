"""Record the commit, uncommitted changes, packages and drivers that a run came from."""
