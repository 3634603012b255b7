"""Use the machine: processes, files, secrets, terminal and devices.

In reading order:

child     processes, the signals that they get and pass on, exit codes
workers   start workers, of which several are forks of one that has imported
fileio    small files, written whole or not at all
text      numbers, sizes, times, intervals, errors and tables for a reader
printing  an answer in one shape: a headline, tables of columns, notes
redact    replace the secrets of this machine by their names
console   lines, banner and progress bar
devices   cores, threads of a rank; accelerators by name, with rates and memory of data sheets
hardware  what this machine has: names, memory, peak rates
"""
