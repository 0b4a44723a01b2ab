"""Parameters: how they are updated."""
