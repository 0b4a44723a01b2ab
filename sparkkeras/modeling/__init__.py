"""Keras models as data: archives, state and metrics as arrays, what outputs and labels mean, custom code.

Knows neither Spark nor how training is distributed.
"""
