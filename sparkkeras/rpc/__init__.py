"""Remote procedure calls from workers to the driver: transports, the messages they carry and how messages are authenticated.

A call is a name, a few fields that JSON supports, and one body of bytes. The packages that make and serve calls give them
their meaning: the parameter server, the hyper-parameter search and the runner of functions.
"""
