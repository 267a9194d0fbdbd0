"""Prepared samples, read by index. A store is a file, in memory or on disk, with one writer and one reader."""
