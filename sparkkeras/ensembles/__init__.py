"""Ensembles of Keras models: trained on the cluster in one job, combined by votes, chosen greedily."""
