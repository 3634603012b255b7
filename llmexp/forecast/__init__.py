"""Know a run before it starts. In reading order:

settings   the section `plan` of a command
counting   memory of tensors that have none
rehearsal  a step of a run on such tensors, cut in any way, for any device
memory     what a rank holds, whether that fits, and what would make it fit
planning   the banner of a run that is not started, with its memory
"""
