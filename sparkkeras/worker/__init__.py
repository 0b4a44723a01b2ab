"""Keras's own `fit`, `evaluate` and `predict` over the rows of one worker: process, batches, replicas.

Knows nothing of Spark.
"""
