"""A model for each key of a DataFrame: training, scoring, and the table of models."""
