"""Strategies: how workers agree on one model."""
