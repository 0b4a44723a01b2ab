"""Progress of calls that take long: their speed, and the line that shows it. Imports neither Spark nor Keras."""
