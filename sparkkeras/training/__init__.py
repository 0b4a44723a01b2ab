"""How models are trained on the cluster: jobs, callbacks on the driver, and the strategies by which workers agree.

A strategy owns both halves of its protocol: the task of a worker and what the driver does with its results.
"""
