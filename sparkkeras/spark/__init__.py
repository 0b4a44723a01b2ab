"""Access to a SparkContext or a Spark Connect session: checks and sets up workers, runs jobs, translates errors."""
