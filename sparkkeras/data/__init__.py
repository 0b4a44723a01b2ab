"""Data: how rows and arrays become blocks, and how tasks come to run over them."""
