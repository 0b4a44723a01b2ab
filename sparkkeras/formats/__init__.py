"""File formats: decoding of images to arrays, reading and writing of TFRecord files."""
