"""Checkpoints of training, on any file system that Spark can access: written in the background, complete or absent.

- `store.py`: what users set; the folders and files, and how a reader knows that they are complete.
- `values.py`: nested values with arrays, as JSON and one file of raw arrays.
- `background_writer.py`: the thread that writes.
"""
