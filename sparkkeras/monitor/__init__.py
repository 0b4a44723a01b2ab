"""A page that shows runs while they run, and as a file afterwards."""
