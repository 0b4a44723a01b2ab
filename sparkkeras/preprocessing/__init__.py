"""Keras's preprocessing layers, adapted to rows on the cluster."""
