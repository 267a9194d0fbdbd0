"""The machine: its limits, what follows for storage and pinning, shared memory, and other processes."""
