"""Stores: where prepared samples are kept and read from by index."""
