"""Keras's `fit`, `evaluate` and `predict` on the rows of one worker: process setup, batches, replicas.

Independent of Spark.
"""
