"""Prepared samples, read by index: files in memory or on disk, with one writer and one reader."""
