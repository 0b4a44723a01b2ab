"""The sizes in which rows, values and results are handled, in bytes."""

MIB = 1024 * 1024

INLINE_BYTES = 64 * 1024
"""Values and results of up to this size travel with the task; larger ones through a broadcast or a file."""

BLOCK_BYTES = 4 * MIB
"""Rows are gathered from an RDD, and copied from files to a model, in blocks of about this size."""

PIECE_BYTES = 8 * MIB
"""Workers merge results in pieces of this size."""

CHUNK_BYTES = 32 * MIB
"""Arrays and values are sent to workers in chunks of this size: the server of Spark Connect holds a chunk several times."""

HELD_BYTES = 64 * MIB
"""A worker holds predictions, and what a loader makes of its rows, up to about this size."""

EPOCH_BYTES = 32 * MIB
"""TensorFlow reads rows of up to about this size at once: its datasets in memory start faster than others."""
