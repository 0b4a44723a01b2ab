"""Diagnosis of a setup: can this machine and this cluster train, and what slows them down or breaks them?

- `inspection.py` describes a Python process and its machine; it runs on the driver and, pickled by value, on executors.
- `spark_facts.py` starts Spark, runs the inspection on its executors, and describes its settings and slots.
- `checks.py` are pure functions from these descriptions to `Finding`s.
- `doctor.py` has `diagnose`, and is ``python -m sparkkeras doctor``.

Keras need not be installed.
"""
