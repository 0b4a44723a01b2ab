"""Runs trained models on the cluster: `evaluate`, `predict`, and predictions as a column."""
