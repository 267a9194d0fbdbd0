"""The commands, and what they measure with: nothing else of fastdata imports it."""
