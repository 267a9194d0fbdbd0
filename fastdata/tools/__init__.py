"""The commands of ``fastdata``, and what they share: how fast a loader is without a model.

``measure_rate`` is an empty loop with a warm-up. ``in_subprocess`` runs it in a forked copy of this
process: what the loop draws, reads, caches or breaks stays there, and its memory, threads and
worker processes end with it.
"""
