"""Blocks of rows, what a model expects of them, and the protocols of datasets; NumPy and Arrow only.

A `LocalDataset` is the in-memory implementation.
"""
