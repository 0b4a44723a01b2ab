"""Keras models as data: archives, weights and metric state as arrays, tasks of outputs, label checks, custom code.

Independent of Spark and of the training strategy.
"""
