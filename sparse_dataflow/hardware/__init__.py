"""Table of chips, and detection of the hardware of this process."""
