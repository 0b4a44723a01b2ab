"""File formats: images as arrays, TFRecord files as DataFrames."""
