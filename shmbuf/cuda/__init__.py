"""Rows in CUDA memory: made, handed from process to process, let go. Imported only when a buffer has a device; never imports torch."""
