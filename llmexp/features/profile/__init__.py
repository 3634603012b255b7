"""A trace of some steps by torch's profiler."""
