"""How calls travel between the driver and its workers: transports, the messages they carry and how these are signed.

A call is a name, a few fields that JSON can hold, and one body of bytes. What calls mean is up to the packages that make and
serve them: the parameter server and the hyper-parameter search.
"""
