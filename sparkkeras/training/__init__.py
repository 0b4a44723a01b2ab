"""Training on the cluster: jobs, callbacks on the driver, and the strategies that coordinate the workers.

A strategy implements both halves of its protocol: the task that a worker runs, and what the driver does with the results.
"""
