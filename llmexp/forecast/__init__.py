"""Know a run before it starts.

In reading order:

section    the section `plan` of a command
counting   memory of tensors that have none
dry_run    a step of a run on such tensors, cut in any way, for any device
process    what a process that trains on a CPU holds beside its model
memory     what a rank holds, whether that fits, and what would make it fit
host       what ranks take of their host's memory at a start, a save and a load
duration   how long a run takes, and what that costs
fitting    the micro-batch size for `auto`, by trying
planned    what is known of a run, and its banner; without torch
planning   the banner of a run that is not started, with all that is known of it
"""
