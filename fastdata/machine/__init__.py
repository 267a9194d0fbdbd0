"""What this machine gives: memory budgets, blocks that processes share, processes, ranks."""
