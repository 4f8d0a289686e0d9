"""Code that several kernels run on the device and Pallas does not offer."""
