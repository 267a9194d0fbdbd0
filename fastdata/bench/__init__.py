"""The command ``fastdata bench``."""
