"""Trained models over data on the cluster: `evaluate`, `predict`, and predictions as a column."""
