"""What the Mosaic kernels are cut for: an H200 or H100 SXM (sm_90a)."""

NUM_SMS = 132
"""Multiprocessors. With fewer of them the kernels are right too, but some thread blocks wait for others to end."""

SHARED_MEMORY = 232_448 - 1024
"""Bytes that a thread block may have, less some for its barriers."""
