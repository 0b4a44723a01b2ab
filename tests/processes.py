"""What programs that tests start in processes of their own find around them."""

import os

SHORT_LIVED_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Java as it is best for programs of a minute: with the compiler that is quick, not the one whose code is."""

KEPT = {"PYSPARK_PYTHON", "SPARK_LOCAL_IP", "SPARK_SUBMIT_OPTS"}


def clean_environment():
    """This process's environment without what a SparkContext of it, or a server of Connect, has put there."""
    return {name: value for name, value in os.environ.items() if name in KEPT or not name.startswith(("SPARK_", "PYSPARK_"))}
