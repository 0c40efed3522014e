"""One block at a time on the device; parameters and moments in host memory."""
