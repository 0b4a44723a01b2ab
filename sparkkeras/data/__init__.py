"""Blocks of rows, their validation against a model's inputs, and the dataset protocols. Imports only NumPy and Arrow.

`LocalDataset` is the in-memory implementation of the protocols.
"""
