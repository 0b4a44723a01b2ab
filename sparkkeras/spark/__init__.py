"""What touches a SparkContext or a session of Spark Connect: workers probed and equipped, jobs run, errors translated."""
