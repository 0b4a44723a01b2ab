"""The data that users pass (RDDs, DataFrames, arrays; classic Spark or Connect) as datasets of blocks on the cluster."""
