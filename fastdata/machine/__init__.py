"""The machine: its cores and memory, memory that processes share, and other processes.

limits.py      cores and free memory that this process may use, within cgroups
units.py       amounts of memory in text
budget.py      the memory budget, and the choices that follow: storage of samples, pinned batches
blocks.py      blocks of shared memory, and locks on their bytes
tables.py      paths, targets and class names of samples in a block
ranks.py       ranks of a distributed run, and the file by which those of a machine share samples
workers.py     jobs in threads and in forked processes
open_files.py  open files of forked processes, each with its own position
"""
