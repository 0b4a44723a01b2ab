"""`SparkMLlibModel` and the conversions between arrays and the vectors, matrices and LabeledPoints of Spark MLlib."""
