"""Ensembles of Keras models: training of several models in one Spark job, voting, and greedy selection."""
