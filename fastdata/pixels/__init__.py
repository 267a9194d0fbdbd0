"""The user's transform, cut in what runs once, on whole batches, and per sample.

``compose`` says which steps a transform has, ``steps`` reads torchvision's and timm's as ``ops``,
``program`` runs what is left for whole batches.
"""
