"""Samples that exist, and how each is read. A source never keeps a sample."""
