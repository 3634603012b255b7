"""Use the machine: processes, files, secrets, terminal and devices.

In reading order:

child     start a process, pass on signals, exit codes
fileio    small files, written whole or not at all
text      numbers, sizes, times, errors and tables for a reader
redact    replace the secrets of this machine by their names
console   lines, banner and progress bar
devices   accelerators by name, from data sheets
hardware  device names, memory, peak rates
"""
