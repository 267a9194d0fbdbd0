"""The machine: what this process may use of it, memory that processes share, and other processes.

- ``limits``: cores and free memory, within cgroups
- ``units``: amounts of memory in text
- ``budget``: the memory budget, and the choices that follow: storage of samples, pinning of batches
- ``blocks``: blocks of shared memory, and locks on their bytes
- ``tables``: paths, targets and class names of samples in a block
- ``ranks``: ranks of a distributed run, and how those of a machine share samples
- ``workers``: jobs in threads and forked processes
- ``open_files``: open files in forked processes, each with a position of its own
"""
